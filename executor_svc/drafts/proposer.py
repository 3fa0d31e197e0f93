"""Who proposes drafts. `drafting.py` asks, and keeps what is proved."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from executor_svc.native.binding import LONG, POINTER, Function, bind
from octavo_shared.step_wire.step import Int32Array


class Proposer(Protocol):
    """Proposes the tokens that follow on sequences. What it proposes changes no output, only the time that it takes.

    A proposer that needs more than the tokens (hidden states, a cache of its own) keeps it by slot and generation.
    """

    def propose(
        self, token_ids: Int32Array, slots: Int32Array, num_tokens: Int32Array, most: Int32Array
    ) -> tuple[Int32Array, Int32Array]:
        """Return drafts, [num_rows, most.max()], and how many each row has, [num_rows], 0 to its `most`.

        Args:
            token_ids: Of all slots, [max_num_seqs, max_model_len].
            slots: Of the rows, [num_rows].
            num_tokens: How many tokens the sequence of each row has, [num_rows].
            most: How many drafts are wanted at most, [num_rows].
        """


class Grammars(Protocol):
    """Knows what may follow on outputs that follow a grammar; see `GrammarMasks`."""

    def draft(
        self, slots: list[int], outputs: Sequence[Int32Array], proposed: Sequence[list[int]], most: list[int]
    ) -> list[tuple[list[int], int]]:
        """Return for each row drafts that its grammar allows, and how many of them are the first of the proposed ones.

        The others are forced: nearly always right, but where the model splits the text in other tokens.

        Args:
            slots: Of the rows, [num_rows].
            outputs: Their tokens so far, without prompts.
            proposed: What may follow, by what is known without the grammar.
            most: How many drafts they may have.
        """


_FUNCTIONS: Sequence[Function] = (
    (
        "octavo_look_up_drafts",
        None,
        (POINTER, LONG, LONG, POINTER, POINTER, POINTER, POINTER, LONG, POINTER),
    ),
)


class PromptLookup:
    """Proposes what followed, earlier in the sequence, on the tokens that end it; see drafts.c.

    Args:
        path: The compiled library.

    Raises: NativeUnavailableError: the file cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        self._library = bind(path, _FUNCTIONS)

    def propose(
        self, token_ids: Int32Array, slots: Int32Array, num_tokens: Int32Array, most: Int32Array
    ) -> tuple[Int32Array, Int32Array]:
        """Return drafts, and how many each row has; see `Proposer`."""
        drafts, counts = np.zeros((len(slots), int(most.max(initial=0))), np.int32), np.empty(len(slots), np.int32)
        arrays = [np.ascontiguousarray(array, np.int32) for array in (slots, num_tokens, most)]
        slots_at, lengths_at, most_at = (array.ctypes.data for array in arrays)
        assert token_ids.flags.c_contiguous, "the library counts on rows that lie one after the other"
        self._library.octavo_look_up_drafts(
            token_ids.ctypes.data,
            token_ids.shape[1],
            len(slots),
            slots_at,
            lengths_at,
            most_at,
            drafts.ctypes.data,
            drafts.shape[1],
            counts.ctypes.data,
        )
        return drafts, counts
