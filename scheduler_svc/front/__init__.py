"""The client side of the scheduler: calls, texts, access; it talks to the engine in token ids."""
