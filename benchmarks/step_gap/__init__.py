"""How long an executor waits between two steps; see `__main__.py`."""
