"""gRPC servers of both services: credentials, status, health, metrics of calls."""
