"""A byte-level tokenizer as the values of a GGUF file, and files that have a tokenizer and hardly anything else."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from tests.support.tokenizers import byte_level_alphabet

MERGES = [("h", "e"), ("\u0120", "he"), ("1", "2"), ("\u010a", "\u010a"), ("l", "l"), ("he", "ll")]
SPECIAL = ["<s>", "</s>", "<|im_end|>"]
TOKENS = [*byte_level_alphabet(), *("".join(pair) for pair in MERGES), "hello", *SPECIAL]
BYTE_LEVEL = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
    "tokenizer.ggml.token_type": [1] * (len(TOKENS) - len(SPECIAL)) + [3] * len(SPECIAL),
    "tokenizer.ggml.bos_token_id": TOKENS.index("<s>"),
}


def write_tokenizer(path: Path, values: Mapping[str, Any], architecture: str) -> None:
    """Write a file with these values."""
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(64)
    for key, value in values.items():
        add: Any = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array, bool: writer.add_bool}
        add[type(value)](key, value)
    writer.add_tensor("output_norm.weight", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
