"""Which arithmetic an executor computes with: its numerics id.

identity.py: what the id covers; begin here.
probe.py: the bits of a fixed computation, from token ids through all filters to ids and log-probabilities.
"""
