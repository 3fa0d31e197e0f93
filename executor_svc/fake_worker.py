"""The worker without a model: tokens from a hash of the history, every block table checked.

It stands in for `executor_svc.torch_worker.TorchWorker` behind the same service, so that the
production scheduler runs, is tested and is loaded on a machine without torch. What a wrong block
table would do silently to a real model fails the step here; see `executor_svc/fake_cache.py`.
"""

import hashlib
import time
import uuid
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from executor_svc.fake_cache import Histories, HistoryCache, UInt64Array
from executor_svc.fake_tokenizer import EOS_TOKEN_ID, VOCAB_SIZE, fake_tokenizer_files
from executor_svc.randomness import uniforms
from executor_svc.worker import check_layout
from shared.batch_table import BatchTable, StepLayout
from shared.errors import InvalidStepError
from shared.executor_info import ExecutorInfo, TokenizerFile
from shared.step import NO_LOGPROBS, Int32Array, Step, StepResult

# What a number is drawn for; keeps the draws of one history apart.
_FOR_TOKEN, _FOR_EOS, _FOR_LOGPROB = range(3)

# First bytes of UTF-8 characters and how many bytes follow. All of 0x90 to 0xBF may follow each.
_LEAD_BYTES = {0xC3: 1, 0xE4: 2, 0xF0: 3}
# Share of new characters of 1, 2, 3 and 4 bytes, summed up.
_CHARACTER_SHARES = (0.94, 0.97, 0.99, 1.0)


