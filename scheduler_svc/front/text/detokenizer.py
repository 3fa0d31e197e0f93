"""Token ids to text while they arrive: only whole characters, nothing twice, nothing lost.

Decoding each token alone is wrong: a character may be spread over several tokens, and many
tokenizers treat the first token of a sequence differently (they drop its leading space). So a short
window is decoded: a few tokens whose text was released, as context, and the pending ones.

      ids    ... | context ............ | pending ......... |
                 | _window[:_num_context] | the rest          |
      text   ... | _released .................. | new | U+FFFD ... (held back)

The window moves once the pending text ends with a whole character. Source of the method: the two
offsets of Hugging Face's text-generation-inference, which vLLM uses as well.
"""

from collections.abc import Sequence

from scheduler_svc.front.text.tokenizer import Tokenizer

REPLACEMENT = "�"

# A character has at most four bytes, so of the last four boundaries between tokens one is clean.
MAX_CHARACTER_BYTES = 4
MAX_PENDING_TOKENS = 8


class Detokenizer:
    """Detokenizes one output.

    The pieces that `push` and `finish` return add up to `tokenizer.decode` of all tokens. The one
    exception: a byte-fallback decoder turns a run of bytes with an invalid one into replacement
    characters altogether, including good characters before it, which were released by then.

    Args:
        skip_special_tokens: Whether special tokens stay out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._skipped_ids = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._window: list[int] = []
        self._num_context = 0
        self._released = ""  # the part of the window's text that was released

    def push(self, token_id: int) -> str:
        """Add a token; return the text that it makes certain, which may be empty."""
        if token_id in self._skipped_ids or not self._tokenizer.has_id(token_id):
            return ""  # it has no text, and many such tokens would make the window grow
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.startswith(self._released):
            # A new byte spoilt the run of bytes (byte fallback) that the context ends with.
            self._move_window(self._num_context, 0, "")
            text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            new = text[len(self._released) :]
            if new:
                context = self._window[self._num_context :]
                self._move_window(self._num_context, len(context), self._decode(context))
            return new
        if len(self._window) - self._num_context > MAX_PENDING_TOKENS:
            return self._cut(text)
        new = text.rstrip(REPLACEMENT)[len(self._released) :]
        self._released += new
        return new

    def finish(self) -> str:
        """Return the text still held back: replacement characters, or nothing."""
        new = self._decode(self._window)[len(self._released) :]
        self._move_window(len(self._window), 0, "")
        return new

    def _cut(self, text: str) -> str:
        """Shorten a window that ends with invalid bytes again and again, at a character's end.

        A boundary is clean if both sides decode alone to what they are together: two parts of one
        character never do, as each would become a replacement character of its own.
        """
        end = len(self._window)
        for boundary in range(end - 1, max(end - 1 - MAX_CHARACTER_BYTES, 0), -1):
            left = self._decode(self._window[:boundary])
            right = self._decode(self._window[boundary:])
            if right and left + right == text:
                certain = right.rstrip(REPLACEMENT)
                new = (left + certain)[len(self._released) :]
                self._move_window(boundary, 0, certain)
                return new
        # Only an invalid run of byte-fallback tokens has no such boundary; its text is final enough.
        new = text[len(self._released) :]
        self._move_window(end - 1, 1, self._decode(self._window[-1:]))
        return new

    def _move_window(self, num_dropped: int, num_context: int, released: str) -> None:
        del self._window[:num_dropped]
        self._num_context = num_context
        self._released = released

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens)
