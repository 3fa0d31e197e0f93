"""A model's files: where they are, what is in them, the weights. Begin with `model_directory.py`."""
