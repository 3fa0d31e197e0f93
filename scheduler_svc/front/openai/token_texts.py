"""The text and the bytes of single tokens, for log-probabilities.

A token may be part of a character, or lose its leading space where it is decoded alone. So a token is decoded behind
another one, and where that gives no text its bytes are read from the vocabulary.
"""

import re
from functools import cached_property

from scheduler_svc.front.text.tokenizer import Tokenizer

_REPLACEMENT = "�"

# How vocabularies with byte fallback write a byte.
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Remembers the tokens of one tokenizer that were asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._contents: dict[int, list[int]] = {}

    def text(self, token_id: int) -> str:
        r"""Return what a token is called: its text, or as OpenAI writes bytes that are none, `bytes:\xe2\x80`."""
        text = self._texts.get(token_id)
        if text is None:
            self._look_up(token_id)
            text = self._texts[token_id]
        return text

    def content(self, token_id: int) -> list[int]:
        """Return the bytes of a token; those of all tokens of an output are the bytes of its text."""
        if token_id not in self._contents:
            self._look_up(token_id)
        return self._contents[token_id]

    def _look_up(self, token_id: int) -> None:
        text = self._decoded(token_id)
        content = text.encode()
        if _REPLACEMENT in text:
            raw = self._raw_bytes(token_id)
            if raw is not None:
                content = raw
                text = _text_of(raw)
        self._texts[token_id] = text
        self._contents[token_id] = list(content)

    def _decoded(self, token_id: int) -> str:
        """Return the text that a token adds behind another one."""
        first, decode = self._first_id, self.tokenizer.decode
        if first is None:
            return decode([token_id], False)
        before = decode([first], False)
        return decode([first, token_id], False)[len(before) :]

    @cached_property
    def _first_id(self) -> int | None:
        """A token that others can be decoded behind; None: there is no tokenizer."""
        return None if self.tokenizer.is_absent else next(iter(self.tokenizer.encode_part("a")[-1:]), None)

    def _raw_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes that the vocabulary has for a token; None: it writes no bytes."""
        token = self.tokenizer.token_of(token_id)
        if match := _BYTE.fullmatch(token):
            return bytes.fromhex(match[1])
        try:
            return bytes(_BYTE_OF_CHARACTER[character] for character in token)
        except KeyError:
            return None


def _text_of(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _byte_of_character() -> dict[str, int]:
    """Return the byte that each character stands for in byte-level vocabularies.

    Printable Latin-1 characters stand for themselves, those from U+0100 on for the other bytes in order.
    Source: Radford et al. 2019 (GPT-2), byte-level byte-pair encoding.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
