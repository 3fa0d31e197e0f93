"""Random workloads for a core, and a driver that plays them while it checks everything.

A workload is limits, requests of every kind, and what befalls them: clients that leave, stop strings,
a lost executor, results that are held back. The driver plays it with so many steps in flight on the toy
executor and compares every output with the one that the plainest loop makes of the prompt alone.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st

from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.step import Adapter, PoolingTask, SamplingRow, StepResult
from scheduler_svc.core.integrity import check_integrity
from scheduler_svc.core.limits import CoreLimits, PoolLimits, PreemptionMode, PrefillMode
from scheduler_svc.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.waiting.policy import FcfsPolicy, Policy, PriorityPolicy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.request.life import EventKind
from scheduler_svc.request.outputs import FinishReason
from scheduler_svc.request.parameters import BeamSearchParams, EarlyStopping, StopConditions
from tests.support.driving import check_pools_are_free
from tests.support.toy_executor import (
    ToyExecutor,
    content_of,
    content_of_input,
    generate_alone,
    hashed_next_token,
    search_alone,
    values_of,
)

VOCAB_SIZE = 13
GRAMMARS = [Grammar(b"grammar %d" % number) for number in range(4)]
# The last one cannot be loaded, and the one before it is found with another content.
ADAPTERS = [Adapter(f"adapter {number}", content_of(Adapter(f"adapter {number}"))) for number in range(3)]
ADAPTERS += [Adapter("adapter 9", bytes(32)), Adapter("broken")]
MAX_ROUNDS = 5000


@dataclass(frozen=True)
class Request:
    """One request of a workload; times in rounds of the driver."""

    prompt: list[int]
    conditions: StopConditions
    arrival_round: int = 0
    abort_round: int | None = None
    stop_string_at: int | None = None
    """Number of output tokens with which the text of the last output holds a stop string."""
    stop_found_late: int = 0
    """Rounds from then until that is noticed."""
    num_sequences: int = 1
    beam_search: BeamSearchParams | None = None
    priority: int = 0
    tenant: str = ""
    cache_salt: int = 0
    speculate: bool = True
    grammar: Grammar | None = None
    adapter: Adapter | None = None
    pooling: PoolingTask | None = None
    token_type_ids: bytes = b""
    encoder: list[int] | None = None

    def to_group(self, arrival: int) -> SequenceGroup:
        """Return the request as a core takes it."""
        return SequenceGroup(
            request_id=f"r{arrival}",
            prompt_token_ids=np.array(self.prompt, np.int32),
            sampling=SamplingRow(),
            stop_conditions=self.conditions,
            arrival=arrival,
            num_sequences=self.num_sequences,
            beam_search=self.beam_search,
            priority=self.priority,
            tenant=self.tenant,
            cache_salt=self.cache_salt,
            speculate=self.speculate,
            grammar=self.grammar,
            adapter=self.adapter,
            pooling=self.pooling,
            token_type_ids=self.token_type_ids,
            encoder_token_ids=None if self.encoder is None else np.array(self.encoder, np.int32),
        )


@dataclass(frozen=True)
class Workload:
    """Everything that happens in one example."""

    limits: CoreLimits
    requests: list[Request]
    evacuate_round: int | None = None
    drains: list[bool] = field(default_factory=lambda: [False])
    """Whether round i, modulo its length, takes all results before it decides again."""
    policy: Policy = field(default_factory=FcfsPolicy)
    num_load_steps: int = 0
    """Of each grammar, where the executor tells the ends of loads."""


@st.composite
def limits(draw: st.DrawFn) -> CoreLimits:
    """Draw limits so small that everything lacks now and then."""
    block_size = draw(st.integers(1, 5))
    max_model_len = draw(st.integers(2, 24))
    max_num_seqs = draw(st.integers(1, 6))
    num_grammar_slots = draw(st.sampled_from([0, 1, 1, 2, 3]))
    max_allowance = draw(st.sampled_from([1, 1, 2, 5]))
    budget = max_num_seqs + draw(st.integers(0, 12))
    # A group whose layers have a window, beside the first one: as small as may be, or with room for more.
    more_groups: tuple[PoolLimits, ...] = ()
    if (window := draw(st.sampled_from([0, 0, 3, 8]))) > 0:
        least = min(-(-max_model_len // block_size), -(-(window + budget) // block_size) + 2)
        num_host_blocks = draw(st.sampled_from([0, 3, 8, 40]))
        more_groups = (PoolLimits(least + draw(st.sampled_from([0, 0, 2, 12])), window, num_host_blocks),)
    return CoreLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        block_size=block_size,
        num_blocks=-(-max_model_len // block_size) + draw(st.integers(0, 12)),
        eos_token_ids=draw(st.sampled_from([(), (7,), (3, 9)])),
        watermark=draw(st.sampled_from([0.0, 0.01, 0.3])),
        num_host_blocks=draw(st.sampled_from([0, 3, 8, 40])),
        host_prefixes=draw(st.booleans()),
        preemption_mode=draw(st.sampled_from([None, None, *PreemptionMode])),
        prefill_mode=draw(st.sampled_from([PrefillMode.CHUNKED, *PrefillMode])),
        sliding_window=draw(st.sampled_from([0, 0, 0, 3, 8])),
        more_groups=more_groups,
        max_allowance=max_allowance,
        max_sample_rows=max_num_seqs + draw(st.integers(0, 12)),
        long_prefill_threshold=draw(st.sampled_from([0, 0, 3])),
        prefix_caching=draw(st.booleans()),
        flags_rows=num_grammar_slots > 0,
        num_grammar_slots=num_grammar_slots,
        num_adapter_slots=draw(st.sampled_from([0, 1, 2])),
        matcher_id=draw(st.sampled_from(["first", "first", "second"])),
        max_grammar_bytes=100,
        pooling_tasks=draw(st.sampled_from([(PoolingTask.EMBED,), (PoolingTask.EMBED, PoolingTask.SCORE)])),
        embedding_size=3,
        num_scores=1,
    )


@st.composite
def requests_within(
    draw: st.DrawFn, bounds: CoreLimits, common: list[int], adapters: list[Adapter] = ADAPTERS
) -> Request:
    """Draw a request that fits; half of them begin like the others."""
    token_id = st.integers(0, VOCAB_SIZE - 1)
    prompt = draw(st.sampled_from([[], common])) + draw(st.lists(token_id, max_size=bounds.max_model_len))
    kind = draw(st.sampled_from(["one", "one", "several", "beams", "text"]))
    if kind == "text":
        return draw(texts_within(bounds, prompt))
    num_sequences, beam_search = 1, None
    if kind == "several" and bounds.max_num_seqs > 1:
        num_sequences = draw(st.integers(2, min(3, bounds.max_num_seqs)))
    if kind == "beams" and bounds.max_num_seqs > 1:
        beam_search = BeamSearchParams(
            beam_width=draw(st.integers(2, min(3, bounds.max_num_seqs))),
            length_penalty=draw(st.sampled_from([0.0, 1.0, -1.0])),
            early_stopping=draw(st.sampled_from(EarlyStopping)),
        )
    return Request(
        prompt=prompt[: bounds.max_model_len - 1] or [draw(token_id)],
        conditions=StopConditions(
            max_tokens=draw(st.none() | st.integers(1, 12)),
            stop_token_ids=draw(st.frozensets(token_id, max_size=1)),
            ignore_eos=draw(st.booleans()),
        ),
        arrival_round=draw(st.integers(0, 12)),
        abort_round=draw(st.none() | st.none() | st.integers(0, 25)),
        stop_string_at=draw(st.none() | st.none() | st.integers(1, 8)),
        stop_found_late=draw(st.integers(0, 4)),
        num_sequences=num_sequences,
        beam_search=beam_search,
        priority=draw(st.integers(0, 1)),
        tenant=draw(st.sampled_from(["", "", "x"])),
        cache_salt=draw(st.sampled_from([0, 0, 1])),
        speculate=draw(st.booleans()),
        grammar=draw(st.none() | st.sampled_from(GRAMMARS)) if bounds.num_grammar_slots and kind != "beams" else None,
        adapter=draw(st.none() | st.sampled_from(adapters)) if bounds.num_adapter_slots and kind != "beams" else None,
    )


@st.composite
def texts_within(draw: st.DrawFn, bounds: CoreLimits, tokens: list[int]) -> Request:
    """Draw a text that a step computes whole."""
    prompt = tokens[: min(bounds.max_model_len, bounds.max_num_batched_tokens)] or [0]
    return Request(
        prompt=prompt,
        conditions=StopConditions(max_tokens=0),
        arrival_round=draw(st.integers(0, 12)),
        abort_round=draw(st.none() | st.none() | st.integers(0, 25)),
        priority=draw(st.integers(0, 1)),
        tenant=draw(st.sampled_from(["", "", "x"])),
        pooling=draw(st.sampled_from(bounds.pooling_tasks)),
        token_type_ids=draw(st.sampled_from([b"", bytes(index % 2 for index in range(len(prompt)))])),
    )


MORE_ENCODER_BLOCKS = st.sampled_from([0, 1, 8])


def with_encoder(bounds: CoreLimits, longest: int, num_more_blocks: int) -> CoreLimits:
    """Return the limits of a model with an encoder that takes so many tokens; 0: it has none."""
    num_blocks = -(-longest // bounds.block_size) + num_more_blocks
    return replace(bounds, max_encoder_tokens=longest, num_encoder_blocks=num_blocks if longest else 0)


def inputs_up_to(longest: int) -> st.SearchStrategy[list[int] | None]:
    """Draw one of few inputs of an encoder, so that some are equal; None if there is no encoder."""
    inputs = [[index] * length for index in (1, 2) for length in (1, longest)]
    return st.sampled_from(inputs) if longest else st.none()


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Draw a workload."""
    bounds = draw(limits())
    longest = draw(st.sampled_from([0, 0, min(7, bounds.max_num_batched_tokens)]))
    bounds = with_encoder(bounds, longest, draw(MORE_ENCODER_BLOCKS))
    common = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=bounds.max_model_len))
    requests = [draw(requests_within(bounds, common)) for _ in range(draw(st.integers(1, 8)))]
    requests = [one if one.pooling else replace(one, encoder=draw(inputs_up_to(longest))) for one in requests]
    return Workload(
        replace(bounds, tells_loads=draw(st.booleans())),
        sorted(requests, key=lambda request: request.arrival_round),
        evacuate_round=draw(st.none() | st.integers(0, 25)),
        drains=draw(st.lists(st.booleans(), min_size=1, max_size=6)),
        policy=PriorityPolicy() if draw(st.booleans()) else FcfsPolicy(),
        num_load_steps=draw(st.integers(0, 4)),
    )


