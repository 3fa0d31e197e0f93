"""Blocks from one executor to another (docs/execution-wire.md, "Block transfer"). Begin with `transfers.py`."""
