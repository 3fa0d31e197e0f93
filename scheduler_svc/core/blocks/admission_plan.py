"""What an admission gets of the block pools: as a plan, of which nothing is taken yet, and once it is taken.

Pure values. Read next: `block_manager.py`, which makes both.
"""

from dataclasses import dataclass
from typing import NamedTuple

from octavo_shared.step_wire.step import EncoderInput, Int32Array
from scheduler_svc.core.blocks.encoder_blocks import EncoderPlan, Encoding
from scheduler_svc.core.blocks.group_blocks import Found
from scheduler_svc.core.sequence import Sequence


@dataclass(slots=True)
class GroupPart:
    """What a sequence gets of one cache group: `found` blocks in the prefix cache, then `num_new` new ones.

    The first `num_skipped` blocks are out of the window.
    """

    num_skipped: int
    found: Found
    num_new: int

    @property
    def num_taken(self) -> int:
        """Blocks to allocate."""
        return self.num_new + len(self.found.names_on_host)


@dataclass(slots=True)
class SequenceBlocks:
    """What `sequence` gets in an admission, of each cache group: blocks that exist already, then new ones.

    `num_cached` counts the blocks of its registered prefix. `num_shared` counts the blocks that it shares with the
    lead, which computes them in this admission. One of the two is 0. `num_in_chain` counts the blocks of its prefix
    that are registered, with a saved state behind them or not. It begins with the state named `state`; empty: anew.
    `num_brought` counts the blocks of its prefix that come from the host.
    """

    sequence: Sequence
    num_cached: int
    num_shared: int
    parts: list[GroupPart]
    num_in_chain: int = 0
    state: bytes = b""
    num_brought: int = 0


@dataclass(slots=True)
class Allocated:
    """What an admission got: of each sequence its block tables, one a cache group, and the state that it begins with.

    `encoder_inputs` are what each attends to besides; the step does the `encoding`.
    `swap_ins` are the pairs of a swap-in as on the wire; `held` are blocks of states, kept until the step is made.
    """

    tables: list[list[Int32Array]]
    state_blocks: list[int | None]
    swap_ins: list[tuple[int, int]]
    held: tuple[int, ...]
    encoder_inputs: list[EncoderInput | None]
    encoding: Encoding | None


class Scarcest(NamedTuple):
    """What a group takes of the cache group that lacks most blocks, and how many are free there.

    Attributes:
        num_needed, num_free: Blocks.
        cache_group: Names the cache group, in words to put behind "blocks"; empty: there is only one.
    """

    num_needed: int
    num_free: int
    cache_group: str = ""


@dataclass(slots=True)
class AdmissionPlan:
    """How a group that fits the empty pools would get its blocks; nothing is taken yet.

    Attributes:
        sequences: An entry for each of `SequenceGroup.sequences_to_compute`.
        num_needed: Free blocks that it takes of each cache group, that of the encoder behind the others.
        scarcest: The same of the scarcest cache group, and its free blocks less the watermark.
        encoder: How it would get the blocks of its encoder's input; None: the model has no encoder.
    """

    sequences: tuple[SequenceBlocks, ...]
    num_needed: tuple[int, ...]
    scarcest: Scarcest
    encoder: EncoderPlan | None = None
