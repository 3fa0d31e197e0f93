"""A proposer of drafts for tests: it knows what comes, and errs on purpose."""

from collections.abc import Callable, Sequence

import numpy as np

from octavo_shared.step_wire.step import Int32Array


class Knowing:
    """A proposer that knows what comes, and now and then says something else, or less.

    Args:
        texts: Prompts with the outputs that they get a token a step; of others it says nothing.
        spoiled: Returns another token in place of one.
    """

    def __init__(self, texts: Sequence[Sequence[int]], spoiled: Callable[[int], int]) -> None:
        self._texts = [[*text] for text in texts]
        self._spoiled = spoiled
        self._random = np.random.default_rng(0)
        self.num_right = self.num_wrong = 0

    def propose(
        self, token_ids: Int32Array, slots: Int32Array, num_tokens: Int32Array, most: Int32Array
    ) -> tuple[Int32Array, Int32Array]:
        """Return drafts, and how many each row has; see `Proposer`."""
        drafts, counts = np.zeros((len(slots), int(most.max(initial=0))), np.int32), np.zeros(len(slots), np.int32)
        for row, (slot, length) in enumerate(zip(slots.tolist(), num_tokens.tolist(), strict=True)):
            known = token_ids[slot, :length].tolist()
            coming = next((text[length:] for text in self._texts if text[:length] == known), [])
            counts[row] = count = min(int(most[row]), len(coming), int(self._random.integers(0, 8)))
            is_wrong = self._random.random(count) < 0.2
            drafts[row, :count] = [
                self._spoiled(token_id) if wrong else token_id
                for token_id, wrong in zip(coming[:count], is_wrong.tolist(), strict=True)
            ]
            self.num_wrong += int(is_wrong.sum())
            self.num_right += count - int(is_wrong.sum())
        return drafts, counts
