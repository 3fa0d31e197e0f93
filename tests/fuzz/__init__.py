"""Fuzzers: hostile bytes for whatever reads bytes of others. `__main__.py` runs them, `target.py` says what one is."""
