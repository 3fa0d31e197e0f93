"""A grammar as carried by requests, the step wire and the step log. Pure."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

# Longest body, in bytes: a compile cannot be cancelled, and its time grows with the body.
MAX_GRAMMAR_BYTES = 256 * 2**10


@dataclass(frozen=True)
class Grammar:
    """What an output must follow.

    `body`: UTF-8 JSON, in the form that the executor's `matcher_id` stands for; equal bodies are one grammar.
    """

    body: bytes

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the body, 32 bytes."""
        return hashlib.sha256(self.body).digest()
