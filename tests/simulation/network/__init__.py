"""gRPC between simulated processes: what the services see of it, and what can go wrong on the way."""