class FakeWorker:
    """Runs steps without a model; see `executor_svc.worker.Worker`.

    Args:
        block_size_tokens: Tokens in a block.
        num_device_blocks: Blocks of the device pool.
        num_host_blocks: Blocks of the host pool; 0: it cannot swap.
        max_model_len: Longest sequence in tokens.
        max_num_seqs: Slots of the batch table.
        max_num_batched_tokens: Most tokens a step; more fail it.
        max_message_bytes: Reported to the scheduler.
        step_ms: Time that every step takes at least, in milliseconds.
        token_us: Time that each token of a step adds, in microseconds.
        eos_probability: Chance that a token is the end of the sequence, 0 to 1.
        sleep: Waits so many seconds; runs on the thread of `execute`, once in every step.
    """

    def __init__(
        self,
        *,
        block_size_tokens: int = 16,
        num_device_blocks: int = 4096,
        num_host_blocks: int = 0,
        max_model_len: int = 8192,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        max_message_bytes: int = 64 * 2**20,
        step_ms: float = 0.0,
        token_us: float = 0.0,
        eos_probability: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._info = ExecutorInfo(
            instance_id=uuid.uuid4().hex,
            model_id="fake",
            model_hash=hashlib.sha256(f"fake 1, eos_probability {eos_probability}".encode()).hexdigest(),
            dtype="float32",
            block_size_tokens=block_size_tokens,
            num_device_blocks=num_device_blocks,
            num_host_blocks=num_host_blocks,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_message_bytes=max_message_bytes,
            eos_token_ids=(EOS_TOKEN_ID,),
        )
        self._step_ms = step_ms
        self._token_us = token_us
        self._eos_probability = eos_probability
        self._sleep = sleep
        self._cache = HistoryCache(num_device_blocks, num_host_blocks, block_size_tokens)
        self.reset()

    @property
    def info(self) -> ExecutorInfo:
        """What this executor is; constant over its life."""
        return self._info

    @property
    def table(self) -> BatchTable:
        """The batch table; replaced by `reset`."""
        return self._table

    def reset(self) -> None:
        """Empty the batch table: a scheduler has attached. The cache contents stay."""
        info = self._info
        self._table = BatchTable(info.max_num_seqs, info.max_model_len, info.block_size_tokens, info.num_device_blocks)
        self._histories = Histories(self._table)

    def execute(self, step: Step) -> StepResult:
        """Apply the step to the table, check it, record and return the sampled tokens.

        Raises:
            InvalidStepError: the step does not fit the table or the cache; nothing was written.
            StepFailedError: a wrong block table, a wrong digest, or too many tokens.
        """
        begin_s = time.perf_counter()
        self._check(step)
        layout = self._table.apply(step.delta)
        digest = check_layout(step, layout, self._table, self._info.max_num_batched_tokens)
        self._histories.follow(self._table, step.delta, layout)
        self._cache.move(step)
        self._cache.write(self._table, layout, self._histories)
        self._cache.check_reads(self._table, layout, self._histories)
        token_ids, logprobs = self._sample(layout)
        self._table.record(layout, token_ids)
        self._histories.append(layout.sample_slots, layout.sample_positions, token_ids)
        target_s = self._step_ms * 1e-3 + layout.num_tokens * self._token_us * 1e-6
        self._sleep(max(0.0, target_s - (time.perf_counter() - begin_s)))
        duration_us = round((time.perf_counter() - begin_s) * 1e6)
        return StepResult(step.epoch, step.step_id, token_ids, logprobs, duration_us, digest)

    def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
        """Return the files of the byte tokenizer."""
        return fake_tokenizer_files()

    def _check(self, step: Step) -> None:
        """Check what the table does not: block moves and token ids."""
        self._cache.check_moves(step)
        for token_ids in (step.delta.appended_tokens[:, 1], *(row.token_ids for row in step.delta.admissions)):
            outside = token_ids[(token_ids < 0) | (token_ids >= VOCAB_SIZE)]
            if len(outside):
                raise InvalidStepError(f"step {step.step_id} has token id {outside[0]}; ids are 0 to {VOCAB_SIZE - 1}")

    def _sample(self, layout: StepLayout) -> tuple[Int32Array, npt.NDArray[np.float32] | None]:
        """Return token ids and log-probabilities, [num_samples], a pure function of each row's history.

        Rows that are not greedy mix in their seed and output index, so that seeds and outputs differ.
        """
        slots, positions = layout.sample_slots, layout.sample_positions
        params = self._table.sampling[slots]
        histories: UInt64Array = self._histories.by_position[slots, positions - 1]
        greedy = params["temperature"] == 0
        states = np.where(greedy, histories, histories ^ params["seed"])
        output_indices = np.where(greedy, 0, params["output_index"]).astype(np.int32)

        def draw(purpose: int) -> npt.NDArray[np.float64]:
            return uniforms(states, output_indices, np.full(len(slots), purpose, np.int32))

        num_missing = self._missing_bytes(slots, positions)
        token_ids = _next_bytes(draw(_FOR_TOKEN), num_missing)
        token_ids[(num_missing == 0) & (draw(_FOR_EOS) < self._eos_probability)] = EOS_TOKEN_ID
        asked = params["num_logprobs"] != NO_LOGPROBS
        if not asked.any():
            return token_ids, None
        return token_ids, np.where(asked, -10.0 * draw(_FOR_LOGPROB), np.nan).astype(np.float32)

    def _missing_bytes(self, slots: Int32Array, positions: Int32Array) -> Int32Array:
        """Return how many bytes the last character of each history still lacks, [num_samples]."""
        num_following = np.zeros(VOCAB_SIZE, np.int32)
        num_following[list(_LEAD_BYTES)] = list(_LEAD_BYTES.values())
        missing = np.zeros(len(slots), np.int32)
        for distance in (1, 2, 3):
            lead = num_following[self._table.token_ids[slots, np.maximum(positions - distance, 0)]]
            missing = np.maximum(missing, np.where(positions >= distance, lead - (distance - 1), 0))
        return missing


def _next_bytes(draws: npt.NDArray[np.float64], num_missing: Int32Array) -> Int32Array:
    """Return the next byte of each row, [num_rows]: mostly printable ASCII, always valid UTF-8."""
    kinds = np.searchsorted(_CHARACTER_SHARES, draws, side="right")
    leads = np.array([0, *_LEAD_BYTES])[kinds]
    # The low bits of a draw choose within a kind; the high bits chose the kind.
    fractions = (draws * 2**20) % 1.0
    first_bytes = np.where(kinds == 0, 0x20 + (fractions * 95).astype(np.int32), leads)
    following_bytes = 0x90 + (fractions * 48).astype(np.int32)
    return np.where(num_missing > 0, following_bytes, first_bytes).astype(np.int32)
