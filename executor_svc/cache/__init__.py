"""The paged KV cache: how many blocks, where they lie, how they move."""
