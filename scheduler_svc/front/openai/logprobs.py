"""Log-probabilities in the shapes of OpenAI's API: those of chats, of completions, and vLLM's of prompts.

A token may be part of a character, or lose its leading space where it is decoded alone. So a token is decoded behind
another one, and where that gives no text its bytes are read from the vocabulary.
"""

import codecs
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from scheduler_svc.front.response import Response
from scheduler_svc.front.text.tokenizer import Tokenizer
from scheduler_svc.request.outputs import Alternatives

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


# OpenAI's value for tokens that are all but impossible: JSON has no infinity.
LEAST = -9999.0


# Writing this many tokens and alternatives takes a few milliseconds.
FEW_LOGPROBS = 1024


def num_logprobs(response: Response) -> int:
    """Return about how many log-probabilities an answer has."""
    num_of_prompt = len(response.prompt_logprobs) + len(response.prompt_alternatives.token_ids)
    return num_of_prompt + sum(len(each.logprobs) + len(each.alternatives.token_ids) for each in response.outputs)


class TokenLogprobs:
    """Writes the log-probabilities of one request.

    Args:
        texts: The texts of the model's tokens.
        shows_ids: Whether tokens are named by their ids.
    """

    def __init__(self, texts: TokenTexts, *, shows_ids: bool) -> None:
        self.texts = texts
        self.shows_ids = shows_ids

    def name(self, token_id: int) -> str:
        """Return the name of a token."""
        return f"token_id:{token_id}" if self.shows_ids else self.texts.text(token_id)

    def chat(
        self, token_ids: Sequence[int], logprobs: Sequence[float], alternatives: Alternatives, number: int
    ) -> list[dict[str, Any]]:
        """Return the `content` of a chat's logprobs, with `number` alternatives for each token.

        There may be more log-probabilities than tokens: some tokens are not in the text.
        """
        entries = []
        for place, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=False)):
            entry = self._entry(token_id, logprob)
            entry["top_logprobs"] = [
                self._entry(other, its_logprob) for other, its_logprob in alternatives_at(alternatives, place, number)
            ]
            entries.append(entry)
        return entries

    def prompt(
        self, token_ids: Sequence[int], logprobs: Sequence[float], alternatives: Alternatives, number: int
    ) -> list[dict[str, Any] | None]:
        """Return vLLM's `prompt_logprobs`: an object by token id for each token, and None for the first."""
        entries: list[dict[str, Any] | None] = [None]
        for place, (token_id, logprob) in enumerate(zip(token_ids[1:], logprobs, strict=True)):
            likeliest = alternatives_at(alternatives, place, number)
            entry: dict[str, Any] = {}
            for rank, (other, its_logprob) in enumerate(likeliest, 1):
                entry[str(other)] = self._prompt_entry(other, its_logprob, rank)
            entry.setdefault(str(token_id), self._prompt_entry(token_id, logprob, None))
            entries.append(entry)
        return entries

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.name(token_id),
            "logprob": max(logprob, LEAST),
            "bytes": self.texts.content(token_id),
        }

    def _prompt_entry(self, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": max(logprob, LEAST), "rank": rank, "decoded_token": self.name(token_id)}


class CompletionLogprobs:
    """The log-probabilities of one choice of a completion, which grow with its text.

    Args:
        number: Alternatives for each token.
        skips_special_tokens: Whether special tokens are not in the text.
        offset: Where the first token begins: behind the prompt, unless it is echoed.
    """

    def __init__(self, tokens: TokenLogprobs, number: int, *, skips_special_tokens: bool, offset: int = 0) -> None:
        self._tokens = tokens
        self._number = number
        self._skipped = tokens.texts.tokenizer.special_token_ids if skips_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = offset

    def prompt(self, token_ids: Sequence[int], logprobs: Sequence[float], alternatives: Alternatives) -> dict[str, Any]:
        """Return the log-probabilities of an echoed prompt; its first token has none."""
        first, offset = token_ids[0], self._advance(token_ids[0])
        rest = self.of(token_ids[1:], logprobs, alternatives)
        return {
            "tokens": [self._tokens.name(first), *rest["tokens"]],
            "token_logprobs": [None, *rest["token_logprobs"]],
            "top_logprobs": None if rest["top_logprobs"] is None else [None, *rest["top_logprobs"]],
            "text_offset": [offset, *rest["text_offset"]],
        }

    def of(self, token_ids: Sequence[int], logprobs: Sequence[float], alternatives: Alternatives) -> dict[str, Any]:
        """Return the log-probabilities of the next tokens."""
        name = self._tokens.name
        tops = []
        for place, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
            top: dict[str, float] = {}
            for other, value in (*alternatives_at(alternatives, place, self._number), (token_id, logprob)):
                top.setdefault(name(other), max(value, LEAST))  # the likeliest of several tokens with one text counts
            tops.append(top)
        return {
            "tokens": [name(token_id) for token_id in token_ids],
            "token_logprobs": [max(logprob, LEAST) for logprob in logprobs],
            # Without alternatives OpenAI has null, and vLLM, whose clients ask for ids, the token itself.
            "top_logprobs": tops if self._number or self._tokens.shows_ids else None,
            "text_offset": [self._advance(token_id) for token_id in token_ids],
        }

    def _advance(self, token_id: int) -> int:
        """Return where a token begins in the text, in characters."""
        begin = self._offset
        if token_id not in self._skipped:
            self._offset += len(self._decoder.decode(bytes(self._tokens.texts.content(token_id))))
        return begin


def alternatives_at(alternatives: Alternatives, place: int, number: int) -> list[tuple[int, float]]:
    """Return the alternatives of the token at a place."""
    begin, end = place * number, (place + 1) * number
    return list(zip(alternatives.token_ids[begin:end], alternatives.logprobs[begin:end], strict=True))
