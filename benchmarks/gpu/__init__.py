"""The parts of `make gpu-check`: `parts.py` lists them, `driver.py` runs each in a process of its own.

All but the part `service` need torch, Triton, transformers, NumPy and pytest only: no RPC, no network.
"""
