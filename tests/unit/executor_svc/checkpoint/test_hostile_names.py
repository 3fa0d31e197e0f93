"""Names in a model's files are anybody's: in a sentence they are cut, and the sentence goes on behind them."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from executor_svc.checkpoint.gguf.header import read_header
from executor_svc.checkpoint.gguf.metadata import Metadata
from executor_svc.checkpoint.gguf.tokenizer import _tokenizer
from executor_svc.models.fields import ConfigFields
from octavo_shared.errors import ModelLoadError
from tests.support.each_row import each_row

HOSTILE = "\x1b[2J" + "x" * 1_000_000
TOKENS: dict[str, object] = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a"],
}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def begin(num_tensors: int, num_values: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_values)


@each_row(
    (begin(0, 1) + text(HOSTILE) + struct.pack("<I", 99) + bytes(99), "has the type 99; 0 to 12 are possible"),
    (begin(1, 0) + text(HOSTILE) + struct.pack("<I", 9) + bytes(99), "has 9 dimensions; 1 to"),
    (begin(1, 0) + text(HOSTILE) + struct.pack("<IQIQ", 1, 1, 99, 0) + bytes(99), "has the type 99, which GGUF"),
)
def test_of_a_gguf_file(content: bytes, sentence: str, *, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError) as caught:
        read_header(path)
    check(str(caught.value), sentence)


@each_row(
    (lambda: Metadata(Path("a"), {"general.architecture": HOSTILE}).integer("size"), "has no"),
    (lambda: Metadata(Path("a"), {"general.architecture": [HOSTILE]}), "; it must be a text"),
    (lambda: ConfigFields({"size": HOSTILE}, Path("a")).integer("size"), "; it must be a whole number"),
    (
        lambda: _tokenizer(Metadata(Path("a"), {**TOKENS, "tokenizer.ggml.model": HOSTILE})),
        "; supported are gpt2, llama and",
    ),
    (
        lambda: _tokenizer(Metadata(Path("a"), {**TOKENS, "tokenizer.ggml.pre": HOSTILE})),
        ", which is not supported; supported are ",
    ),
)
def test_of_values(read: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read()
    check(str(caught.value), sentence)


def check(said: str, sentence: str) -> None:
    assert sentence in said
    assert said.isprintable()
    assert len(said) < 500
