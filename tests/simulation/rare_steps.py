"""Rare things in steps, in lines of the log, and in what clients see."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from octavo_shared.process.events import Event
from octavo_shared.step_wire.step import EncoderInput, Step
from scheduler_svc.core.blocks.host_blocks import HostBlocks
from scheduler_svc.core.sequence import SequenceStatus
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.step_plan import Decision
from scheduler_svc.core.step.step_updates import StepUpdates
from scheduler_svc.request.life import EventKind
from tests.simulation.checks import RequestRecord
from tests.simulation.rare import Rare

_OUT_OF_BATCH = (SequenceStatus.WAITING, SequenceStatus.SWAPPED)

# As many as a scheduler has in flight at most.
_MANY_STEPS = 4


# Why tokens of a group count as cached.
_HOST, _PULLED = "from the host cache", "were pulled from"


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision of a core; its step may be None."""

    planner: ExecutorPlanner
    decision: Decision
    step: Step


def _is_full(host: HostBlocks) -> bool:
    allocator = host.allocator
    return allocator.num_used_blocks + allocator.num_cached_blocks == allocator.num_blocks


def _state_blocks(step: Step) -> list[bool]:
    """Return of each admission whether it begins with a saved state."""
    return [admission.state_block is not None for admission in step.delta.admissions]


def _inputs(step: Step) -> list[EncoderInput]:
    """Return what the sequences attend to that a step admits; several share it."""
    inputs = [admission.encoder_input for admission in step.delta.admissions]
    return [given for given in inputs if given is not None]


def _admits(decided: Decided, cause: str, *, has_run: bool = False) -> bool:
    """Return whether a group is admitted for whose cached tokens there is this cause."""
    return any(
        event.kind is EventKind.ADMITTED and cause in event.cause and (event.group.num_preemptions > 0 or not has_run)
        for event in decided.decision.events
    )


RARE_DECISIONS: tuple[Rare[Decided], ...] = (
    Rare("prefix from the host", "a request began with blocks that only the host had", lambda it: _admits(it, _HOST)),
    Rare(
        "prefix evicted from the host",
        "a prefix was copied to the host when that had no block without one",
        lambda it: any(_is_full(copy.host) for copy in it.planner.in_flight[-1].copies),
    ),
    Rare("prefix pulled", "a request began with blocks of another executor", lambda it: _admits(it, _PULLED)),
    Rare(
        "moved behind its blocks",
        "a group that had run began again with blocks of another executor",
        lambda it: _admits(it, _PULLED, has_run=True),
    ),
    Rare("block copied", "a step copied a shared block before it wrote", lambda it: bool(len(it.step.blocks_to_copy))),
    Rare(
        "fork behind a step in flight",
        "outputs forked while an earlier step was under way",
        lambda it: bool(it.step.delta.forks) and len(it.planner.in_flight) > 1,
    ),
    Rare(
        "pool full",
        "not one block of a pool was free",
        lambda it: any(not group.allocator.num_free_blocks for group in it.planner.blocks.groups),
    ),
    Rare(
        "several tokens in cache groups",
        "rows that may get several tokens had blocks in several cache groups",
        lambda it: len(it.planner.blocks.groups) > 1 and len(it.step.delta.allowances) > 0,
    ),
    Rare(
        "found behind a window",
        "a request began with cached blocks of several cache groups, and with no others of a window than it saw",
        lambda it: (
            len(it.planner.blocks.groups) > 1
            and any(
                group.first_blocks[admission.slot] > 0
                for admission in it.step.delta.admissions
                for group in it.planner.blocks.groups
            )
        ),
    ),
    Rare(
        "blocks kept of cache groups",
        "an executor had cached blocks of each of several cache groups of before its attachment",
        lambda it: (
            it.step.step_id == 1
            and len(it.planner.blocks.groups) > 1
            and all(group.prefix_cache is not None and len(group.prefix_cache) for group in it.planner.blocks.groups)
        ),
    ),
    Rare(
        "state found",
        "a request began with the saved state of another one",
        lambda it: not len(it.step.blocks_to_swap_in) and any(_state_blocks(it.step)),
    ),
    Rare(
        "state swapped in",
        "a sequence came back from the host pool with its state",
        lambda it: len(it.step.blocks_to_swap_in) > 0 and any(_state_blocks(it.step)),
    ),
    Rare(
        "states kept",
        "an executor had saved states of before its attachment",
        lambda it: (
            it.step.step_id == 1
            and it.planner.blocks.states is not None
            and len(it.planner.blocks.states.prefix_cache) > 0
        ),
    ),
    Rare(
        "input found",
        "a request began with what the encoder had made of an input before",
        lambda it: not len(it.step.blocks_to_swap_in) and any(not given.is_computed for given in _inputs(it.step)),
    ),
    Rare(
        "input encoded again",
        "a sequence came back from the host pool, and its input was encoded once more",
        lambda it: len(it.step.blocks_to_swap_in) > 0 and any(given.is_computed for given in _inputs(it.step)),
    ),
    Rare(
        "pool of the encoder full",
        "not one block of the encoder was free",
        lambda it: it.planner.blocks.encoder is not None and not it.planner.blocks.encoder.num_free,
    ),
    Rare(
        "inputs kept",
        "an executor had encoded inputs of before its attachment",
        lambda it: (
            it.step.step_id == 1
            and (encoder := it.planner.blocks.encoder) is not None
            and encoder.prefix_cache is not None
            and len(encoder.prefix_cache) > 0
        ),
    ),
    Rare(
        "many steps in flight",
        "four steps of one executor were under way",
        lambda it: len(it.planner.in_flight) >= _MANY_STEPS,
    ),
    Rare("grammar dropped", "a grammar made room for another one", lambda it: bool(it.step.delta.grammar_drops)),
    Rare(
        "texts beside decodes",
        "a step pooled texts beside those that decode",
        lambda it: bool(it.step.pooling_inputs) and it.planner.in_flight[-1].layout.num_decodes > 0,
    ),
    Rare(
        "texts before decodes",
        "those that decode waited a step for a text that they left no room for",
        lambda it: (
            bool(it.step.pooling_inputs)
            and not it.planner.in_flight[-1].layout.num_decodes
            and bool(it.planner.batch.is_decoding.any())
        ),
    ),
    Rare("probing step", "an executor in doubt was given a request", lambda it: it.planner.is_probing),
)


