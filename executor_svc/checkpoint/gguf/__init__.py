"""GGUF files, as llama.cpp writes them: a header of values and tensors, and the tensors, mapped into memory.

`header.py` reads what a file says of itself, and believes none of it; `model.py` makes of it what a directory of
Hugging Face has (`config.py`, `tokenizer.py`), `weights.py` the tensors for a decoder.

The package `gguf` has the names and sizes; its reader is not used: it makes two arrays of each token, which takes
seconds for a vocabulary of 150,000 and its merges, and it reads a truncated text without a word.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""
