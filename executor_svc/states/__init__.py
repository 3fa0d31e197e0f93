"""Layers with a recurrent state instead of attention. Begin with `interface.py`; `torch_states.py` is the reference."""
