"""What the first outputs of a grammar were allowed, kept for outputs that begin alike. NumPy only.

A mask is a function of the grammar and of the output before it alone, and so is the limit that a matcher meets. So an
output needs no matcher of its own while others have been where it is: requests that share a schema share its beginning,
and a grammar that no output can follow is compiled once, however many ask for it. A copy of a matcher would not do: the
library's copies share the lexer, so what a copy may still compute depends on the other copies, and a limit that one of
them meets stops all.
"""

from dataclasses import dataclass, field

from executor_svc.sampler.sample_rows import GrammarMask
from octavo_shared.step_wire.step import RowFlag

# Positions that a grammar keeps, the first ones that were met. A mask has a bit for each token of the vocabulary: 16
# KiB with 128,000 of them. An output that leaves them computes at most so many masks again.
MAX_KEPT_POSITIONS = 64


@dataclass(slots=True, eq=False)
class KeptPosition:
    """What may follow one beginning of an output: a mask, or why there is none; neither: it was not asked for yet."""

    mask: GrammarMask | None = None
    flag: RowFlag | None = None
    followers: "dict[int, KeptPosition]" = field(default_factory=dict)  # by token id


@dataclass(slots=True, eq=False)
class KeptMasks:
    """The positions of one grammar."""

    beginning: KeptPosition = field(default_factory=KeptPosition)
    num_positions: int = 1

    def find(self, position: KeptPosition, token_ids: list[int]) -> KeptPosition | None:
        """Return the position behind some tokens more, if it is known what may follow there."""
        found: KeptPosition | None = position
        for token_id in token_ids:
            found = None if found is None else found.followers.get(token_id)
        return None if found is None or (found.mask is None and found.flag is None) else found

    def behind(self, position: KeptPosition, token_id: int) -> KeptPosition | None:
        """Return the position behind one token more, to be filled; None: there are as many as may be."""
        found = position.followers.get(token_id)
        if found is None and self.num_positions < MAX_KEPT_POSITIONS:
            found = position.followers[token_id] = KeptPosition()
            self.num_positions += 1
        return found
