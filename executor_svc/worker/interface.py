"""The seam between the executor's service and what runs the steps.

Two implementations: `executor_svc.worker.torch_worker.TorchWorker` (the model) and
`executor_svc.fake.worker.FakeWorker` (no torch; checks every block table). The service calls a worker from
one thread only, so a worker needs no locks; but for blocks of transfers, which no step touches.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from octavo_shared.errors import InvalidStepError, StepFailedError
from octavo_shared.step_wire.batch_table import BatchTable, StepLayout
from octavo_shared.step_wire.cache_group import CacheGroup, firsts_of
from octavo_shared.step_wire.executor_info import ExecutorInfo, TokenizerFile
from octavo_shared.step_wire.request_check import check_known_ids, check_number, check_pooled, check_rules
from octavo_shared.step_wire.step import Admission, Fork, Int32Array, Step, StepResult, find_repeated

# The content of blocks.
Buffer: TypeAlias = bytes | npt.NDArray[Any]

# Called with the model_hash of new weights before they overwrite the old ones; raises to keep these.
Agree: TypeAlias = Callable[[str], None]


class RunningStep(Protocol):
    """A step that a worker has launched: a device may still compute it while later ones are launched behind it.

    Steps end in the order in which they were launched, and are finished in that order.
    """

    def is_done(self) -> bool:
        """Return whether `finish` would not have to wait."""

    def wait(self) -> None:
        """Return when the device is done with it. Any thread may call this, and only this."""

    def finish(self) -> StepResult:
        """Wait, record the sampled tokens in the worker's table, return the answer.

        Raises:
            StepFailedError: it failed on the device; the cache contents are in doubt.
            DeviceLostError: so will every later step, until the process is started anew.
        """


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A step that was computed while it was launched; see `RunningStep`."""

    result: StepResult

    def is_done(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return at once."""

    def finish(self) -> StepResult:
        """Return the answer; the tokens are recorded."""
        return self.result


class Worker(Protocol):
    """Runs steps on a batch table and a KV cache that it owns."""

    @property
    def info(self) -> ExecutorInfo:
        """What this executor is; constant, but for what `update_weights` changes."""

    @property
    def table(self) -> BatchTable:
        """The batch table; replaced by `reset`."""

    @property
    def helper_cpu_time_us(self) -> int:
        """Processor time of the threads that steps wait for, in microseconds, but for the caller and kernels' threads.

        Any thread may ask.
        """

    def reset(self, *, uses_groups: bool = False) -> None:
        """Empty the batch table: a scheduler has attached. The cache contents stay, unless its layout changes.

        Args:
            uses_groups: Whether CACHE_GROUPS is agreed; without it all layers share one block table and one pool.

        Raises: DeviceLostError: the layout changes, and there is no memory for the new one.
        """

    def launch(self, step: Step) -> RunningStep:
        """Apply the step to the table and start it.

        Steps may be launched before earlier ones are done: they compute with the tokens that those sample.

        Raises:
            InvalidStepError: the step does not fit the table or the cache; nothing was written.
            StepFailedError: it failed while it was launched; the cache contents are in doubt.
            DeviceLostError: so will every later step, until the process is started anew.
        """

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """The bytes of a block in each of the pools, as `read_blocks` returns it; constant until `reset`."""

    def begin_transfers(self) -> None:
        """Let what is read and written from here on be behind the steps launched so far; as `launch`, by one thread."""

    def read_blocks(self, block_ids: Int32Array) -> Buffer:
        """Return the content of device blocks of one pool, [n]: one after the other, each over all layers of the pool.

        Any thread may call this, and `write_blocks`, beside steps that do not touch these blocks. The order within a
        block is the same in all executors with equal `numerics_id`.
        """

    def write_blocks(self, block_ids: Int32Array, content: Buffer) -> None:
        """Make `content`, as of `read_blocks`, that of device blocks; steps launched from here on see it."""

    @property
    def weights_bytes(self) -> int:
        """Size of the files that the model was loaded from, in bytes; 0: it is not known. Any thread may ask."""

    def update_weights(self, folder: Path, weights_digest: str) -> None:
        """Put the weights of a folder in place of those that there are, between two steps; `info` has their digest.

        Args:
            folder: Has safetensors files of the same model, perhaps with its config.json.
            weights_digest: That they must have; empty: any.

        Raises:
            ModelLoadError: they are not of this model, or cannot be read; nothing has changed.
            DeviceLostError: it failed half way: only a new process can be used.
        """

    def sleep(self, level: int) -> None:
        """Give the cache back, and at level 2 the weights, until `wake`; on a GPU level 1 moves these to the host.

        Raises: DeviceLostError: see above.
        """

    def wake(self) -> None:
        """End `sleep`, with an empty cache.

        Raises: ModelLoadError: there are no weights: an update has to come first. DeviceLostError: see above.
        """

    def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
        """Return tokenizer.json and its companions; empty if the model has no tokenizer.json."""


class WithFixedWeights:
    """The part of a worker that changes weights, for one whose `info` does not have `updates_weights`."""

    weights_bytes = 0

    def update_weights(self, folder: Path, weights_digest: str) -> None:
        """See `Worker`."""
        raise AssertionError("its weights stay as they are")

    def sleep(self, level: int) -> None:
        """See `Worker`."""
        raise AssertionError("it does not sleep")

    def wake(self) -> None:
        """See `Worker`."""
        raise AssertionError("it does not sleep")


class WithoutTransfers:
    """The part of a worker that moves blocks to and from other executors, for one that does not."""

    block_bytes: tuple[int, ...] = ()

    def begin_transfers(self) -> None:
        """See `Worker`; no step asks for it, as `max_transfers` is 0."""

    def read_blocks(self, block_ids: Int32Array) -> Buffer:
        """See `Worker`."""
        raise AssertionError("it sends no blocks")

    def write_blocks(self, block_ids: Int32Array, content: Buffer) -> None:
        """See `Worker`."""
        raise AssertionError("it receives no blocks")


class WorkerAround:
    """A worker that passes everything on to another one; what it does beside that is in its heirs.

    Args:
        worker: Runs the steps.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @property
    def info(self) -> ExecutorInfo:
        """See `Worker`."""
        return self._worker.info

    @property
    def table(self) -> BatchTable:
        """See `Worker`."""
        return self._worker.table

    @property
    def helper_cpu_time_us(self) -> int:
        """See `Worker`."""
        return self._worker.helper_cpu_time_us

    def reset(self, *, uses_groups: bool = False) -> None:
        """See `Worker`."""
        self._worker.reset(uses_groups=uses_groups)

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """See `Worker`."""
        return self._worker.block_bytes

    def begin_transfers(self) -> None:
        """See `Worker`."""
        self._worker.begin_transfers()

    def read_blocks(self, block_ids: Int32Array) -> Buffer:
        """See `Worker`."""
        return self._worker.read_blocks(block_ids)

    def write_blocks(self, block_ids: Int32Array, content: Buffer) -> None:
        """See `Worker`."""
        self._worker.write_blocks(block_ids, content)

    @property
    def weights_bytes(self) -> int:
        """See `Worker`."""
        return self._worker.weights_bytes

    def update_weights(self, folder: Path, weights_digest: str) -> None:
        """See `Worker`."""
        self._worker.update_weights(folder, weights_digest)

    def sleep(self, level: int) -> None:
        """See `Worker`."""
        self._worker.sleep(level)

    def wake(self) -> None:
        """See `Worker`."""
        self._worker.wake()

    def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
        """See `Worker`."""
        return self._worker.tokenizer_files()


def execute(worker: Worker, step: Step) -> StepResult:
    """Launch a step, wait for it and return its answer. Raises what `Worker.launch` and `RunningStep.finish` raise."""
    return worker.launch(step).finish()


def table_of(info: ExecutorInfo, *, uses_groups: bool = False) -> BatchTable:
    """Return an empty batch table of an executor's sizes."""
    first, *others = ((g.block_size_tokens, g.num_device_blocks) for g in info.groups(agreed=uses_groups))
    sizes, encoder_pool = (info.max_num_seqs, info.max_model_len, *first), info.encoder_pool(agreed=uses_groups)
    return BatchTable(*sizes, info.num_grammar_slots, others, info.num_adapter_slots, encoder_pool)


def check_step(step: Step, info: ExecutorInfo, *, uses_groups: bool = False) -> None:
    """Check what the table cannot: the moved blocks exist, the model knows the tokens of histories and rules.

    Raises: InvalidStepError: they do not.
    """
    if len(step.blocks_to_copy) or len(step.blocks_to_swap_out) or len(step.blocks_to_swap_in):
        _check_moves(step, info.pools(agreed=uses_groups))
    if not info.is_generative and step.delta.admissions:
        raise InvalidStepError(f"step {step.step_id} admits a sequence; the model computes vectors or scores alone")
    if step.pooling_inputs:
        _check_pooling(step, info)
    if len(step.delta.allowances) and step.delta.allowances[:, 1].max() > info.max_allowance:
        raise InvalidStepError(
            f"step {step.step_id} has an allowance of {step.delta.allowances[:, 1].max()}; the limit is "
            f"{info.max_allowance}"
        )
    _check_token_ids(step, info)
    for load in step.delta.grammar_loads:
        if len(load.grammar.body) > info.max_grammar_bytes:
            raise InvalidStepError(
                f"the grammar for grammar slot {load.slot} has {len(load.grammar.body)} bytes; the limit is "
                f"{info.max_grammar_bytes}"
            )


def check_states(step: Step, table: BatchTable, info: ExecutorInfo) -> None:
    """Check the states that a step saves and begins with, of a model that has states.

    Args:
        step: Not yet applied to the table.
        table: As the last step has left it.
        info: Of the executor.

    Raises: InvalidStepError: no such state, or no such block.
    """
    first, end = firsts_of(info.cache_groups)[-2:].tolist()  # the group of the states is the last one
    are_in = f"states are in blocks {first} to {end - 1}" if end > first else "this executor saves no states"
    for admission in step.delta.admissions:
        block, where = admission.state_block, f"step {step.step_id} admits slot {admission.slot}"
        if (block is None) is (admission.num_computed_tokens > 0):
            needs = "needs the state behind them" if block is None else "begins with an empty state"
            raise InvalidStepError(f"{where} behind {admission.num_computed_tokens} tokens; it {needs}")
        if block is not None and not first <= block < end:
            raise InvalidStepError(f"{where} with the state in block {block}; {are_in}")
    if not len(step.states_to_save):
        return
    slots, counts, blocks = step.states_to_save.T
    if len(outside := blocks[(blocks < first) | (blocks >= end)]):
        raise InvalidStepError(f"step {step.step_id} saves a state in block {outside[0]}; {are_in}")
    for what, numbers in (("the state of slot", slots), ("a state in block", blocks)):
        if (repeated := find_repeated(numbers)) is not None:
            raise InvalidStepError(f"step {step.step_id} saves {what} {repeated} twice")
    for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
        has_it = 0 <= slot < len(table.live) and table.live[slot] and 0 < table.num_scheduled_tokens[slot] == count
        if not has_it:
            raise InvalidStepError(
                f"step {step.step_id} saves the state of slot {slot} behind {count} tokens; it has no such state"
            )


def _check_moves(step: Step, groups: Seq[CacheGroup]) -> None:
    device, host = ("device", firsts_of(groups)), ("host", firsts_of(groups, on_host=True))
    ends = (
        (step.blocks_to_copy, device, device),
        (step.blocks_to_swap_out, device, host),
        (step.blocks_to_swap_in, host, device),
    )
    for moves, (source, source_firsts), (destination, destination_firsts) in ends:
        _check_blocks(step, source, moves[:, 0], int(source_firsts[-1]))
        _check_blocks(step, destination, moves[:, 1], int(destination_firsts[-1]))
        of_source, of_destination = (
            np.searchsorted(firsts, blocks, side="right")
            for firsts, blocks in ((source_firsts, moves[:, 0]), (destination_firsts, moves[:, 1]))
        )
        if len(apart := (of_source != of_destination).nonzero()[0]):
            blocks = moves[apart[0]].tolist()
            raise InvalidStepError(
                f"step {step.step_id} moves {source} block {blocks[0]} to {destination} block {blocks[1]}, which is of "
                "another cache group"
            )


def _check_blocks(step: Step, pool: str, block_ids: Int32Array, num_blocks: int) -> None:
    outside = block_ids[(block_ids < 0) | (block_ids >= num_blocks)]
    if len(outside):
        raise InvalidStepError(
            f"step {step.step_id} moves {pool} block {outside[0]}; there are {num_blocks} {pool} blocks"
        )


def _check_pooling(step: Step, info: ExecutorInfo) -> None:
    """Check the texts of a step; what they take beside its sequences is checked with its layout."""
    numbers = set()
    for text in step.pooling_inputs:
        check_pooled(f"pooling input {text.number}", text.token_ids, text.token_type_ids, text.task, info)
        if text.number in numbers:
            raise InvalidStepError(f"step {step.step_id} has two pooling inputs with number {text.number}")
        numbers.add(text.number)
    num_tokens = num_pooled_tokens(step)
    if num_tokens > info.max_num_batched_tokens:
        raise InvalidStepError(
            f"step {step.step_id} pools {num_tokens} tokens; the limit is {info.max_num_batched_tokens}"
        )
    num_bytes = 4 * sum(info.num_pooled_values(text.task) for text in step.pooling_inputs)
    if num_bytes > info.max_message_bytes:
        raise InvalidStepError(
            f"step {step.step_id} asks for {num_bytes} bytes of vectors and scores; a message has at most "
            f"{info.max_message_bytes}"
        )


def num_pooled_tokens(step: Step) -> int:
    """Return how many tokens a step computes for vectors and scores."""
    return sum(len(text.token_ids) for text in step.pooling_inputs) if step.pooling_inputs else 0


def _num_tokens_beside(step: Step) -> int:
    return num_pooled_tokens(step) + sum(given.num_tokens for given in step.encoder_inputs)


def _check_encoder_input(admission: Admission, vocab_size: int) -> None:
    given = admission.encoder_input
    if given is None:
        raise InvalidStepError(f"slot {admission.slot} has no encoder_input; the model has an encoder")
    if given.features is not None:
        raise InvalidStepError(f"the encoder input of slot {admission.slot} has features; this encoder takes token_ids")
    if given.token_ids is not None:
        check_known_ids(f"the encoder input of slot {admission.slot}", given.token_ids, vocab_size)


def _check_token_ids(step: Step, info: ExecutorInfo) -> None:
    delta, vocab_size = step.delta, info.vocab_size
    given = [admission.token_ids for admission in delta.admissions]
    if len(delta.appended_tokens):
        given.append(delta.appended_tokens[:, 1])
    for token_ids in given:
        check_known_ids(f"step {step.step_id}", token_ids, vocab_size)
    entries: tuple[Admission | Fork, ...] = (*delta.admissions, *delta.beam_forks, *delta.forks)
    for entry in entries:
        check_number(f"slot {entry.slot}", "candidates", entry.sampling.num_candidates, vocab_size)
        check_number(f"slot {entry.slot}", "alternatives", entry.sampling.num_logprobs, vocab_size)
    for admission in delta.admissions:
        if admission.encoder_input is not None or info.has_encoder:
            _check_encoder_input(admission, vocab_size)
        check_number(f"slot {admission.slot}", "alternatives", admission.num_prompt_logprobs, vocab_size)
        if admission.token_rules is not None:
            check_rules(f"slot {admission.slot}", admission.token_rules, vocab_size)


def _check_spans(step: Step, layout: StepLayout, info: ExecutorInfo) -> None:
    num_samples, counts, token_ids = int(layout.most_tokens.sum()), step.draft_counts, step.draft_token_ids
    if num_samples > info.max_sample_rows:
        raise StepFailedError(
            f"step {step.step_id} may sample {num_samples} tokens; the limit is {info.max_sample_rows}"
        )
    if counts is None or token_ids is None:
        return
    most = np.maximum(layout.most_tokens - 1, 0)
    if len(counts) != len(most) or np.count_nonzero(counts > most) or counts.sum() != len(token_ids):
        raise StepFailedError(f"step {step.step_id} has drafts that do not fit its rows and their allowances")
    if np.count_nonzero((token_ids < 0) | (token_ids >= info.vocab_size)):
        raise StepFailedError(f"step {step.step_id} has drafts outside 0 to {info.vocab_size - 1}")


def check_layout(step: Step, layout: StepLayout, table: BatchTable, info: ExecutorInfo) -> int | None:
    """Check a step once the table has laid it out; return the table's digest if the step has one.

    Raises: StepFailedError: the step computes too many tokens, or the scheduler's table is another one.
    """
    num_tokens = layout.num_tokens + (_num_tokens_beside(step) if step.pooling_inputs or step.delta.admissions else 0)
    if num_tokens > info.max_num_batched_tokens:
        raise StepFailedError(
            f"step {step.step_id} computes {num_tokens} tokens; the limit is {info.max_num_batched_tokens}"
        )
    if layout.allowances is not None:
        _check_spans(step, layout, info)
    if step.table_digest is None:
        return None
    digest = table.digest()
    if digest != step.table_digest:
        raise StepFailedError(
            f"step {step.step_id}: the batch table has digest {digest:016x}, the scheduler's {step.table_digest:016x}"
        )
    return digest
