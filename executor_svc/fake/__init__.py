"""The fake executor: the whole service without a model and without torch, which checks every block table."""
