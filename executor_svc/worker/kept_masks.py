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

    def forced(self, position: KeptPosition, most: int) -> list[int]:
        """Return the tokens behind a position, at most `most`, that are the only ones there, as far as all is known."""
        token_ids: list[int] = []
        found: KeptPosition | None = position
        while found is not None and found.mask is not None and len(token_ids) < most:
            bytes_with_one = found.mask.nonzero()[0]
            bits = int(found.mask[bytes_with_one[0]]) if len(bytes_with_one) == 1 else 0
            token_id = int(bytes_with_one[0]) * 8 + bits.bit_length() - 1 if bits.bit_count() == 1 else -1
            found = found.followers.get(token_id)
            if found is not None and found.mask is not None:
                token_ids.append(token_id)
        return token_ids
