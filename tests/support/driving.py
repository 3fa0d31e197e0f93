"""Drive a core by hand in tests: make groups, and run steps on the toy executor."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.step import Adapter, Admission, Int32Array, SamplingRow, Step, StepResult
from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.integrity import check_integrity
from scheduler_svc.core.limits import CoreLimits, PreemptionMode, PrefillMode
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.step_plan import GroupEvent, GroupFailure
from scheduler_svc.core.step.step_updates import StepUpdates
from scheduler_svc.core.waiting.policy import FcfsPolicy, Policy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.request.parameters import BeamSearchParams, StopConditions
from tests.support.toy_executor import NextToken, ToyExecutor, count_up
from tests.support.waiting import shares_of

MAX_STEPS = 300


def small_limits(
    *,
    max_num_seqs: int = 4,
    budget: int = 16,
    max_model_len: int = 24,
    vocab_size: int = 100_000,
    block_size: int = 4,
    blocks: int = 8,
    eos_token_ids: tuple[int, ...] = (),
    watermark: float = 0.0,
    host_blocks: int = 0,
    preemption_mode: PreemptionMode | None = None,
    prefill_mode: PrefillMode = PrefillMode.CHUNKED,
    sliding_window: int = 0,
    max_allowance: int = 1,
    long_prefill_threshold: int = 0,
    max_long_prefills: int = 1,
    prefix_caching: bool = False,
    host_prefixes: bool = False,
    grammar_slots: int = 0,
    tells_loads: bool = False,
    adapter_slots: int = 0,
    max_encoder_tokens: int = 0,
    encoder_blocks: int = 0,
) -> CoreLimits:
    """Return limits that are easy to follow by hand: without a watermark, and nothing is found again."""
    return CoreLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        block_size=block_size,
        num_blocks=blocks,
        eos_token_ids=eos_token_ids,
        watermark=watermark,
        num_host_blocks=host_blocks,
        preemption_mode=preemption_mode,
        prefill_mode=prefill_mode,
        sliding_window=sliding_window,
        max_allowance=max_allowance,
        max_sample_rows=budget,
        long_prefill_threshold=long_prefill_threshold,
        max_long_prefills=max_long_prefills,
        prefix_caching=prefix_caching,
        host_prefixes=host_prefixes,
        flags_rows=grammar_slots > 0,
        num_grammar_slots=grammar_slots,
        matcher_id="toy" if grammar_slots else "",
        max_grammar_bytes=1000 if grammar_slots else 0,
        tells_loads=tells_loads,
        num_adapter_slots=adapter_slots,
        max_encoder_tokens=max_encoder_tokens,
        num_encoder_blocks=encoder_blocks,
    )


def names_of(blocks: BlockManager, token_ids: Int32Array) -> list[bytes]:
    """Return the names of the full blocks of tokens without a salt."""
    names: list[bytes] = []
    blocks.hasher.extend(names, token_ids, 0)
    return names


def group(
    arrival: int,
    prompt: int | list[int],
    conditions: StopConditions | None = None,
    *,
    num_sequences: int = 1,
    beam_search: BeamSearchParams | None = None,
    priority: int = 0,
    tenant: str = "",
    cache_salt: int = 0,
    speculate: bool = True,
    grammar: Grammar | None = None,
    adapter: Adapter | None = None,
    encoder: list[int] | None = None,
) -> SequenceGroup:
    """Return a request, named a, b, c ... by arrival.

    `prompt` is its token ids, or how many: they are 100 * (arrival + 1), + 1, + 2 ... then.
    """
    if isinstance(prompt, int):
        prompt = list(range(100 * (arrival + 1), 100 * (arrival + 1) + prompt))
    return SequenceGroup(
        request_id=chr(ord("a") + arrival),
        prompt_token_ids=np.array(prompt, np.int32),
        sampling=SamplingRow(),
        stop_conditions=conditions or StopConditions(),
        arrival=arrival,
        num_sequences=num_sequences,
        beam_search=beam_search,
        priority=priority,
        tenant=tenant,
        cache_salt=cache_salt,
        speculate=speculate,
        grammar=grammar,
        adapter=adapter,
        encoder_token_ids=None if encoder is None else np.array(encoder, np.int32),
    )


def max_tokens(num_tokens: int) -> StopConditions:
    """Return conditions that end an output by its length only."""
    return StopConditions(max_tokens=num_tokens)


@dataclass
class Bench:
    """A core with a toy executor that counts up; results wait in `results` until `process`.

    Time stands still, but where `run` waits for loads; these take `num_load_steps` beside their own.
    `outputs` holds what was delivered of each output so far, by the names of `delivered`; `failures` and `events`
    those of all decisions.
    """

    limits: CoreLimits
    next_token: NextToken = count_up
    epoch: int = 1
    policy: Policy = field(default_factory=FcfsPolicy)
    tenant_weights: Mapping[str, float] | None = None
    num_load_steps: int = 0
    now_s: float = 0.0
    results: deque[StepResult] = field(default_factory=deque)
    outputs: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    failures: list[GroupFailure] = field(default_factory=list)
    events: list[GroupEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queue = WaitingQueue(self.policy, shares_of(self.tenant_weights))
        self.planner = ExecutorPlanner(self.limits, self.queue, self.policy, self.epoch, prefix_key=b"key")
        self.executor = ToyExecutor(self.limits, self.next_token, self.num_load_steps)

    def add(
        self,
        arrival: int,
        prompt: int | list[int],
        conditions: StopConditions | None = None,
        *,
        num_sequences: int = 1,
        beam_search: BeamSearchParams | None = None,
        priority: int = 0,
        tenant: str = "",
        cache_salt: int = 0,
        speculate: bool = True,
        grammar: Grammar | None = None,
        adapter: Adapter | None = None,
        encoder: list[int] | None = None,
    ) -> SequenceGroup:
        """Queue a request that can be served; see `group`."""
        added = group(
            arrival,
            prompt,
            conditions,
            num_sequences=num_sequences,
            beam_search=beam_search,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            speculate=speculate,
            grammar=grammar,
            adapter=adapter,
            encoder=encoder,
        )
        assert self.planner.admissions.can_ever_admit(added)
        self.queue.add(added)
        return added

    def schedule(self) -> Step:
        """Decide a step and run it; its result waits."""
        step = self.try_schedule()
        assert step is not None, "the core has nothing to do"
        return step

    def try_schedule(self) -> Step | None:
        """Decide a step and run it, if there is one."""
        decision = self.planner.schedule(self.now_s)
        step = decision.step
        self.failures += decision.failures
        self.events += decision.events
        check_integrity(self.planner)
        if step is not None:
            self.results.append(self.executor.execute(step))
            assert self.executor.table.digest() == self.planner.table.digest()
        return step

    def process(self) -> StepUpdates:
        """Take the oldest result."""
        updates = self.planner.process(self.results.popleft())
        check_integrity(self.planner)
        for row, token_id in zip(updates.row_of_each_token(), updates.token_ids, strict=False):
            self.outputs[name_of(updates.sequences[row])].append(token_id)
        return updates

    def step(self) -> StepUpdates:
        """Decide a step, run it, take its result."""
        self.schedule()
        return self.process()

    def run(self, num_steps_in_flight: int = 1) -> list[Step]:
        """Go on until there is nothing left to do; return the steps. Nobody may fail or wait for ever."""
        steps: list[Step] = []
        num_failures = len(self.failures)
        for _ in range(MAX_STEPS):
            step = self.try_schedule()
            if step is not None:
                steps.append(step)
            elif not self.results and self.planner.poll_due_s is None:
                assert len(self.failures) == num_failures
                assert not len(self.queue), "somebody waits for ever"
                return steps
            while self.results and (step is None or len(self.results) >= num_steps_in_flight):
                self.process()
            if step is None and (due_s := self.planner.poll_due_s) is not None:
                self.now_s = max(self.now_s, due_s)
        raise AssertionError("the work does not end")

    @property
    def waiting(self) -> str:
        """The names of the groups in the queue, in the order of admission."""
        return names(self.queue.in_order())

    @property
    def running(self) -> str:
        """The names of the running groups, in order."""
        return names(self.planner.batch.running)

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the device pool that nobody uses."""
        return self.planner.blocks.allocator.num_free_blocks

    def blocks_of(self, sequence: Sequence) -> list[int]:
        """Return the block table of a running sequence."""
        return [int(block) for block in self.planner.table.blocks_of(sequence.slot)]


