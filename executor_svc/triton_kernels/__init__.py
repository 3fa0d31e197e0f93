"""Kernels in Triton for CUDA devices; the same source runs on a CPU in Triton's interpreter. Begin with `decode.py`."""
