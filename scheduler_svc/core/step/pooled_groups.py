"""Pooling groups: texts that a step computes whole, for a vector or scores in place of tokens.

They have no slot and no block, so they are in no batch; all that they take is token budget and bytes of the message.
Many share a step. One is here from its admission to the result of that step, which ends it. While a text is longer
than what those that run leave of the budget, one step goes to texts alone; the next one has everybody else again, so
that no stream waits for more than one such step.
"""

from collections.abc import Iterable

from octavo_shared.step_wire.step import PoolingTask, RowFlag, StepResult
from scheduler_svc.core.group_event import FlaggedGroup
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.core.step.prefills import Shares
from scheduler_svc.core.step.step_plan import StepInFlight, StepPlan
from scheduler_svc.core.step.step_size import pooled_bytes, pooling_bytes
from scheduler_svc.request.outputs import Float32Array

_WORDS = {PoolingTask.EMBED: "vectors", PoolingTask.SCORE: "scores"}


_ANSWERS = {PoolingTask.EMBED: "the vector of the text", PoolingTask.SCORE: "the scores of the text"}


def pooled_words(tasks: Iterable[PoolingTask]) -> str:
    """Say what a model gives."""
    return " and ".join(_WORDS[task] for task in sorted(tasks))


class PooledGroups:
    """Owns the pooling groups that the steps in flight of one planner compute.

    Args:
        limits: Tasks and lengths.
        shares: Told of the tokens that a step computes for a tenant.

    Attributes:
        groups: In the order of their admission.
        needs_step: Whether a text waits that is longer than what those that run leave of a step.
    """

    def __init__(self, limits: CoreLimits, shares: Shares) -> None:
        self._limits = limits
        self._shares = shares
        self.groups: list[SequenceGroup] = []
        self.needs_step = False

    def __contains__(self, group: object) -> bool:
        """Return whether a step in flight computes the group."""
        return bool(self.groups) and group in self.groups

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def solo(self) -> SequenceGroup | None:
        """The group here that runs alone; None: none does."""
        return next((group for group in self.groups if group.runs_alone), None)

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed for them."""
        return sum(group.num_prompt_tokens for group in self.groups)

    def why_never(self, group: SequenceGroup) -> str:
        """Say why not even an empty step could compute the group, with the numbers; empty: it could."""
        limits, num_tokens = self._limits, group.num_prompt_tokens
        assert group.pooling is not None
        if group.pooling not in limits.pooling_tasks:
            offered = [f"gives {pooled_words(limits.pooling_tasks)}"] if limits.pooling_tasks else []
            offered += ["generates"] if limits.is_generative else []
            return f"the model gives no {_WORDS[group.pooling]}; it {' and '.join(offered)}"
        if num_tokens > limits.max_model_len:
            return f"the text has {num_tokens} tokens; the model takes {limits.max_model_len} (max_model_len)"
        if num_tokens > limits.max_num_batched_tokens:
            return (
                f"the text has {num_tokens} tokens; a step computes it whole, and has {limits.max_num_batched_tokens} "
                "(--max-num-batched-tokens of the scheduler or the executor)"
            )
        if self.message_bytes(group) <= limits.max_admitted_bytes:
            return ""
        return (
            f"the text and its answer take up to {self.message_bytes(group)} bytes; {limits.max_admitted_bytes} are "
            "left of --max-message-bytes of the scheduler or the executor"
        )

    def message_bytes(self, group: SequenceGroup) -> int:
        """Return a bound of the size of a text in a step and of its answer."""
        limits = self._limits
        num_values = limits.embedding_size if group.pooling is PoolingTask.EMBED else limits.num_scores
        return pooling_bytes(group.num_prompt_tokens) + pooled_bytes(num_values)

    def start(self, plan: StepPlan, group: SequenceGroup) -> None:
        """Compute a group, which is admitted, in this step."""
        num_tokens = group.num_prompt_tokens
        plan.token_budget -= num_tokens
        plan.num_admissible_bytes -= self.message_bytes(group)
        plan.pooling_groups += (group,)
        self._shares.charge(group.tenant, num_tokens)
        group.sequences[0].status = SequenceStatus.RUNNING
        self.groups.append(group)

    def take(
        self, sent: StepInFlight, result: StepResult
    ) -> tuple[list[tuple[SequenceGroup, Float32Array]], list[FlaggedGroup]]:
        """Take the answers of a step, which were checked; end their groups. Return them, and those with a flag.

        Those of groups that have ended meanwhile are dropped.
        """
        pooled: list[tuple[SequenceGroup, Float32Array]] = []
        flagged: list[FlaggedGroup] = []
        for group, output in zip(sent.pooling_groups, result.pooling_outputs, strict=True):
            if group not in self.groups:
                continue
            assert group.pooling is not None
            self.drop(group)
            group.end()
            if output.flag:
                flagged.append(FlaggedGroup(group, RowFlag(output.flag), _ANSWERS[group.pooling]))
            else:
                pooled.append((group, output.values))
        return pooled, flagged

    def drop(self, group: SequenceGroup) -> None:
        """A group is here no more: it has ended, or is computed again elsewhere."""
        self.groups.remove(group)
