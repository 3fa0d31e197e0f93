"""The engine: the live requests as tokens, the queue, and what becomes of requests."""
