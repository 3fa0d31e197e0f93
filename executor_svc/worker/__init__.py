"""What runs a step: batch table, layout, forward pass, sampled tokens. Begin with `interface.py`.

`torch_worker.py` runs a model; `loading.py` and `assembly.py` make it, `rank_process.py` makes it on several ranks.
"""
