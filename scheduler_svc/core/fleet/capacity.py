"""What the next step of a planner can still admit, in plain numbers: the dispatcher's view of a planner.

Numbers only, so that dispatching a group costs microseconds. They leave out what costs too much, such as the size of
the message. The planner has the last word (`Admissions.judge`); a group that it does not admit goes back into the line.

Pure. Read next: `dispatcher.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import gt
from typing import NamedTuple

from scheduler_svc.core.fleet.inbox import Assignment, Inbox
from scheduler_svc.core.sequence import Requirements, SequenceGroup
from scheduler_svc.core.step.demand import Demand, Obstacle, Wait, fit
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.waiting.waiting_queue import Turn

# Expected tokens of an output, unless its request limits it to fewer; a power of two.
EXPECTED_OUTPUT_TOKENS = 128

# For lengths without a limit, and for the budget of a planner that is deciding a step: it has some left.
_NO_LIMIT = 2**62
_RETURNS_FIRST = Obstacle(Wait.IN_LINE, "preempted requests resume first")


class Footprint(NamedTuple):
    """What a group takes of a planner, as if none of its blocks were cached; a forked group, less what is cached.

    Attributes:
        requires: What it requires of any executor.
        block_size: Tokens in a block.
        num_tokens: Tokens to compute before its first output token.
        num_lead_tokens: The part of its first sequence.
        num_blocks: Blocks of each cache group, that of an encoder behind the others.
        block_names: Names of the blocks that the prefix cache may have.
    """

    requires: Requirements
    block_size: int
    num_tokens: int
    num_lead_tokens: int
    num_blocks: tuple[int, ...]
    block_names: list[bytes]

    @classmethod
    def of(cls, group: SequenceGroup, planner: ExecutorPlanner) -> "Footprint":
        """Return what a group takes of a planner."""
        blocks, requires = planner.blocks, group.requires
        if group.pooling is not None:
            return cls(requires, blocks.block_size, group.num_prompt_tokens, 0, blocks.nothing, [])
        sequences = group.sequences if group.is_lone else group.sequences_to_compute
        lead = sequences[0]
        if len(sequences) > 1:  # it has forked: only a plan knows the shared and cached blocks of its sequences
            plan = blocks.plan_admission(group)
            num_tokens = sum(planned.parts[0].num_new for planned in plan.sequences) * blocks.block_size
            num_lead_tokens = len(lead.token_ids) - plan.sequences[0].num_cached * blocks.block_size
            return cls(requires, blocks.block_size, num_tokens, num_lead_tokens, plan.num_needed, [])
        num_tokens = len(lead.token_ids)
        if group.is_lone:
            num_blocks = tuple([of.num_new(num_tokens, 0) for of in blocks.groups])
            if blocks.encoder is not None:
                num_blocks += (blocks.encoder.num_blocks_of(group),)
        else:
            num_blocks = blocks.num_blocks_ever_needed(group)
        names: list[bytes] = []
        if blocks.prefix_cache is not None and not group.lacks_prompt_logprobs:
            names = blocks.hash_blocks(lead)
            if len(names) * blocks.block_size == num_tokens:
                names = names[:-1]  # one token at least is computed, for its logits
        num_encoded_tokens = 0 if group.encoder_token_ids is None else len(group.encoder_token_ids)
        return cls(requires, blocks.block_size, num_tokens + num_encoded_tokens, num_tokens, num_blocks, names)

    def assignment(self, turn: Turn, capacity: "Capacity", num_cached_blocks: int) -> Assignment:
        """Return what the group takes of a planner that has its first `num_cached_blocks` in the prefix cache."""
        num_cached_tokens = num_cached_blocks * self.block_size
        is_long = capacity.planner.prefills.is_long(self.num_lead_tokens - num_cached_tokens)
        num_blocks, num_tokens = self.num_blocks, self.num_tokens - num_cached_tokens
        if num_cached_blocks:
            num_blocks = self.num_blocks_behind(num_cached_blocks, capacity.planner)
        return Assignment(turn, self.requires.num_slots, num_blocks, num_tokens, is_long)

    def num_blocks_behind(self, num_cached_blocks: int, planner: ExecutorPlanner) -> tuple[int, ...]:
        """Return the blocks of each cache group that it takes behind a cached prefix."""
        groups = zip(self.num_blocks, planner.blocks.groups, strict=False)
        num_blocks = tuple([num - of.num_saved(self.num_lead_tokens, num_cached_blocks) for num, of in groups])
        # Where the prefix is cached, so is the input of the encoder.
        return num_blocks if planner.blocks.encoder is None else (*num_blocks, 0)


@dataclass(slots=True, eq=False)
class Capacity:
    """What the next step of a planner can still admit.

    Attributes:
        inbox: The planner's inbox; what its groups take is subtracted already.
        bit: Stands for the planner in the index of block holders.
        load: Tokens that are computed before those of a newcomer.
        num_rows: Sequences that decode here, or will, beside a newcomer.
        num_free_slots: Free slots of the batch.
        num_free_blocks: Free blocks of each cache group, less the watermark.
        num_tokens: The rest of the token budget; at most 0: the step is full.
        num_long: Long prefills that it may start.
        first_return: Level and counter of the first group that was preempted here; later turns wait for it.
        number: Orders capacities that are otherwise equal.
        is_serving: Whether the planner is deciding a step.
    """

    inbox: Inbox
    planner: ExecutorPlanner
    bit: int
    load: int
    num_rows: int
    num_free_slots: int
    num_free_blocks: list[int]
    num_tokens: int
    num_long: int
    first_return: tuple[int, float] | None
    number: int
    is_serving: bool

    @classmethod
    def of(cls, inbox: Inbox, *, is_serving: bool, number: int) -> "Capacity":
        """Return the capacity of a planner.

        Args:
            inbox: The planner's inbox.
            is_serving: Whether the planner is deciding a step: then it has budget left, whatever was dispatched.
            number: As above.
        """
        planner = inbox.planner
        blocks, limits = planner.blocks, planner.limits
        return cls(
            inbox,
            planner,
            0 if blocks.prefix_cache is None else blocks.prefix_cache.bit,
            planner.load + inbox.num_tokens + inbox.num_slots,
            planner.batch.num_rows + inbox.num_slots,
            planner.batch.num_free_slots - inbox.num_slots,
            [of.num_free_beside(num) for of, num in zip(blocks.wanted, inbox.num_blocks, strict=True)],
            _NO_LIMIT if is_serving else limits.max_num_batched_tokens - planner.num_claimed_tokens - inbox.num_tokens,
            limits.max_long_prefills - planner.prefills.num_long - inbox.num_long,
            planner.groups.first_return,
            number,
            is_serving,
        )

    def rank(self, row_cost: int) -> tuple[int, int, int, "Capacity"]:
        """Return the key that orders capacities: by `cost`, then by free blocks of the first cache group."""
        return self.cost(row_cost), -self.num_free_blocks[0], self.number, self

    def cost(self, row_cost: int) -> int:
        """Return the tokens of others computed here until a newcomer has its last one; `row_cost`: for each row."""
        return self.load + self.num_rows * row_cost

    def with_budget(self) -> "Capacity":
        """Return the capacity with the whole token budget of a step."""
        return replace(self, num_tokens=self.planner.limits.max_num_batched_tokens)

    def obstacle(self, turn: Turn, footprint: Footprint, num_cached_blocks: int) -> Wait | None:
        """Return how a group that stands first in line has to wait; None: the planner can take it."""
        planner = self.planner
        if not is_open_to(planner, turn.group):
            return Wait.NEVER
        if planner.is_probing and (planner.groups or self.inbox.assignments):
            return Wait.IN_LINE
        is_behind = self.first_return is not None and self.first_return <= turn[:2]
        fitted = fit(
            footprint.requires,
            lambda: self._demand_of(turn.group, footprint, num_cached_blocks),
            num_free_slots=self.num_free_slots,
            loads=None,  # loads begin once the planner has the group
            returning=_RETURNS_FIRST if is_behind else None,
            things=self.obstacle_of_slots(footprint.requires),
            has_budget=self.num_tokens > 0,
        )
        return fitted.wait if isinstance(fitted, Obstacle) else None

    def obstacle_of_slots(self, requires: Requirements) -> Obstacle | None:
        """Return why slotted things find no slot beside those of groups dispatched here; None: they do."""
        dispatched = (given.group for given in self.inbox.assignments)
        return self.planner.batch.things.obstacle_of_slots(requires, dispatched)

    def _demand_of(self, group: SequenceGroup, footprint: Footprint, num_cached_blocks: int) -> Demand:
        planner, num_free = self.planner, self.num_free_blocks
        num_needed = footprint.num_blocks
        if not _suffice(num_free, num_needed):
            num_needed = footprint.num_blocks_behind(num_cached_blocks, planner)
            may_find_more = self.is_serving and planner.blocks.prefix_cache is not None and planner.limits.has_window
            if may_find_more or _suffice(num_free, num_needed):
                # How many of the cached blocks are unused matters: these count as free. And what a window sees may
                # be cached though the first blocks are not; to look costs too much for each planner in each pass.
                num_needed = planner.blocks.plan_admission(group).num_needed
        num_lead_tokens = footprint.num_lead_tokens - num_cached_blocks * footprint.block_size
        has_too_many_long = self.num_long <= 0 and planner.prefills.is_long(num_lead_tokens)
        is_coming = planner.blocks.is_being_computed(footprint.block_names, num_cached_blocks)
        scarcest = planner.blocks.scarcest(num_needed, num_free)
        return Demand(footprint.requires, scarcest, has_too_many_long, is_coming)

    def give(self, assignment: Assignment) -> None:
        """Put an assignment into the inbox of the planner."""
        self.inbox.put(assignment)
        self.count(assignment)

    def count(self, assignment: Assignment) -> None:
        """Count what an assignment takes."""
        self.load += assignment.num_tokens + assignment.num_slots
        self.num_rows += assignment.num_slots
        self.num_free_slots -= assignment.num_slots
        groups = self.planner.blocks.wanted
        for index, num_taken in enumerate(assignment.num_blocks):
            if self.num_free_blocks[index] == groups[index].allocator.num_blocks:  # an empty pool has no watermark
                self.num_free_blocks[index] -= groups[index].num_watermark_blocks
            self.num_free_blocks[index] -= num_taken
        self.num_tokens -= assignment.num_tokens
        self.num_long -= assignment.is_long


def _suffice(num_free: Sequence[int], num_needed: Sequence[int]) -> bool:
    return not any(map(gt, num_needed, num_free))


def num_expected_tokens(group: SequenceGroup) -> int:
    """Return how many tokens an output of a group is expected to get from now on: a power of two."""
    lead = group.sequences_to_compute[0]
    limit = group.stop_conditions.length_limit(group.num_prompt_tokens, _NO_LIMIT) - len(lead.token_ids)
    return 1 << (max(1, min(limit, EXPECTED_OUTPUT_TOKENS)) - 1).bit_length()


def is_open_to(planner: ExecutorPlanner, group: SequenceGroup) -> bool:
    """Return whether an empty planner could take the group; a leaving planner only takes groups that have run."""
    return (planner.takes_groups or group.has_run) and planner.admissions.can_ever_admit(group)
