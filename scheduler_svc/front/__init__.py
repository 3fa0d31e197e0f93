"""The client side of the scheduler: calls, texts, who may call; it talks to the engine in token ids."""
