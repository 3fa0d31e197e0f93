"""Typed access to the values of a GGUF file, with errors that name the file and the key."""

import logging
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import numpy as np
from gguf import Keys

from octavo.values.wording import shown
from octavo_shared.errors import ModelLoadError
from octavo_shared.process.events import Event


class Metadata:
    """Values by key. A getter without a default raises ModelLoadError if the key is missing, all for a wrong type."""

    def __init__(self, path: Path, values: Mapping[str, object], tokenizer_digest: bytes = b"") -> None:
        self.path = path
        self.values = values
        self.tokenizer_digest = tokenizer_digest
        self._read: set[str] = set()
        self.architecture = self.text("general.architecture")

    def key(self, key: str) -> str:
        """Return a key of the architecture: block_count becomes llama.block_count."""
        return f"{self.architecture}.{key}"

    def has(self, key: str) -> bool:
        """Whether there is a key of the architecture."""
        self._read.add(self.key(key))
        return self.key(key) in self.values

    def unread(self) -> dict[str, object]:
        """Return the values of the architecture that no getter was asked for, without its prefix."""
        prefix = self.key("")
        left = {key: value for key, value in self.values.items() if key not in self._read}
        return {key.removeprefix(prefix): value for key, value in left.items() if key.startswith(prefix)}

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number of at least 0, of the architecture; a list of equal ones, one a layer, is one."""
        return self.whole_number(self.key(key), default)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number above 0, of the architecture: a float32 as the decimal that was written, 1e-05."""
        value = self._get(self.key(key), default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < np.inf:
            raise self.wrong(self.key(key), value, "a number above 0")
        return float(str(np.float32(value)))

    def whole_number(self, key: str, default: int | None = None) -> int:
        """Return a whole number of at least 0, by its whole key."""
        value = self._get(key, default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.wrong(key, value, "a whole number")
        return value

    def whole_numbers(self, key: str) -> list[int]:
        """Return a list of whole numbers of at least 0, by its whole key."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
            raise self.wrong(key, value, "a list of whole numbers")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text, by its whole key."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false, by its whole key."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of texts, by its whole key."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.wrong(key, value, "a list of texts")
        return value

    def numbers(self, key: str) -> list[float]:
        """Return a list of numbers, by its whole key."""
        value = self._get(key, None)
        if not isinstance(value, list) or any(isinstance(each, str | bool) for each in value):
            raise self.wrong(key, value, "a list of numbers")
        return value

    def flags(self, key: str) -> list[bool]:
        """Return a list of true and false, by its whole key."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(each, bool) for each in value):
            raise self.wrong(key, value, "a list of true and false")
        return value

    def wrong(self, key: str, value: object, wanted: str) -> ModelLoadError:
        """Return the error for a value of the wrong type."""
        return ModelLoadError(f"{self.path} has {shown(key)} {shown(repr(value), 60)}; it must be {wanted}")

    def _get(self, key: str, default: object) -> object:
        self._read.add(key)
        value = self.values.get(key, default)
        if value is None:
            raise ModelLoadError(f"{self.path} has no {shown(key)}")
        return value


_logger = logging.getLogger(__name__)

# Written by converters that are newer than our gguf; llama.cpp never draws these tokens.
_NEWER = ("tokenizer.ggml.suppress_tokens",)


def is_of_converter(key: str) -> bool:
    """Whether such a key may change what is computed; a key of an architecture begins with `{arch}.`."""
    return key in _keys()


def warn_of_key(path: Path, key: str) -> None:
    """Say that a key is not read: it may matter."""
    _logger.warning(Event("gguf_key_not_read", file=str(path), key=shown(key)))


@cache
def _keys() -> frozenset[str]:
    return frozenset((*_NEWER, *_texts(Keys)))


def _texts(names: type) -> Iterator[str]:
    for value in vars(names).values():
        if isinstance(value, str):
            yield value
        elif isinstance(value, type):
            yield from _texts(value)
