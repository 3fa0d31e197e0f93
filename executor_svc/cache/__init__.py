"""The paged KV cache: how many blocks, where they lie, how they move. Begin with `cache_engine.py`."""
