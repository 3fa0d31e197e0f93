"""The tokenizer of an LLM for callers that are not async: `LLM.get_tokenizer()`.

The scheduler does the work, so the tokens are the same as in `LLM.generate` and `LLM.chat`.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from octavo.client import Client


class Tokenizer:
    """Has the methods that are used most of a tokenizer of transformers, under their names.

    Args:
        run: Runs what it is given with a client, and returns the result.
    """

    def __init__(self, run: Callable[[Callable[[Client], Coroutine[None, None, Any]]], Any]) -> None:
        self._run = run

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Raises:
            OctavoError: `LLM.generate` would refuse the text, too; an empty one has no tokens but special ones.
        """
        prompt = self._run(lambda client: client.tokenize(text, add_special_tokens=add_special_tokens))
        return list(prompt.token_ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids.

        Raises:
            OctavoError: the model does not know a token.
        """
        text: str = self._run(lambda client: client.detokenize(token_ids, skip_special_tokens=skip_special_tokens))
        return text

    def apply_chat_template(self, conversation: Sequence[Mapping[str, object]]) -> list[int]:
        """Return the token ids of the prompt that `LLM.chat` makes of a conversation, up to the assistant's turn.

        Raises:
            OctavoError: `LLM.chat` would refuse the conversation, too.
        """
        return list(self._run(lambda client: client.tokenize(conversation)).token_ids)
