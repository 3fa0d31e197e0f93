"""The worker that runs a real model: batch table, model runner, cache engine and sampler of one rank.

`executor_svc/worker/assembly.py` makes it. Read next: `executor_svc/worker/model_runner.py`.

A step is launched in the order of its parts: the table, the moves of blocks and states, the model, the sampler. On a
CPU all is done then. On a GPU that only puts work into a stream. The sampled ids stay there: the next step, which may
be launched before they have reached the host, feeds them to the model (`LastTokens`). In the table they are
`UNKNOWN_TOKEN` until then.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.attention.interface import LayerCache
from executor_svc.device.probe import DeviceProbe, step_error
from executor_svc.device.returnable_memory import ReturnableMemory, give_back_freed
from executor_svc.drafts.drafting import Drafting, without_drafts
from executor_svc.models.pooling import Pooler
from executor_svc.parallel.group import TensorParallelGroup
from executor_svc.sampler.device_sampler import Arrivals, DeviceSampler
from executor_svc.sampler.sample_rows import RowLookup, SampleRows
from executor_svc.sampler.sampler import Sampler
from executor_svc.states.live_states import LiveStates
from executor_svc.worker.grammar_masks import FinishMasks, GrammarMasks
from executor_svc.worker.interface import (
    Agree,
    Buffer,
    DoneStep,
    RunningStep,
    check_layout,
    check_states,
    check_step,
    table_of,
)
from executor_svc.worker.last_tokens import MAX_UNKNOWN_TOKENS, LastTokens
from executor_svc.worker.launched_answer import launch_answer
from executor_svc.worker.launched_step import LaunchedStep
from executor_svc.worker.model_runner import Runner, SampleLogits
from executor_svc.worker.replaceable_weights import ReplaceableWeights
from executor_svc.worker.step_answer import answer_step, flag_ended_rows, flag_guided_rows, follow_answer, no_answer
from executor_svc.worker.step_timer import HostTimer, start_timer
from executor_svc.worker.worker_adapters import WorkerAdapters
from octavo_shared.errors import DeviceLostError, InvalidStepError, ModelLoadError, StepFailedError
from octavo_shared.step_wire.batch_table import StepLayout
from octavo_shared.step_wire.executor_info import ExecutorInfo, TokenizerFile
from octavo_shared.step_wire.step import GrammarLoaded, Int32Array, Step, StepResult


class MovesBlocks(Protocol):
    """The KV cache as a worker sees it."""

    @property
    def layers(self) -> tuple[LayerCache, ...]:
        """The pools of each layer."""

    def move(self, step: Step) -> None:
        """Save states, swap out, swap in, copy, load states: in this order. The blocks exist."""

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """See `Worker`; so are the methods below."""

    def begin_transfers(self) -> None:
        """Order what follows behind the steps launched so far."""

    def read_blocks(self, block_ids: Int32Array) -> npt.NDArray[np.uint8]:
        """Return the content of blocks of one pool, [n, bytes of a block]."""

    def write_blocks(self, block_ids: Int32Array, content: npt.NDArray[np.uint8]) -> None:
        """Make `content`, [n, bytes of a block], that of blocks of one pool."""


# Makes pools, for each cache group or for all layers together, and what runs the model on them.
LayOut = Callable[[bool], tuple[Runner, MovesBlocks]]


class TorchWorker:
    """Runs steps on the model; see `executor_svc.worker.interface.Worker`.

    Owns the batch table, the states of layers that have one and, through the cache engine, the KV cache. Not
    thread-safe. In a group of several ranks all run the same steps; rank 0 samples, and all record its tokens.
    """

    def __init__(
        self,
        info: ExecutorInfo,
        lay_out: LayOut,
        last_tokens: LastTokens,
        sampler: Sampler | DeviceSampler,
        tokenizer_files: tuple[TokenizerFile, ...],
        group: TensorParallelGroup,
        probe: DeviceProbe,
        grammar_masks: GrammarMasks | None = None,
        pooler: Pooler | None = None,
        drafting: Drafting | None = None,
        states: LiveStates | None = None,
        adapters: WorkerAdapters | None = None,
        weights: ReplaceableWeights | None = None,
    ) -> None:
        self.info = info
        self._make_pools = lay_out
        self._uses_groups = bool(info.cache_groups)  # as a scheduler of this release agrees, so that Attach finds it so
        self._lay_out()
        self._last_tokens = last_tokens
        self._sampler = sampler
        self._tokenizer_files = tokenizer_files
        self._group = group
        self._probe = probe
        self._grammar_masks = grammar_masks  # of rank 0; None: it follows no grammars
        self._pooler = pooler  # None: it computes no vectors
        self._drafting = drafting  # None: no row gets more than one token
        self._states = states  # None: no layer has a state
        self._adapters = adapters  # None: it computes with the weights alone
        self._weights = weights  # None: they stay as they are
        self._state_memory = ReturnableMemory([] if states is None else states.storages)
        self._is_asleep = False
        self._rows = RowLookup()
        self._unrecorded: deque[LaunchedStep] = deque()  # their tokens are UNKNOWN_TOKEN in the table
        self.reset(uses_groups=self._uses_groups)

    @property
    def helper_cpu_time_us(self) -> int:
        """Processor time of the threads that follow grammars, in microseconds."""
        return 0 if self._grammar_masks is None else self._grammar_masks.cpu_time_us

    def reset(self, *, uses_groups: bool = False) -> None:
        """Empty the batch table: a scheduler has attached; see `Worker.reset`."""
        info = self.info
        self._unrecorded.clear()
        if (uses_groups and bool(info.cache_groups)) is not self._uses_groups:
            self._uses_groups = not self._uses_groups
            del self._runner, self._cache_engine  # the next ones lie in the same memory
            self._lay_out_anew()
        self.table = table_of(info, uses_groups=self._uses_groups)
        if self._grammar_masks is not None:
            self._grammar_masks.reset()
        if self._adapters is not None:
            self._adapters.reset(self.table)

    def launch(self, step: Step) -> RunningStep:
        """Apply the step to the table and start it; see `Worker.launch`."""
        check_step(step, self.info, uses_groups=self._uses_groups)
        if self._states is not None:
            check_states(step, self.table, self.info)
        if self._adapters is not None:
            self._adapters.check(step.delta)
        try:
            return self._launch(step)
        except (InvalidStepError, StepFailedError):
            raise
        except Exception as error:
            # Torch fails with many types (RuntimeError, IndexError, out of memory); all mean the same here.
            raise step_error(step.step_id, error, self._probe) from error

    def _lay_out(self) -> None:
        self._runner, self._cache_engine = self._make_pools(self._uses_groups)
        self.block_bytes: tuple[int, ...] = self._cache_engine.block_bytes  # of each pool, also while it sleeps

    def _lay_out_anew(self) -> None:
        with _losing_device("laying out the KV cache anew"):  # as when it loads, no process goes on without pools
            self._lay_out()

    @property
    def weights_bytes(self) -> int:
        """See `Worker`."""
        return 0 if self._weights is None else self._weights.file_bytes

    def update_weights(self, folder: Path, weights_digest: str, agree: Agree = lambda _: None) -> None:
        """Put other weights in place; see `Worker.update_weights` and `ReplaceableWeights.replace`."""
        assert self._weights is not None, "else it does not announce it"
        model_hash, digest = self._weights.replace(folder, weights_digest, agree)
        self.info = replace(self.info, model_hash=model_hash, weights_digest=digest)

    def sleep(self, level: int) -> None:
        """Give memory back; see `Worker.sleep`."""
        assert self._weights is not None, "else it does not announce it"
        if not self._is_asleep:
            del self._runner, self._cache_engine
        self._is_asleep = True
        with _losing_device("giving memory back"):
            if level == 1:
                self._weights.memory.to_host()
            else:
                self._weights.memory.drop()
            self._state_memory.drop()
            give_back_freed()

    def wake(self) -> None:
        """Take it again; see `Worker.wake`."""
        assert self._weights is not None, "else it does not announce it"
        if self._weights.memory.is_lost:
            raise ModelLoadError("there are no weights: update them first")
        if not self._is_asleep:
            return
        with _losing_device("taking memory again"):
            self._weights.memory.restore()
            self._state_memory.restore()
        self._lay_out_anew()
        self._is_asleep = False

    def begin_transfers(self) -> None:
        """See `Worker.begin_transfers`."""
        self._cache_engine.begin_transfers()

    def read_blocks(self, block_ids: Int32Array) -> Buffer:
        """See `Worker.read_blocks`."""
        return self._cache_engine.read_blocks(block_ids)

    def write_blocks(self, block_ids: Int32Array, content: Buffer) -> None:
        """See `Worker.write_blocks`."""
        of_blocks = np.frombuffer(content, np.uint8).reshape(len(block_ids), -1)
        self._cache_engine.write_blocks(block_ids, of_blocks)

    def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
        """Return tokenizer.json and its companions; empty if the model has no tokenizer.json."""
        return self._tokenizer_files

    def _launch(self, step: Step) -> RunningStep:
        timer = start_timer(self._runner.model.device)
        layout = self.table.apply(step.delta)
        if self._grammar_masks is not None:
            self._grammar_masks.follow(step.delta)
        if self._adapters is not None:
            self._adapters.follow(step.delta)
        digest = check_layout(step, layout, self.table, self.info)
        swaps = step.blocks_to_swap_out.size or step.blocks_to_swap_in.size
        swaps_began_ns = perf_counter_ns() if swaps else 0
        self._cache_engine.move(step)
        swapped_ns = perf_counter_ns() - swaps_began_ns if swaps else 0
        if self._states is not None:
            self._states.fork(step.delta.beam_forks)
        if self.table.encoder is not None and (inputs := step.encoder_inputs):
            self._runner.encode(inputs, self.table.encoder)
        run = self._launch_on_device if isinstance(self._sampler, DeviceSampler) else self._run_on_host
        running = run(step, layout, digest, timer)
        if self._states is not None:
            self._states.fork(step.delta.forks)  # these branch off behind the tokens of this step
        if swaps and isinstance(running, DoneStep):
            running.result.move_duration_us = swapped_ns // 1000
        return running

    @torch.inference_mode()
    def _launch_on_device(self, step: Step, layout: StepLayout, digest: int | None, timer: HostTimer) -> LaunchedStep:
        if len(self._unrecorded) >= MAX_UNKNOWN_TOKENS:
            self._record(self._unrecorded[0])
        answer = no_answer(step, layout)
        if layout.num_tokens:
            sampled, arrivals = self._compute(answer, layout)
        else:
            sampled = torch.empty((2, 0), dtype=torch.int64, device=self._runner.model.device)
            arrivals = Arrivals()
        if step.pooling_inputs:
            self._pool(step, answer)
        answer.table_digest, answer.grammars_loaded = digest, self._take_loaded()
        if self._adapters is not None:
            answer.adapters_loaded = self._adapters.take_loaded()
        launched = LaunchedStep(answer, layout, sampled, arrivals, timer, self._record, self._probe)
        self._unrecorded.append(launched)
        return launched

    def _run_on_host(self, step: Step, layout: StepLayout, digest: int | None, timer: HostTimer) -> DoneStep:
        """Run a step to its end: its tokens are recorded before the next one is launched."""
        computed = layout
        if not layout.num_tokens:
            answer = no_answer(step, layout)
        else:
            answer, computed = self._compute_on_host(step, layout)
            self.table.resolve(layout, answer.sampled_token_ids, answer.token_counts, all_current=True)
        if step.pooling_inputs:
            self._pool(step, answer)
        answer.table_digest, answer.grammars_loaded = digest, self._take_loaded()
        if self._adapters is not None:
            answer.adapters_loaded = self._adapters.take_loaded()
        timer.stop()
        answer.execute_duration_us = timer.duration_us()
        if self._drafting is not None and self.table.has_allowances and layout.num_tokens:
            self._drafting.learn_cost(computed, answer.execute_duration_us)
        return DoneStep(answer)

    def _compute_on_host(self, step: Step, layout: StepLayout) -> tuple[StepResult, StepLayout]:
        """Run the model and sample.

        Returns: the answer but for what is told of the step as a whole; the rows that were computed.
        """
        drafted, computes = None, layout
        if layout.allowances is not None:
            assert self._drafting is not None, "else a step with allowances is refused"
            drafted = self._drafting.draft(self._runner, self.table, layout, step)
            computes = without_drafts(layout) if drafted is None else drafted.layout
        rows = self._rows.of_step(self.table, computes)
        finish_masks = self._begin_masks(rows)
        computed = self._runner.run(self.table, computes, finds_likeliest=self._rows.take_likeliest)
        answer = self._answer(step, computes, rows, computed, finish_masks)
        if self._group.size > 1:
            flags = np.zeros(len(rows), np.int64) if answer.row_flags is None else answer.row_flags
            told = self._group.broadcast(torch.from_numpy(np.stack((answer.sampled_token_ids, flags)).astype(np.int64)))
            token_ids, flags = told.numpy()
            answer.sampled_token_ids = token_ids.astype(np.int32)
            answer.row_flags = flags.astype(np.uint8) if flags.any() else None
        if drafted is not None and self._drafting is not None:
            drafted.prove(answer)
            self._runner.accept_drafts(drafted.num_accepted(answer))
            self._drafting.learn(layout, drafted, answer)
        return answer, computes

    def _take_loaded(self) -> tuple[GrammarLoaded, ...]:
        return () if self._grammar_masks is None else self._grammar_masks.take_loaded()

    def _pool(self, step: Step, answer: StepResult) -> None:
        """Add the vectors of the texts of a step to its answer."""
        assert self._pooler is not None, "else they are refused"
        answer.pooling_outputs = self._pooler.pool(step.pooling_inputs)

    def _compute(self, answer: StepResult, layout: StepLayout) -> tuple[torch.Tensor, Arrivals]:
        """Run the model and sample, on a device that is ahead of the host, for an answer without tokens yet.

        Returns:
            The sampled tokens and the row flags, on the device, [2, num_samples] int64, of rank 0 everywhere; what else
            is on its way.
        """
        computed = self._runner.run(self.table, layout, finds_likeliest=False)
        if self._group.rank == 0:
            sampled, arrivals = self._sample(answer, layout, computed)
        else:
            follow_answer(computed, self._runner.model)
            sampled = torch.empty((2, len(layout.sample_slots)), dtype=torch.int64, device=self._runner.model.device)
            arrivals = Arrivals()
        sampled = self._group.broadcast(sampled)
        self._last_tokens.store(layout.sample_slots, layout.sample_positions, sampled[0])
        return sampled, arrivals

    def _sample(self, answer: StepResult, layout: StepLayout, computed: SampleLogits) -> tuple[torch.Tensor, Arrivals]:
        """Sample on the device, behind the forward pass; rows with a grammar wait for the tokens before theirs."""
        assert isinstance(self._sampler, DeviceSampler)
        rows, flags = SampleRows.of_step(self.table, layout), None
        if rows.is_guided is not None:
            if self._unrecorded:
                self._record(self._unrecorded[-1])
            finish_masks = self._begin_masks(rows)
            flags = None if finish_masks is None else finish_masks()
        known = self._last_tokens.fill_in
        sampled, arrivals = launch_answer(
            answer, self.table, layout, rows, computed, self._runner.model, self._sampler, known
        )
        if flags is not None:
            arrivals.send(partial(flag_ended_rows, answer, flags))
        return sampled, arrivals

    def _begin_masks(self, rows: SampleRows) -> FinishMasks | None:
        """Begin to make the masks of rows that follow a grammar; all tokens before this step are in the table."""
        if rows.is_guided is None or self._grammar_masks is None:
            return None
        return self._grammar_masks.begin(rows)

    def _answer(
        self,
        step: Step,
        layout: StepLayout,
        rows: SampleRows,
        computed: SampleLogits,
        finish_masks: FinishMasks | None,
    ) -> StepResult:
        """Return what rank 0 answers; the others do their part of it."""
        model = self._runner.model
        if self._group.rank:
            follow_answer(computed, model)
            return no_answer(step, layout)
        assert isinstance(self._sampler, Sampler)
        flags = None if finish_masks is None else finish_masks()
        answer = answer_step(step, self.table, layout, rows, computed, model, self._sampler)
        if finish_masks is not None:
            assert computed.logits is not None, "this is rank 0"
            flag_guided_rows(answer, rows, flags, computed.logits, computed.logit_rows)
        return answer

    def _record(self, launched: LaunchedStep) -> None:
        """Wait for a step, and write its tokens, and those of earlier ones, into the table, if they are not there."""
        launched.wait()
        while self._unrecorded and not launched.is_recorded:
            first = self._unrecorded.popleft()
            first.is_recorded = True
            self.table.resolve(first.layout, first.token_ids)


@contextmanager
def _losing_device(what: str) -> Iterator[None]:
    """Raise DeviceLostError for whatever fails in the block."""
    try:
        yield
    except Exception as error:
        raise DeviceLostError(f"{what} failed: {type(error).__name__}: {error}") from error
