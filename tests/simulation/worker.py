"""A fake executor's worker whose steps go wrong when told to, and which tells of what goes wrong by itself."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from executor_svc.fake.worker import FakeWorker
from executor_svc.sampler.sample_rows import SampleRows
from executor_svc.worker.interface import Agree, DoneStep, RunningStep
from octavo_shared.errors import ModelLoadError, StepFailedError
from octavo_shared.step_wire.batch_table import StepLayout
from octavo_shared.step_wire.cache_group import CacheGroup, CacheKind, split_moves
from octavo_shared.step_wire.step import Step, StepResult, TokenCounts, no_slots
from tests.simulation.adapters import Adapters
from tests.simulation.alone import EOS_PROBABILITY
from tests.simulation.block_checks import BlockChecks, content_key
from tests.simulation.plan import ExecutorPlan
from tests.simulation.remembered import keys_of, remember, remembered
from tests.simulation.shapes import (
    MAX_ENCODER_TOKENS,
    MAX_MODEL_LEN,
    NAN_TOKEN,
    NUM_GRAMMAR_SLOTS,
    POISON_TOKEN,
    POISONED,
)
from tests.simulation.step_thread import SimulatedStepThread
from tests.simulation.weights import SpokenHistories

# What a step leaves in blocks that failed while it wrote them: no history has it.
GARBAGE = 1


class SimulatedWorker(FakeWorker):
    """See `FakeWorker`, which checks every block that a step reads; `BlockChecks` looks at the others.

    Args:
        plan: What it is like.
        thread: Runs its steps.
        instance_id: Of the process.
        sliding_window_tokens, has_states, has_encoder: Of the model.
        numerics_id: Of which arithmetic it says that it is.
        accuse: Told of a step that no scheduler may send.
        on_step: Called after each step.
        contents: See `BlockChecks`.
        adapters: What it finds at their sources.
        updates_weights: Whether it takes other weights.

    Attributes:
        is_broken: Whether every step fails.
        num_failing, num_hanging, num_nonsense: How many of the next steps fail, hang, or are answered with nonsense.
        slowness: How many times longer its steps take than they should.
        num_steps: How many have run.
        num_refusing: How many of the next updates it refuses.
        expected_version: Of the weights that the next step is meant for; None: of any.
        first_digest: Of the weights of its start.
    """

    def __init__(
        self,
        plan: ExecutorPlan,
        thread: SimulatedStepThread,
        instance_id: str,
        sliding_window_tokens: int,
        has_states: bool,
        has_encoder: bool,
        numerics_id: str,
        accuse: Callable[[str], None],
        on_step: Callable[[], None],
        contents: dict[bytes, bytes],
        adapters: Adapters,
        *,
        updates_weights: bool = False,
    ) -> None:
        self._contents = contents
        super().__init__(
            block_size_tokens=plan.block_size_tokens,
            num_device_blocks=plan.num_device_blocks,
            num_host_blocks=plan.num_host_blocks,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            step_ms=plan.step_ms,
            token_us=plan.token_us,
            eos_probability=EOS_PROBABILITY,
            sliding_window_tokens=sliding_window_tokens,
            cache_groups=_cache_groups(plan),
            has_states=has_states,
            num_device_states=plan.num_device_states,
            num_host_states=plan.num_host_states,
            nan_token_id=NAN_TOKEN,
            max_allowance=plan.max_allowance,
            max_grammar_slots=NUM_GRAMMAR_SLOTS,
            grammar_load_steps=2,
            num_adapter_slots=adapters.num_slots,
            read_adapter=adapters.read,
            adapter_load_steps=adapters.num_load_steps,
            adapter_names=adapters.offered,
            has_pooling=True,
            numerics_id=numerics_id,
            sleep=self._occupy,
            clock=thread.clock,
            instance_id=instance_id,
            max_transfers=plan.max_transfers,
            updates_weights=updates_weights,
            max_encoder_tokens=MAX_ENCODER_TOKENS if has_encoder else 0,
            num_encoder_blocks=plan.num_encoder_blocks,
        )
        self.is_broken = False
        self.num_failing = self.num_hanging = self.num_nonsense = self.num_steps = self.num_refusing = 0
        self._has_slept = False
        self.expected_version: int | None = None
        self.first_digest = self.info.weights_digest
        self.slowness = 1.0
        self._thread = thread
        self._has_device = plan.has_device
        self._accuse = accuse
        self._on_step = on_step

    def launch(self, step: Step) -> RunningStep:
        """Run a step, unless a fault is due."""
        if self.is_broken or self.num_failing:
            self.num_failing -= self.num_failing > 0
            self._write_half(step)
            raise StepFailedError("a fault of the simulation")
        if any(admission.token_ids[:1].tolist() == [POISON_TOKEN] for admission in step.delta.admissions):
            raise StepFailedError(POISONED)
        self._launched = step
        try:
            self._check_version(step)
            self._checks.before_step(step)
            running = super().launch(step)
            self._checks.after_step(step, self._layout)
        except Exception as error:
            self._accuse(f"step {step.step_id} on {self.info.instance_id}: {type(error).__name__}: {error}")
            raise
        self.num_steps += 1
        self._on_step()
        done_at_s = self._thread.device_until_s
        if self.num_hanging:
            self.num_hanging -= 1
            self._thread.hang()
        if self.num_nonsense:
            self.num_nonsense -= 1
            result = running.finish()
            running = DoneStep(replace(result, sampled_token_ids=result.sampled_token_ids[:-1]))
        return DeviceStep(running.finish(), done_at_s, self._thread.clock) if self._has_device else running

    def reset(self, *, uses_groups: bool = False) -> None:
        """See `FakeWorker`."""
        super().reset(uses_groups=uses_groups)
        self._histories = self._both = SpokenHistories(self.table, self._weights)
        self._older = no_slots()
        self._watch_blocks()

    def _watch_blocks(self) -> None:
        self._checks = BlockChecks(
            self.table, self._histories, self._caches, self._encoder, self._states, self._contents
        )

    def update_weights(self, folder: Path, weights_digest: str, agree: Agree = lambda _: None) -> None:
        """See `FakeWorker`; it refuses some."""
        if self.num_refusing:
            self.num_refusing -= 1
            raise ModelLoadError("a fault of the simulation")
        self._both.split()
        super().update_weights(folder, weights_digest, agree)
        self._older = self.table.live.nonzero()[0].astype(np.int32)

    def sleep(self, level: int) -> None:
        """See `FakeWorker`; what slots see is gone."""
        super().sleep(level)
        self._has_slept = True
        self._older = self.table.live.nonzero()[0].astype(np.int32)
        self._watch_blocks()

    def _check_version(self, step: Step) -> None:
        """Raise StepFailedError: a step is meant for other weights, or goes on with slots of older ones unasked."""
        if self.info.updates_weights and self.expected_version != self.info.weights_version:
            raise StepFailedError("it expects other weights")
        if len(left := np.setdiff1d(self._older, step.delta.released_slots)) and not step.keeps_live:
            raise StepFailedError(f"it goes on with slot {left[0]}, which older weights have computed")
        self._older = no_slots()

    def has_on_host(self, pool: int, block: int, name: bytes) -> bool:
        """Return whether a host block of a pool has the content that a name stands for."""
        if pool < len(self._token_caches):
            content: bytes = self._token_caches[pool]._host[block].tobytes()
        else:
            assert self._states is not None
            content = self._states._host["history"][block].tobytes()
        return self._is_named(content, name)

    def has_encoded(self, block: int, name: bytes) -> bool:
        """Return whether a block of the encoder has the content that a name stands for."""
        return self._encoder is None or self._is_named(self._encoder.device[block].tobytes(), name)

    def _is_named(self, content: bytes, name: bytes) -> bool:
        if self._has_slept and not any(content):
            return True  # nobody looks for the name any more
        known = self._contents.get(content_key(name, self._both), content)
        num_bytes = min(len(content), len(known))
        return content[len(content) - num_bytes :] == known[len(known) - num_bytes :]

    def _write_and_read(self, layout: StepLayout, token_counts: TokenCounts | None = None) -> None:
        self._layout = layout
        self._checks.before_writes(self._launched, layout)
        super()._write_and_read(layout, token_counts)

    def _write_half(self, step: Step) -> None:
        """Leave behind what a step may that fails in its midst: blocks that it writes have something else in them."""
        layout = self.table.apply(step.delta)
        moves = split_moves(step, self._pools)
        if self._states is not None:
            self._states.move(moves.pop())
            self._states._device[step.states_to_save[:, 2] - self._states.first_id] = GARBAGE
            self._states._at_slots[:] = GARBAGE
        for cache, own in zip(self._token_caches, moves, strict=True):
            cache.move(own)
        if self._encoder is not None and self.table.encoder is not None:
            for given in step.encoder_inputs:
                self._encoder.device[given.block_ids - self.table.encoder.first_id] = GARBAGE
        rows = zip(layout.slots.tolist(), layout.starts.tolist(), layout.lengths.tolist(), strict=True)
        for slot, start, length in itertools.islice(rows, (len(layout.slots) + 1) // 2):
            for cache, tables in zip(self._caches, self.table.groups, strict=True):
                indices, offsets = np.divmod(np.arange(start, start + length), tables.block_size)
                cache._device[tables.block_ids[slot, indices], offsets] = GARBAGE

    @property
    def is_hung(self) -> bool:
        """Whether a step hangs, and so all that would follow."""
        return math.isinf(self._thread.busy_until_s)

    def heal(self) -> None:
        """Let nothing go wrong any more; a step that hangs does so for ever."""
        self.is_broken = False
        self.num_failing = self.num_hanging = self.num_nonsense = 0
        self.slowness = 1.0

    def _answer(self, step: Step, layout: StepLayout) -> StepResult:
        checked, self._histories = self._histories, self._both.spoken
        try:
            return self._answer_once(step, layout)
        finally:
            self._histories = checked

    def _answer_once(self, step: Step, layout: StepLayout) -> StepResult:
        if layout.num_prompt_logprobs is not None:
            return super()._answer(step, layout)
        keys = keys_of(self.table, layout, self._histories)
        result = remembered(keys, step)
        if result is None:
            result = super()._answer(step, layout)
            remember(keys, self.table.sampling[layout.sample_slots], result)
        elif (rows := SampleRows.of_step(self.table, layout)).is_guided is not None:
            self._grammar_masks.begin(rows)()  # matchers follow in each step, and forks copy them then
        return result

    def _occupy(self, duration_s: float) -> None:
        if self._has_device:
            self._thread.compute(duration_s * self.slowness)
        else:
            self._thread.occupy(duration_s * self.slowness)


def _cache_groups(plan: ExecutorPlan) -> tuple[CacheGroup, ...]:
    """Return the groups that an executor offers, each of one layer."""
    return tuple(
        CacheGroup(
            CacheKind.WINDOW if window else CacheKind.FULL,
            (layer,),
            plan.block_size_tokens,
            num_blocks,
            plan.num_host_blocks,
            window_tokens=window,
        )
        for layer, (window, num_blocks) in enumerate(plan.cache_groups)
    )


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A step on a device, which has its result at a time; see `executor_svc.worker.interface.RunningStep`."""

    result: StepResult
    done_at_s: float
    clock: Callable[[], float]

    def is_done(self) -> bool:
        """See `RunningStep`."""
        return self.clock() >= self.done_at_s

    def wait(self) -> None:
        """See `RunningStep`; the thread knows when to come."""

    def finish(self) -> StepResult:
        """See `RunningStep`; whoever cannot wait has it at once."""
        return self.result
