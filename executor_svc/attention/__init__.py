"""Attention over the paged KV cache. Begin with `interface.py`; `selection.py` chooses a backend by `rules.py`.

`torch_backend.py` is the reference; `step_reads.py` and `explicit_attention.py` are parts of it.
"""
