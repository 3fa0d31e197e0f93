"""The commands of `octavo`, one a module; octavo/cli.py finds them."""
