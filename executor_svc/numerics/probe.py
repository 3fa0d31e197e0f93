"""The probe: a fixed computation through all kernels, from token ids through all filters to ids and log-probabilities.

It finds what no list of versions does: another function of the C library's maths, a processor that rounds differently,
a change of code that was meant to change nothing. Some models of a few thousand weights compute prompts in
chunks and single tokens behind them; the sampler draws from rows of counted scores, by each filter alone and by all,
with penalties and rules, and lists candidates. All bits that come out are hashed. It takes about 0.05 s.

Nothing of it depends on the weights of a model, on the number of threads, on the size of blocks or on what ran before.
"""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

from executor_svc.attention.interface import AttentionMetadata
from executor_svc.cache.cache_engine import CacheEngine, CacheShape
from executor_svc.models.config import ModelConfig
from executor_svc.models.kernels import MadeModel
from executor_svc.numerics.probe_models import MAX_POSITION_EMBEDDINGS, CountedWeights, counted_values, probe_models
from executor_svc.sampler.interface import Alternatives
from executor_svc.sampler.sample_rows import SampleRows
from executor_svc.sampler.sampler import Sampler
from octavo_shared.step_wire.step import NO_LOGPROBS, SAMPLING_ROW, Int32Array, SamplingRow
from octavo_shared.step_wire.token_rules import TokenRules, pack_mask, pad_words

_BLOCK_SIZE = 16
_NUM_BLOCKS = MAX_POSITION_EMBEDDINGS // _BLOCK_SIZE
# Tokens of two sequences in each step, (first, second): a prompt in chunks beside a short one that decodes. Long
# prompts pass two of the places where attention cuts the keys of a query.
_STEPS = ((61, 5), (50, 1), (1, 1))
_LONG_STEPS = ((101, 5), (700, 1), (1, 1))
_LONG = ("grouped_heads", "wide_heads_window", "alibi")
_NUM_WANTED = 9  # logits of the last tokens of a step; they attend to the others

_VOCAB_SIZE = 1_531
_NUM_DRAWS = 24  # of each way to sample
_SAMPLINGS = (
    SamplingRow(temperature=0.7),
    SamplingRow(temperature=1.3, top_k=40),
    SamplingRow(temperature=0.9, top_p=0.8),
    SamplingRow(temperature=1.0, min_p=0.05),
    SamplingRow(temperature=1.0, typical_p=0.6),
    # Two filters that give other tokens in another order.
    SamplingRow(temperature=1.0, top_k=60, top_p=0.7),
    SamplingRow(temperature=1.0, top_p=0.7, min_p=0.4),
    SamplingRow(temperature=1.0, min_p=0.2, typical_p=0.5),
    SamplingRow(temperature=1.1, top_k=300, top_p=0.7, min_p=0.01, typical_p=0.7),
    SamplingRow(repetition_penalty=1.3),
    SamplingRow(temperature=1.0, presence_penalty=0.4, frequency_penalty=0.3, min_tokens=9),
    SamplingRow(),
)
_HISTORY_TOKENS, _PROMPT_TOKENS = 23, 17


def probe_bits(
    make: Callable[[ModelConfig], MadeModel], sampler: Sampler, cache_dtype: torch.dtype = torch.float32
) -> str:
    """Run the probe; return the SHA-256 of all bits that came out, 64 hexadecimal digits.

    Args:
        make: Makes a model as the served one is made. A model that is not invariant is left out: its bits mean nothing.
        sampler: Of the executor.
        cache_dtype: Format of the KV cache.
    """
    hasher = hashlib.sha256()
    with torch.inference_mode():
        for name, config in probe_models().items():
            made = make(config)
            if made.why_not_invariant is None:
                made.model.load(CountedWeights())
                hasher.update(name.encode())
                for logits in _run(made, config, _LONG_STEPS if name in _LONG else _STEPS, cache_dtype):
                    hasher.update(logits.numpy().tobytes())
                    _add(hasher, sampler.prompt_logprobs(logits, lambda rows: rows, *_of_each(logits)))
        _add(hasher, *_sample(sampler))
    return hasher.hexdigest()


