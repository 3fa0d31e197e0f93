"""Sequences and the groups they form.

A `SequenceGroup` is one request: its prompt and how to sample and stop. A `Sequence` is one output
of it. While a sequence runs, its tokens, counters and block table live in its slot of the batch
table; while it waits, it carries its tokens itself:

                      admitted                       finished, aborted
    WAITING ────────────────────────────> RUNNING ─────────────────────> FINISHED
       ^     token_ids move to the slot      │
       └──────────────── preempted ──────────┘
               token_ids come back

A preempted sequence may have tokens that sent steps are still to deliver (`num_late_tokens`): they
are appended when they arrive, and the sequence is admitted again after the last of them.
"""

import enum
from dataclasses import dataclass, field

import numpy as np

from shared.step import Int32Array, SamplingRow


class SequenceStatus(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When a sequence ends by itself. Stop strings need text; they come in through `finish`.

    `max_tokens` None: as many as the model's length allows. `stop_token_ids` are the request's own;
    the model's end-of-sequence tokens count as well unless `ignore_eos`.
    """

    max_tokens: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """One request. `arrival` orders groups: the smaller one came first."""

    request_id: str
    prompt_token_ids: Int32Array
    sampling: SamplingRow
    stop_conditions: StopConditions
    arrival: int
    sequence: "Sequence" = field(init=False)

    def __post_init__(self) -> None:
        self.sequence = Sequence(self, self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the original prompt."""
        return len(self.prompt_token_ids)


@dataclass(slots=True, eq=False)
class Sequence:
    """One output of a group.

    `token_ids` holds prompt and output while the sequence waits, and is empty while it runs.
    `slot` and `generation` are its place in the batch table, or the last one it had; -1: none yet.
    """

    group: SequenceGroup
    token_ids: Int32Array
    status: SequenceStatus = SequenceStatus.WAITING
    slot: int = -1
    generation: int = 0
    num_late_tokens: int = 0
    num_preemptions: int = 0

    @property
    def arrival(self) -> int:
        """Order of arrival, that of the group."""
        return self.group.arrival

    def append_late_token(self, token_id: int) -> None:
        """Append a token that arrived after the preemption."""
        self.token_ids = np.append(self.token_ids, np.int32(token_id))
        self.num_late_tokens -= 1