@dataclass
class Driver:
    """Plays a workload, checking after every call; `outputs` and `reasons` are what clients saw."""

    workload: Workload
    num_steps_in_flight: int
    outputs: dict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[tuple[int, int], FinishReason] = field(default_factory=dict)
    cut_short: set[tuple[int, int]] = field(default_factory=set)
    failed: list[int] = field(default_factory=list)
    searches_over: set[int] = field(default_factory=set)
    values: dict[int, list[float]] = field(default_factory=dict)
    num_preemptions: dict[PreemptionMode, int] = field(default_factory=lambda: dict.fromkeys(PreemptionMode, 0))
    num_cached_tokens: int = 0
    num_spans: int = 0

    def __post_init__(self) -> None:
        self.limits = self.workload.limits
        self.queue = WaitingQueue(self.workload.policy)
        self.groups: dict[int, SequenceGroup] = {}
        self.stops: list[tuple[int, Sequence]] = []  # of a stop string: the round in which it is noticed
        self.start_executor(epoch=1)

    def start_executor(self, epoch: int) -> None:
        """Attach to an empty executor."""
        self.planner = ExecutorPlanner(self.limits, self.queue, self.workload.policy, epoch, prefix_key=b"key")
        self.executor = ToyExecutor(self.limits, hashed_next_token(VOCAB_SIZE), self.workload.num_load_steps)
        self.results: list[StepResult] = []

    def run(self) -> None:
        """Play the workload to its end."""
        last_arrival = self.workload.requests[-1].arrival_round
        for now in range(MAX_ROUNDS):
            self.let_requests_arrive(now)
            self.let_clients_leave(now)
            self.find_stop_strings(now)
            if now == self.workload.evacuate_round:
                self.lose_the_executor()
            progressed = self.schedule(now)
            drains = self.workload.drains[now % len(self.workload.drains)]
            while self.results and (drains or not progressed or len(self.results) >= self.num_steps_in_flight):
                self.process(now)
                progressed = True
            waits = self.results or self.planner.poll_due_s is not None
            if not progressed and now >= last_arrival and not waits:
                assert not self.planner.groups, "the core has nothing to do, and work is left"
                assert not len(self.queue), "somebody waits for ever"
                self.count()
                return
        raise AssertionError("the workload does not end")

    def let_requests_arrive(self, now: int) -> None:
        for arrival, request in enumerate(self.workload.requests):
            if request.arrival_round == now:
                group = self.groups[arrival] = request.to_group(arrival)
                if self.planner.admissions.can_ever_admit(group):
                    self.queue.add(group)
                else:
                    assert group.num_slots > 1, "a lone sequence always fits"
                    self.failed.append(arrival)

    def is_live(self, group: SequenceGroup) -> bool:
        return group.arrival not in self.failed and bool(group.live_sequences)

    def let_clients_leave(self, now: int) -> None:
        for arrival, group in self.groups.items():
            request = self.workload.requests[arrival]
            if request.abort_round == now and self.is_live(group):
                self.cut_short |= {(arrival, sequence.index) for sequence in group.live_sequences}
                self.planner.abort(group)
                check_integrity(self.planner)

    def find_stop_strings(self, now: int) -> None:
        due = [sequence for at, sequence in self.stops if at <= now]
        self.stops = [(at, sequence) for at, sequence in self.stops if at > now]
        for sequence in due:
            if self.is_live(sequence.group) and sequence.status is not SequenceStatus.FINISHED:
                self.cut_short.add(self.name_of(sequence))
                if sequence.group.is_last(sequence):
                    self.planner.abort(sequence.group)
                else:
                    self.planner.finish(sequence)
                check_integrity(self.planner)

    def lose_the_executor(self) -> None:
        groups = self.planner.evacuate()
        self.count()
        live = [group for group in self.groups.values() if self.is_live(group)]
        assert {g.arrival for g in [*groups, *self.queue]} == {g.arrival for g in live}
        self.start_executor(self.planner.epoch + 1)
        for group in groups:
            for sequence in group.live_sequences:
                assert sequence.status is SequenceStatus.WAITING
                if group.beam_search is None:
                    known = self.workload.requests[group.arrival].prompt + self.outputs[group.arrival, sequence.index]
                    assert sequence.token_ids.tolist() == known
            self.queue.add(group)

    def count(self) -> None:
        for mode, count in self.planner.preemption.num_preemptions.items():
            self.num_preemptions[mode] += count

    def schedule(self, now: int) -> bool:
        decision = self.planner.schedule(float(now))
        for failure in decision.failures:
            may_fail = len(failure.group.sequences) > 1 or failure.group.adapter in ADAPTERS[3:]
            assert may_fail, f"a lone sequence failed: {failure.message}"
            assert failure.group.arrival not in self.failed, "a group failed twice"
            self.failed.append(failure.group.arrival)
        check_integrity(self.planner)
        happened = {event.kind for event in decision.events}
        if decision.in_flight is None:
            return False
        step, layout = decision.in_flight.step, decision.in_flight.layout
        if self.limits.prefill_mode is PrefillMode.FIRST and (len(step.delta.prefill_chunks) or step.pooling_inputs):
            swapped_in = EventKind.SWAPPED_IN in happened
            assert swapped_in or not layout.num_decodes, "prefill and decode are mixed"
        digest = self.planner.table.digest()
        self.results.append(self.executor.execute(step))
        assert self.executor.table.digest() == digest
        check_lengths(self.planner.table, self.executor.table, are_resolved=False)
        return True

    def process(self, now: int) -> None:
        updates = self.planner.process(self.results.pop(0))
        check_integrity(self.planner)
        check_lengths(self.planner.table, self.executor.table, are_resolved=not self.planner.in_flight)
        token_ids = iter(updates.token_ids)
        for row, sequence in enumerate(updates.sequences):
            name = self.name_of(sequence)
            assert name not in self.cut_short, "a token came after the client left"
            assert name not in self.reasons, "a token came after the end"
            before = len(self.outputs[name])
            count = 1 if updates.counts is None else updates.counts[row]
            self.outputs[name] += itertools.islice(token_ids, count)
            self.num_spans += count > 1
            if row in updates.finished:
                assert sequence.status is SequenceStatus.FINISHED
                self.reasons[name] = updates.finished[row]
            elif before < (self.stop_length_of(sequence) or 0) <= len(self.outputs[name]):
                self.stops.append((now + self.workload.requests[sequence.group.arrival].stop_found_late, sequence))
        assert not list(token_ids)
        self.find_stop_strings(now)
        for group, values in updates.pooled:
            assert group.arrival not in self.values, "a text was answered twice"
            assert (group.arrival, 0) not in self.cut_short, "an answer came after the client left"
            self.values[group.arrival] = values.tolist()
        for group in updates.finished_searches:
            assert group.arrival not in self.searches_over
            assert not group.live_sequences
            self.searches_over.add(group.arrival)

    def stop_length_of(self, sequence: Sequence) -> int | None:
        request = self.workload.requests[sequence.group.arrival]
        return request.stop_string_at if sequence.index == request.num_sequences - 1 else None

    def name_of(self, sequence: Sequence) -> tuple[int, int]:
        return sequence.group.arrival, sequence.index


