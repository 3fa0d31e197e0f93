"""Which keys of a GGUF file llama.cpp's converter writes: of others, llama.cpp itself reads none."""

import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from gguf import Keys

from octavo.values.wording import shown
from octavo_shared.process.events import Event

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
