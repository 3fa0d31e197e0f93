"""The worker without a model: tokens and candidates from a hash of the history, every block table checked.

It stands in for `executor_svc.worker.torch_worker.TorchWorker` behind the same service, so that the
production scheduler runs, is tested and is loaded on a machine without torch. What a wrong block
table would do silently to a real model fails the step here; see `executor_svc/fake/cache.py`. What
follows a history is in `executor_svc/fake/language.py`.
"""

import hashlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from executor_svc.fake.cache import Histories, HistoryCache
from executor_svc.fake.encoder import EncoderCache
from executor_svc.fake.faults import FakeFaults
from executor_svc.fake.language import LANGUAGE_VERSION, FakeLanguage
from executor_svc.fake.pooling import EMBEDDING_SIZE, NUM_SCORES, pool
from executor_svc.fake.sampling import add_samples, flag_empty, likeliest, processed_scores
from executor_svc.fake.spans import Spans, num_proved
from executor_svc.fake.states import STATE, SlotStates
from executor_svc.fake.tokenizer import EOS_TOKEN_ID, VOCAB_SIZE, fake_tokenizer_files
from executor_svc.sampler.sample_rows import SampleRows
from executor_svc.worker.adapter_loads import AdapterLoads
from executor_svc.worker.adapter_sources import AdapterSources
from executor_svc.worker.grammar_masks import GrammarMasks, grammar_support
from executor_svc.worker.interface import (
    Agree,
    Buffer,
    DoneStep,
    RunningStep,
    check_layout,
    check_states,
    check_step,
    num_pooled_tokens,
    table_of,
)
from octavo_shared.errors import ModelLoadError
from octavo_shared.step_wire.batch_table import StepLayout
from octavo_shared.step_wire.cache_group import CacheGroup, CacheKind, firsts_of, split_moves
from octavo_shared.step_wire.executor_info import ExecutorInfo, TokenizerFile
from octavo_shared.step_wire.step import (
    UNKNOWN_TOKEN,
    BoolArray,
    Int32Array,
    PoolingTask,
    RowFlag,
    Step,
    StepResult,
    TokenCounts,
)

# Its adapters are files of any bytes, which have no rank.
MAX_ADAPTER_RANK = 64