def check_lengths(truth: BatchTable, mirror: BatchTable, *, are_resolved: bool) -> None:
    """Assert that the executor's lengths are between the scheduler's, and equal once every step is resolved there."""
    live = truth.live
    for column in ("num_tokens", "num_scheduled_tokens"):
        upper, found = getattr(truth, column)[live], getattr(mirror, column)[live]
        assert (found <= upper).all(), f"{column} is above what was reserved"
        assert (found >= upper - truth.num_open_tokens[live]).all(), f"{column} is below what is certain"
        assert not are_resolved or (found == upper).all(), f"{column} differs"
    assert not mirror.num_open_tokens[live].any(), "an executor resolves at once"
    if are_resolved:
        for slot in live.nonzero()[0].tolist():
            assert truth.tokens_of(slot).tolist() == mirror.tokens_of(slot).tolist(), "the tokens differ"


def play(workload: Workload, num_steps_in_flight: int) -> Driver:
    """Run the workload to its end and check everything that must hold there."""
    driver = Driver(workload, num_steps_in_flight)
    driver.run()
    for arrival, request in enumerate(workload.requests):
        group = driver.groups[arrival]
        driver.num_cached_tokens += group.num_cached_tokens
        if request.beam_search is not None:
            check_search(driver, arrival)
            continue
        if request.pooling is not None:
            alone = values_of(request.prompt, request.token_type_ids, request.pooling).tolist()
            assert driver.values.get(arrival) == (None if (arrival, 0) in driver.cut_short else alone)
            continue
        for index in range(request.num_sequences):
            alone, reason = generate_alone(
                request.prompt,
                request.conditions,
                workload.limits,
                hashed_next_token(VOCAB_SIZE),
                index,
                request.grammar,
                request.adapter,
                *attended_by(group),
            )
            output = driver.outputs[arrival, index]
            if (arrival, index) in driver.cut_short or (
                arrival in driver.failed and (arrival, index) not in driver.reasons
            ):
                assert output == alone[: len(output)]
                assert (arrival, index) not in driver.reasons
            else:
                assert output == alone
                assert driver.reasons[arrival, index] is reason
    check_pools_are_free(driver.planner)
    assert not driver.executor.table.live.any()
    assert not any(pool.num_in_use for pool in driver.planner.batch.things.pools)
    return driver


def attended_by(group: SequenceGroup) -> list[int]:
    """Return what stands for the input of a group's encoder, if it has one."""
    token_ids = group.encoder_token_ids
    return [] if token_ids is None else [content_of_input(token_ids, group.shared_salt)]


def check_search(driver: Driver, arrival: int) -> None:
    """A search that was left alone found what the plainest loop finds."""
    request, group = driver.workload.requests[arrival], driver.groups[arrival]
    assert request.beam_search is not None
    if arrival in driver.failed or any(name[0] == arrival for name in driver.cut_short):
        assert arrival not in driver.searches_over
        return
    assert arrival in driver.searches_over
    assert group.beams is not None
    found = [(h.token_ids.tolist(), h.score, h.finish_reason) for h in group.beams.finished_hypotheses()]
    alone = search_alone(request.prompt, request.beam_search, request.conditions, driver.limits, attended_by(group))
    assert found == [(h.token_ids.tolist(), h.score, h.finish_reason) for h in alone]