def names(groups: Iterable[SequenceGroup]) -> str:
    """Return the names of groups as one word."""
    return "".join(group.request_id for group in groups)


def name_of(sequence: Sequence) -> str:
    """Return "a" for the output of a group with one, "a0", "a1" ... for those of others."""
    group = sequence.group
    return group.request_id if len(group.sequences) == 1 else f"{group.request_id}{sequence.index}"


def delivered(updates: StepUpdates) -> dict[str, int]:
    """Return the token of each output in `updates`."""
    outputs = [name_of(sequence) for sequence in updates.sequences]
    assert len(set(outputs)) == len(outputs), "an output got two tokens in one step"
    return dict(zip(outputs, updates.token_ids, strict=True))


def chunks(step: Step) -> dict[int, int]:
    """Return the prefill chunks of a step, {slot: number of tokens}."""
    return dict(step.delta.prefill_chunks.tolist())


def admitted(step: Step) -> list[int]:
    """Return the first prompt token of each sequence that a step admits: 100 for a, 200 for b ..."""
    return [int(admission.token_ids[0]) for admission in step.delta.admissions]


def only_admission(step: Step) -> Admission:
    """Return the one admission of a step."""
    (admission,) = step.delta.admissions
    return admission


def with_logprobs(result: StepResult, logprobs: list[float]) -> StepResult:
    """Return a result that has these log-probabilities as well."""
    return replace(result, logprobs=np.array(logprobs, np.float32))


def check_pools_are_free(planner: ExecutorPlanner) -> None:
    """Assert that nobody has a block of any cache group, on the device or on the host, but copies on their way."""
    coming = Counter(copy.host.allocator for sent in planner.in_flight for copy in sent.copies)
    pools = [pool for group in planner.blocks.pools for pool in (group.allocator, group.host.allocator)]
    assert all(pool.num_used_blocks == coming[pool] for pool in pools), "a block is not free"
