"""The fake executor: the whole service without a model and without torch, which checks every block table.

Begin with `worker.py`. Nothing here may import torch; an import contract says so.
"""
