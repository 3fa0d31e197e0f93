"""What a group takes of a planner, and the one rule that keeps groups out.

Admissions know exactly which blocks are cached (`Admissions.judge`). The dispatcher knows numbers only, and counts the
groups that it dispatched before (`Capacity.obstacle`). Both call `fit`, and explanations to people come from it.

Pure. Read next: `admission.py`, `core/fleet/capacity.py`.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from octavo.values.wording import counted
from scheduler_svc.core.blocks.admission_plan import AdmissionPlan, Scarcest
from scheduler_svc.core.sequence import Requirements


class Wait(enum.Enum):
    """How a group that is not admitted waits."""

    IN_LINE = "in_line"
    """Groups behind it wait, too."""
    SKIPPED = "skipped"
    """Other groups may pass it."""
    NEVER = "never"
    """For ever: it does not fit here."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a group is not admitted now: `reason` in words, for people."""

    wait: Wait
    reason: str


FULL = Obstacle(Wait.IN_LINE, "it fits, and waits for token budget in a step")
HALF_OPEN = Obstacle(Wait.IN_LINE, "the executor failed recently; it gets one request until a step has finished")
_LONG = Obstacle(Wait.SKIPPED, "its prompt is long, and --max-long-prefills long prompts are already being computed")
_NO_BLOCKS = Scarcest(0, 0)
_PREFIX_IS_COMING = Obstacle(Wait.SKIPPED, "the next block of its prefix is being computed or sent")


class Demand(NamedTuple):
    """What a group takes of a planner now.

    Attributes:
        requires: What it requires of any executor.
        blocks: Blocks that it takes, and free blocks.
        has_too_many_long: Whether it is a long prefill, and too many of these run already.
        is_prefix_coming: Whether a step in flight computes the next block of its prefix.
        plan: How it would get its blocks; None: only numbers are known, or it is a text to be pooled.
    """

    requires: Requirements
    blocks: Scarcest
    has_too_many_long: bool = False
    is_prefix_coming: bool = False
    plan: AdmissionPlan | None = None

    @property
    def obstacle_of_blocks(self) -> Obstacle | None:
        """Why the blocks do not suffice; None: they do."""
        num_needed, num_free, cache_group = self.blocks
        if num_needed <= num_free:
            return None
        return Obstacle(Wait.IN_LINE, f"needs {counted(num_needed, 'block')}{cache_group}, {num_free} free")


def obstacle_of_batch(requires: Requirements, num_free_slots: int) -> Obstacle | None:
    """Return why the slots of the batch do not suffice; None: they do."""
    if requires.num_slots <= num_free_slots:
        return None
    return Obstacle(Wait.IN_LINE, f"needs {counted(requires.num_slots, 'slot')} of the batch, {num_free_slots} free")


def fit(
    requires: Requirements,
    look: Callable[[], Demand],
    *,
    num_free_slots: int,
    loads: Obstacle | None,
    returning: Obstacle | None,
    things: Obstacle | None,
    has_budget: bool = True,
) -> Demand | Obstacle:
    """Return what a group takes if it fits now, or why it does not fit.

    Args:
        requires: What the group requires of any executor.
        look: Looks for its blocks, which costs more than everything else.
        num_free_slots: Free slots of the batch.
        loads: Why it waits for slotted things that are not READY; None: it does not.
        returning: That preempted groups come back before it; None: none do.
        things: Why its slotted things find no slot; None: they do.
        has_budget: Whether there are tokens left in the step.
    """
    if requires.pooling is not None:
        return Demand(requires, _NO_BLOCKS) if has_budget else FULL
    obstacle = loads or returning or obstacle_of_batch(requires, num_free_slots) or things
    if obstacle is not None:
        return obstacle
    demand = look()
    if demand.has_too_many_long:
        return _LONG
    if demand.is_prefix_coming:
        return _PREFIX_IS_COMING
    return demand.obstacle_of_blocks or (demand if has_budget else FULL)
