"""The commands of `octavo`, one a module; `command_line.py` finds them."""
