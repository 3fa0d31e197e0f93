"""The C library for CPUs: dense segments, paged attention and sampling, float32 with float32 or int8 weights.

`csrc/` is the library, `build.py` compiles it, `binding.py` loads it, `library.py` (begin there) and `sampling.py` call
it, `matrix.py` holds its weights. In the whole executor "native" means this library.
"""