def _run(
    made: MadeModel, config: ModelConfig, steps: Sequence[tuple[int, int]], cache_dtype: torch.dtype
) -> Sequence[torch.Tensor]:
    """Return the logits of the last tokens of each step, [num_wanted, vocab_size]."""
    model = made.model
    shape = CacheShape(len(config.layers), _BLOCK_SIZE, config.num_key_value_heads, config.head_dim, cache_dtype)
    caches = CacheEngine(shape, 2 * _NUM_BLOCKS, 0, torch.device("cpu")).layers
    tables = np.arange(2 * _NUM_BLOCKS, dtype=np.int32).reshape(_NUM_BLOCKS, 2).T.copy()  # blocks by turns
    starts = np.zeros(2, np.int32)
    found = []
    for step, lengths in enumerate(np.array(steps, np.int32)):
        rows = np.repeat([0, 1], lengths)
        positions = np.concatenate([np.arange(length) for length in lengths]) + starts[rows]
        slots = tables[rows, positions // _BLOCK_SIZE].astype(np.int64) * _BLOCK_SIZE + positions % _BLOCK_SIZE
        metadata = AttentionMetadata(starts.copy(), lengths, tables, torch.from_numpy(slots))
        token_ids = torch.from_numpy((positions * 37 + rows * 11 + step) % config.vocab_size)
        plan = made.attention.plan(metadata, caches[0])
        wanted = torch.arange(max(0, len(positions) - _NUM_WANTED), len(positions))
        hidden = model.forward(token_ids, torch.from_numpy(positions), caches, plan, wanted)
        logits = model.logits(hidden)
        assert logits is not None, "one rank has them all"
        found.append(logits)
        starts += lengths
    return found


def _of_each(logits: torch.Tensor) -> tuple[Int32Array, Int32Array]:
    """Return a token for each row, and how many alternatives it gets."""
    rows = np.arange(len(logits), dtype=np.int32)
    return rows % logits.shape[1], rows % 3


def _sample(sampler: Sampler) -> Sequence[object]:
    logits = torch.from_numpy(counted_values("logits", (4, _VOCAB_SIZE)) * np.float32(64.0))
    sampling = np.array([row.as_tuple() for row in _SAMPLINGS], SAMPLING_ROW).repeat(_NUM_DRAWS)
    number = np.arange(len(sampling), dtype=np.int32)
    sampling["seed"], sampling["output_index"] = number, number % 3
    sampling["num_logprobs"] = np.where(number % 2, NO_LOGPROBS, number % 5)
    rules = [None, _rules()]
    rows = SampleRows(
        sampling=sampling,
        rules=[rules[index] for index in (number % 4 == 3).tolist()],
        slots=number % 2,
        num_tokens=np.full(len(number), _HISTORY_TOKENS, np.int32),
        num_prompt_tokens=np.full(len(number), _PROMPT_TOKENS, np.int32),
        token_ids=(np.arange(2 * _HISTORY_TOKENS, dtype=np.int32) * 131 % _VOCAB_SIZE).reshape(2, -1),
    )
    sampled = sampler.sample(logits, number % 4, rows)
    candidates = sampler.candidates(logits, number % 4, rows, 1 + number % 7)
    return sampled.token_ids, sampled.logprobs, sampled.alternatives, candidates


def _rules() -> TokenRules:
    allowed = np.arange(0, _VOCAB_SIZE, 2, dtype=np.int32)
    return TokenRules(
        biased_token_ids=np.array([2, 700], np.int32),
        biases=np.array([1.5, -2.25], np.float32),
        stop_token_ids=np.array([4], np.int32),
        banned_token_ids=np.array([6, 8], np.int32),
        banned_words=pad_words([[(_HISTORY_TOKENS - 1) * 131 % _VOCAB_SIZE, 10]]),
        allowed_mask=pack_mask(allowed, _VOCAB_SIZE),
    )


def _add(hasher: "hashlib._Hash", *results: object) -> None:
    """Hash arrays, values that hold them, and that there is none."""
    for result in results:
        if isinstance(result, np.ndarray):
            hasher.update(result.tobytes())
        elif isinstance(result, Alternatives):
            _add(hasher, result.token_ids, result.logprobs)
        elif isinstance(result, tuple):
            _add(hasher, *result)
        else:
            assert result is None, f"{type(result)} has no bits"
            hasher.update(b"none")