class FakeWorker:
    """Runs steps without a model; see `executor_svc.worker.interface.Worker`.

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
        sliding_window_tokens: Last tokens that attention reads, the token itself included; 0: all.
        cache_groups: The cache groups with block tables that it offers; empty: it has one table.
        has_states: Whether the last layer keeps a state of each sequence.
        num_device_states: States that it can save on the device.
        num_host_states: States that can be swapped out.
        nan_token_id: Behind it logits are NaN; -1: behind none.
        max_allowance: Most tokens that a row may get in a step; 1: it drafts none.
        max_grammar_slots: Grammar slots; 0: it follows no grammars, as without llguidance.
        has_grammar_threads: Whether grammars are compiled, and masks made, on threads.
        num_adapter_slots: Adapter slots; 0: it computes with the weights alone.
        read_adapter: Returns the content of an adapter, of any bytes, by its source; None: there are none. Raises
            ModelLoadError.
        adapter_load_steps: Without threads: in which step after that of a load it ends.
        has_adapter_thread: Whether adapters are read on a thread.
        grammar_load_steps: Without threads: in which step after that of a load it ends.
        has_pooling: Whether it computes vectors and scores.
        is_generative: Whether it generates too; if not, it has no blocks.
        sampling_defaults: As of a model's generation_config.json, by name.
        numerics_id: The numerics id that it reports; None: the id of its language.
        is_invariant: Whether it says that outputs depend on their requests alone; they do.
        why_not_invariant: The reason that it reports if they do not.
        weights_digest: The digest that it reports; None: a digest of its parameters.
        kv_cache_dtype: The cache format that it reports.
        warning: What it reports that its operator should mend.
        faults: What goes wrong; None: nothing.
        sleep: Waits so many seconds; runs on the thread of `execute`, once in every step.
        clock: Returns the time in seconds.
        instance_id: Of the process; None: a new one.
        max_transfers: Most transfers of blocks that may be pending; 0: none.
        updates_weights: Whether its weights, one file of any bytes, can be replaced.
        max_encoder_tokens: Longest input of its encoder; 0: it has none.
        num_encoder_blocks: Device blocks of the encoder's output.
        num_encoder_host_blocks: Such blocks that can be swapped out.
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
        sliding_window_tokens: int = 0,
        cache_groups: tuple[CacheGroup, ...] = (),
        has_states: bool = False,
        num_device_states: int = 0,
        num_host_states: int = 0,
        nan_token_id: int = -1,
        max_allowance: int = 1,
        max_grammar_slots: int = 256,
        has_grammar_threads: bool = False,
        grammar_load_steps: int = 0,
        num_adapter_slots: int = 0,
        read_adapter: Callable[[str], bytes] | None = None,
        adapter_load_steps: int = 0,
        has_adapter_thread: bool = False,
        adapter_names: Sequence[str] = (),
        has_pooling: bool = False,
        is_generative: bool = True,
        sampling_defaults: Mapping[str, float] | None = None,
        numerics_id: str | None = None,
        is_invariant: bool = True,
        why_not_invariant: str = "",
        weights_digest: str | None = None,
        kv_cache_dtype: str = "",
        warning: str = "",
        faults: FakeFaults | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
        instance_id: str | None = None,
        max_transfers: int = 0,
        updates_weights: bool = False,
        max_encoder_tokens: int = 0,
        num_encoder_blocks: int = 512,
        num_encoder_host_blocks: int = 0,
    ) -> None:
        parameters = f"eos_probability {eos_probability}, sliding_window_tokens {sliding_window_tokens}"
        if (has_states or max_encoder_tokens) and not cache_groups:
            kind = CacheKind.WINDOW if sliding_window_tokens else CacheKind.FULL
            pools = num_device_blocks, num_host_blocks
            cache_groups = (CacheGroup(kind, (0,), block_size_tokens, *pools, window_tokens=sliding_window_tokens),)
        if max_encoder_tokens:
            parameters += ", has an encoder"
            num_layers = sum(len(group.layers) for group in cache_groups)
            pools = num_encoder_blocks, num_encoder_host_blocks
            cache_groups += (CacheGroup(CacheKind.ENCODER, (num_layers,), block_size_tokens, *pools),)
        if has_states:
            parameters += ", has states"
            num_layers = sum(len(group.layers) for group in cache_groups)
            saved = num_device_states, num_host_states
            cache_groups += (CacheGroup(CacheKind.STATE, (num_layers,), block_size_tokens, *saved),)
        if not is_generative:
            num_device_blocks = num_host_blocks = max_grammar_slots = num_adapter_slots = 0
        digest = hashlib.sha256(f"fake {LANGUAGE_VERSION}, {parameters}".encode()).hexdigest()
        files = fake_tokenizer_files()
        grammars = grammar_support(max_grammar_slots, files, (EOS_TOKEN_ID,), VOCAB_SIZE)
        self._grammar_masks = GrammarMasks(
            grammars.load_tokenizer, has_threads=has_grammar_threads, num_load_steps=grammar_load_steps
        )
        read = read_adapter or AdapterSources().read
        self._adapters = AdapterLoads(
            lambda slot, adapter: hashlib.sha256(read(adapter.source)).digest(),
            lambda slot: None,
            has_thread=has_adapter_thread and num_adapter_slots > 0,
            num_load_steps=adapter_load_steps,
        )
        self.info = ExecutorInfo(
            instance_id=instance_id or uuid.uuid4().hex,
            model_id="fake",
            model_hash=digest,
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
            sliding_window_tokens=sliding_window_tokens,
            sampling_defaults=sampling_defaults or {},
            numerics_id=f"fake-{LANGUAGE_VERSION}" if numerics_id is None else numerics_id,
            is_invariant=is_invariant,
            why_not_invariant=why_not_invariant,
            weights_digest=digest if weights_digest is None else weights_digest,
            kv_cache_dtype=kv_cache_dtype,
            warning=warning,
            max_allowance=max_allowance,
            max_sample_rows=max_num_batched_tokens if max_allowance > 1 else 0,
            num_grammar_slots=grammars.num_slots,
            matcher_id=grammars.matcher_id,
            max_grammar_bytes=grammars.max_body_bytes,
            num_adapter_slots=num_adapter_slots,
            max_adapter_rank=MAX_ADAPTER_RANK if num_adapter_slots else 0,
            adapter_names=tuple(adapter_names) if num_adapter_slots else (),
            pooling_tasks=frozenset(PoolingTask) if has_pooling else frozenset(),
            embedding_size=EMBEDDING_SIZE if has_pooling else 0,
            num_scores=NUM_SCORES if has_pooling else 0,
            num_token_types=2 if has_pooling else 1,
            is_generative=is_generative,
            cache_groups=cache_groups,
            max_transfers=max_transfers if is_generative else 0,
            updates_weights=updates_weights,
            max_encoder_tokens=max_encoder_tokens,
            decoder_start_token_ids=(0,) if max_encoder_tokens else (),
        )
        self._weights, self._has_weights = np.uint64(1), True  # as in `Histories`
        self._step_ms = step_ms
        self._token_us = token_us
        self._nan_token_id = nan_token_id
        self._faults = faults
        self._sleep = sleep
        self._clock = clock
        self._language = FakeLanguage(eos_probability)
        self._uses_groups = False
        self._lay_out()
        self.reset()

    @property
    def helper_cpu_time_us(self) -> int:
        """Processor time of the threads that follow grammars, in microseconds."""
        return self._grammar_masks.cpu_time_us

    def reset(self, *, uses_groups: bool = False) -> None:
        """Empty the batch table: a scheduler has attached. The cache contents stay."""
        if (uses_groups and bool(self.info.cache_groups)) is not self._uses_groups:
            self._uses_groups = not self._uses_groups
            self._lay_out()
        self.table = table_of(self.info, uses_groups=self._uses_groups)
        self._grammar_masks.reset()
        self._adapters.reset()
        self._histories = Histories(self.table, self._weights)

    def _lay_out(self) -> None:
        """Make empty pools, of each cache group or of all layers together."""
        self._pools = self.info.pools(agreed=self._uses_groups)
        self._caches = [HistoryCache(group) for group in self._pools if group.has_block_tables]
        self._encoder: EncoderCache | None = None
        self._states: SlotStates | None = None
        for group, first_id in zip(self._pools, firsts_of(self._pools).tolist(), strict=False):
            if group.kind is CacheKind.ENCODER:
                self._encoder = EncoderCache(self.info.max_num_seqs, group, first_id)
            elif group.kind is CacheKind.STATE:
                self._states = SlotStates(self.info.max_num_seqs, group, first_id)

    def execute(self, step: Step) -> StepResult:
        """Apply the step to the table, check it, record and return the sampled tokens.

        Raises:
            InvalidStepError: the step does not fit the table or the cache; nothing was written.
            StepFailedError: a wrong block table, a wrong digest, too many tokens, or a planned fault.
        """
        begin_s = self._clock()
        if self._faults is not None:
            self._faults.begin_step()
        check_step(step, self.info, uses_groups=self._uses_groups)
        if self._states is not None:
            check_states(step, self.table, self.info)
        self._adapters.check(step.delta)
        layout = self.table.apply(step.delta)
        self._grammar_masks.follow(step.delta)
        loaded = self._grammar_masks.take_loaded()
        self._adapters.follow(step.delta)
        adapters_loaded = self._adapters.take_loaded()
        digest = check_layout(step, layout, self.table, self.info)
        self._move(step)
        inputs = None
        if self._encoder is not None:
            self._encoder.encode(step.delta.admissions, self._weights)
            inputs = self._encoder.inputs
        self._histories.follow(self.table, step.delta, layout, self._adapters.digests, inputs)
        if self._states is not None:
            self._states.load(step.delta.admissions, self._histories)
            self._states.fork(step.delta.beam_forks)
        if layout.allowances is None:
            self._write_and_read(layout)
            result = self._answer(step, layout)
            self._histories.append(layout, result.sampled_token_ids)
        else:
            result = self._answer_spans(step, layout)
        if self._states is not None:
            self._states.fork(step.delta.forks)
        if self._encoder is not None:
            self._encoder.fork(step.delta.forks)
        result.pooling_outputs = tuple(pool(text, self._nan_token_id) for text in step.pooling_inputs)
        result.table_digest, result.grammars_loaded, result.adapters_loaded = digest, loaded, adapters_loaded
        self.table.resolve(layout, result.sampled_token_ids, result.token_counts)
        num_tokens = layout.num_tokens + num_pooled_tokens(step)
        target_s = self._step_ms * 1e-3 + num_tokens * self._token_us * 1e-6
        self._sleep(max(0.0, target_s - (self._clock() - begin_s)))
        result.execute_duration_us = round((self._clock() - begin_s) * 1e6)
        return result

    @property
    def weights_bytes(self) -> int:
        """0: it has no files; see `Worker`."""
        return 0

    def update_weights(self, folder: Path, weights_digest: str, agree: Agree = lambda _: None) -> None:
        """Take the files of a folder, of any bytes, as weights; see `Worker`."""
        try:
            content = b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))
        except OSError as error:
            raise ModelLoadError(f"{folder.name} cannot be read: {error.strerror}") from error
        if not content:
            raise ModelLoadError(f"{folder.name} has no safetensors files")
        digest = hashlib.sha256(content).hexdigest()
        if weights_digest not in ("", digest):
            raise ModelLoadError(f"{folder.name} has the digest {digest}, not {weights_digest} as was asked for")
        agree(digest)
        self.info = replace(self.info, weights_digest=digest, model_hash=digest)
        self._weights, self._has_weights = np.uint64(int(digest[:16], 16) | 1), True
        self._histories.weights = self._weights

    def sleep(self, level: int) -> None:
        """Forget the cache, and at level 2 the weights; see `Worker`."""
        self._has_weights = self._has_weights and level == 1
        self._lay_out()

    def wake(self) -> None:
        """See `Worker`."""
        if not self._has_weights:
            raise ModelLoadError("there are no weights: update them first")

    def launch(self, step: Step) -> RunningStep:
        """Execute the step; see `executor_svc.worker.interface.Worker.launch`."""
        return DoneStep(self.execute(step))

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """See `Worker`."""
        of_states = () if self._states is None else (STATE.itemsize,)
        return (*(cache.block_bytes for cache in self._token_caches), *of_states)

    @property
    def _token_caches(self) -> Sequence[HistoryCache | EncoderCache]:
        """All but the states, as their blocks are numbered."""
        return self._caches if self._encoder is None else [*self._caches, self._encoder]

    def begin_transfers(self) -> None:
        """Nothing: a launched step is done."""

    def read_blocks(self, block_ids: Int32Array) -> Buffer:
        """Return histories or states; see `Worker`."""
        pool, places = self._pool_of(block_ids)
        return pool[places].tobytes()

    def write_blocks(self, block_ids: Int32Array, content: Buffer) -> None:
        """Take histories or states; see `Worker`."""
        pool, places = self._pool_of(block_ids)
        pool[places] = np.frombuffer(content, pool.dtype).reshape(len(places), *pool.shape[1:])

    def _pool_of(self, block_ids: Int32Array) -> tuple[npt.NDArray[Any], Int32Array]:
        """Return the pool of some blocks, and their numbers in it."""
        firsts = firsts_of(self._pools)
        group = int(np.searchsorted(firsts, block_ids[0], side="right")) - 1
        pools: list[npt.NDArray[Any]] = [cache.device for cache in self._token_caches]
        if self._states is not None:
            pools.append(self._states.device)
        return pools[group], block_ids - firsts[group]

    def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
        """Return the files of the byte tokenizer."""
        return fake_tokenizer_files()

    def _answer(self, step: Step, layout: StepLayout) -> StepResult:
        """Return what follows each sample row's history."""
        rows = SampleRows.of_step(self.table, layout)
        flags = None if rows.is_guided is None else self._grammar_masks.begin(rows)()
        slots, positions = layout.sample_slots, layout.sample_positions
        histories = self._histories.by_position[slots, positions - 1]
        num_missing = self._language.missing_bytes(self.table.token_ids, slots, positions)
        result = StepResult(step.epoch, step.step_id, np.full(len(rows), UNKNOWN_TOKEN, np.int32))
        is_beam = np.zeros(len(rows), np.bool_) if layout.num_candidates is None else layout.num_candidates > 0
        sampled = np.flatnonzero(~is_beam)
        add_samples(result, sampled, self._language, histories[sampled], num_missing[sampled], rows[sampled])
        self._replace_samples(step, rows, result)
        if layout.num_candidates is not None:
            scores = self._language.logprobs(histories[is_beam], num_missing[is_beam])
            processed_scores(scores, rows[is_beam])
            candidates = likeliest(scores, layout.num_candidates[is_beam])
            result.candidate_token_ids, result.candidate_logprobs = candidates
            flag_empty(result, np.flatnonzero(is_beam), scores)
        if layout.num_prompt_logprobs is not None:
            self._answer_prompt(result, layout, layout.num_prompt_logprobs)
        if flags is not None:
            result.row_flags = flags if result.row_flags is None else np.where(flags, flags, result.row_flags)
        if (is_nan := self._are_nan(slots, positions)).any():
            flags = np.zeros(len(rows), np.uint8) if result.row_flags is None else result.row_flags
            result.row_flags = np.where(is_nan, np.uint8(RowFlag.NOT_FINITE), flags)
            if result.logprobs is not None:
                result.logprobs[is_nan] = np.nan
            if result.candidate_logprobs is not None and layout.num_candidates is not None:
                result.candidate_logprobs[is_nan.repeat(layout.num_candidates)] = np.nan
        return result

    def _answer_spans(self, step: Step, layout: StepLayout) -> StepResult:
        """Answer rows that may get several tokens; the cache holds drafts behind the tokens that they got."""
        num_wanted = num_proved(layout, self._histories)
        draft_counts = (layout.most_tokens - (layout.most_tokens > 0)).astype(np.uint8)
        if step.draft_counts is not None:
            draft_counts = step.draft_counts
            num_wanted = np.where(num_wanted > 0, draft_counts.astype(np.int32) + 1, 0)
        first = self._answer(step, layout)
        self._histories.append(layout, first.sampled_token_ids)
        spans = Spans(layout, first)
        for num_tokens in range(1, int(num_wanted.max(initial=0))):
            rows = spans.going_on(num_wanted, num_tokens)
            part = spans.part(rows, num_tokens)
            self.table.token_ids[part.sample_slots, part.sample_positions - 1] = spans.last_of(rows)
            answer = self._answer(step, part)
            self._histories.append(part, answer.sampled_token_ids)
            spans.add(part, rows, answer)
        result = spans.result()
        result.draft_counts = draft_counts
        assert result.token_counts is not None
        with self._histories.wrong_drafts(layout, result.token_counts):
            self._write_and_read(layout, result.token_counts)
        return result

    def _write_and_read(self, layout: StepLayout, token_counts: TokenCounts | None = None) -> None:
        """Let every cache group and every state take the tokens of a step, and check what the layers see."""
        for cache, tables in zip(self._caches, self.table.groups, strict=True):
            cache.write(tables, layout, self._histories)
            cache.check_reads(tables, layout, self._histories)
        if self._encoder is not None and self.table.encoder is not None:
            self._encoder.check_reads(self.table.encoder, self.table.num_encoder_tokens, layout.slots)
        if self._states is not None:
            self._states.take(layout, self._histories, token_counts)

    def _move(self, step: Step) -> None:
        """Save states, and move blocks: in the order of a step."""
        moves = split_moves(step, self._pools)
        if self._states is not None:
            self._states.save(step.states_to_save)
            self._states.move(moves.pop())
        for cache, own in zip(self._token_caches, moves, strict=True):
            cache.move(own)
        if self._encoder is not None:
            self._encoder.fork(step.delta.beam_forks)

    def _replace_samples(self, step: Step, rows: SampleRows, result: StepResult) -> None:
        """Put other tokens in place of the sampled ones; this model samples them all."""

    def _are_nan(self, slots: Int32Array, positions: Int32Array) -> BoolArray:
        """Return which of some positions of slots have the token before them that makes NaN, [num_positions]."""
        if self._nan_token_id < 0:
            return np.zeros(len(slots), np.bool_)
        places = zip(slots.tolist(), positions.tolist(), strict=True)
        return np.array([self._nan_token_id in self.table.token_ids[slot, :end] for slot, end in places], np.bool_)

    def _answer_prompt(self, result: StepResult, layout: StepLayout, counts: Int32Array) -> None:
        """Add the log-probabilities of prompt tokens, `counts` in each row of the layout."""
        assert layout.num_prompt_alternatives is not None
        slots = np.repeat(layout.slots, counts)
        positions = np.repeat(layout.starts + 1 - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        positions = positions.astype(np.int32)
        num_missing = self._language.missing_bytes(self.table.token_ids, slots, positions)
        logprobs = self._language.logprobs(self._histories.by_position[slots, positions - 1], num_missing)
        result.prompt_logprobs = logprobs[np.arange(len(slots)), self.table.token_ids[slots, positions]]
        result.prompt_logprobs[self._are_nan(slots, positions)] = np.nan
        alternatives = likeliest(logprobs, np.repeat(layout.num_prompt_alternatives, counts))
        result.prompt_alternative_token_ids, result.prompt_alternative_logprobs = alternatives
