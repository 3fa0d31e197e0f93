"""Makes ordinary text of the special tokens in a conversation; the template's own stay special.

A tokenizer reads `<|im_end|>` as a special token wherever it stands. So an unguessable mark is put into each one in the
conversation. The rendered prompt is cut wherever the mark appears, and each piece is tokenized by itself.
"""

import re
import secrets
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from scheduler_svc.front.text.conversation import Conversation

# Digits pass unchanged through whatever a template does to a text: JSON, escapes, capital letters.
_NUM_MARK_DIGITS = 32


class SpecialTokenBreaker:
    """Breaks up special tokens in the texts of a request.

    Args:
        special_tokens: As written in text; a token of a single character cannot be broken up.
    """

    def __init__(self, special_tokens: Iterable[str]) -> None:
        longest_first = sorted((token for token in special_tokens if len(token) > 1), key=len, reverse=True)
        # A token may begin inside another one, so the search also finds tokens behind the first character.
        starts = "|".join(f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in longest_first)
        self._starts = re.compile(starts) if starts else None

    def break_up(self, conversation: Conversation) -> tuple[Conversation, str]:
        """Return the conversation with a mark in each special token, and the mark."""
        mark = "".join(secrets.choice("0123456789") for _ in range(_NUM_MARK_DIGITS))
        if self._starts is None:
            return conversation, mark

        def broken(value: Any) -> Any:
            match value:
                case str():
                    return self._starts.sub(lambda start: start[0] + mark, value)  # type: ignore[union-attr]
                case list() | tuple():
                    return [broken(item) for item in value]
                case dict():
                    return {broken(key): broken(item) for key, item in value.items()}
            return value

        return replace(
            conversation,
            messages=broken(conversation.messages),
            tools=broken(conversation.tools),
            template_kwargs=broken(conversation.template_kwargs),
        ), mark
