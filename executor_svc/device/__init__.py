"""The device of a rank: which one (`selection.py`), its memory, copies to it, and whether it still computes."""