@dataclass(frozen=True, slots=True)
class Processed:
    """A result that a core took."""

    planner: ExecutorPlanner
    updates: StepUpdates


RARE_RESULTS: tuple[Rare[Processed], ...] = (
    Rare(
        "late token", "a result brought a token to a sequence that had ended", lambda it: it.updates.num_void_rows > 0
    ),
    Rare(
        "several tokens",
        "a step brought several tokens to a sequence",
        lambda it: any(count > 1 for count in it.updates.counts or ()),
    ),
    Rare(
        "end inside a span",
        "a sequence ended with one of several tokens of a step",
        lambda it: any((it.updates.counts or [1])[row] > 1 for row in it.updates.finished if it.updates.counts),
    ),
    Rare(
        "token of a preempted sequence",
        "a token came for a sequence that had left the batch",
        lambda it: any(sequence.status in _OUT_OF_BATCH for sequence in it.updates.sequences),
    ),
)


def _says(pattern: str) -> Callable[[Event], bool]:
    search = re.compile(pattern).search
    return lambda event: search(str(event)) is not None


def _any(event: Event) -> bool:
    return True


# By the name of the event.
RARE_LINES: tuple[tuple[str, Rare[Event]], ...] = (
    ("step_stream_resumed", Rare("stream resumed", "a step stream went on where it broke", _any)),
    ("stream_opened", Rare("answers sent again", "an executor sent results that got lost", _says("resent=[1-9]"))),
    (
        "attached",
        Rare("blocks kept", "an executor had cached blocks of before its attachment", _says("kept_blocks=[1-9]")),
    ),
    ("no_executor", Rare("hang noticed", "a step took much longer than it should", _says("hangs"))),
    (
        "no_executor",
        Rare("silent for a lease", "an executor answered no heartbeat", _says("no heartbeat was answered")),
    ),
    ("no_executor", Rare("leased to another", "an executor belonged to another scheduler", _says("holds the lease"))),
    (
        "no_executor",
        Rare("fenced off", "a scheduler's epoch had ended", _says("is not the current one|ended: scheduler")),
    ),
    ("step_failed", Rare("step failed", "an executor failed a step", _any)),
    ("no_executor", Rare("nonsense answered", "a result did not fit its step", _says("sampled|result|rows|tokens"))),
    (
        "no_executor",
        Rare(
            "update failed",
            "one executor of a fleet did not take new weights",
            _says("did not take the new weights|UpdateWeights"),
        ),
    ),
    (
        "no_executor",
        Rare("other weights refused", "an executor had other weights than the fleet", _says("their digest is")),
    ),
    ("engine_not_used", Rare("two engines of one id", "a front had joined the former engine of a scheduler too", _any)),
    ("probe_succeeded", Rare("probe succeeded", "an executor in doubt worked", _any)),
    ("requests_wait_for_a_larger_executor", Rare("too large for those here", "requests waited for a larger one", _any)),
)

RARE_ANSWERS: tuple[Rare[RequestRecord], ...] = (
    Rare("duplicate id refused", "a live request had the id already", lambda it: _failed(it, "RequestExistsError")),
    Rare("queue full", "a request was refused since too many waited", lambda it: _failed(it, "OverloadedError")),
    Rare("logits not finite", "the model had no numbers for a request", lambda it: _failed(it, "InternalError")),
    Rare(
        "slow reader answered", "who read slowly got all of it", lambda it: _finished(it) and it.plan.reads_every_s > 0
    ),
    Rare("drawn seed answered", "the scheduler drew its seed", lambda it: _finished(it) and it.shape.seed > 0),
    Rare("answer continued", "a client went on with what was cut", lambda it: _num_resumptions(it) > 0),
)


def _failed(record: RequestRecord, *names: str) -> bool:
    return type(record.error).__name__ in names


def _num_resumptions(record: RequestRecord) -> int:
    return 0 if record.finished is None else record.finished.num_resumptions


def _finished(record: RequestRecord) -> bool:
    return record.finished is not None and record.error is None
