"""How the fake executor carries out sampling parameters: on its little language, in NumPy.

Rules, penalties and `min_tokens` work as they do on logits, with the language's log-probabilities in their
place; the row then takes what is likeliest, of its own distribution if it has a seed. Filters and the
temperature have nothing to work on: whatever else is drawn is drawn by hash.
"""

import numpy as np
import numpy.typing as npt

from executor_svc.fake.language import FakeLanguage, Float32Array, UInt64Array
from executor_svc.fake.tokenizer import VOCAB_SIZE
from executor_svc.sampler.sample_rows import FlatTokens, SampleRows
from octavo_shared.step_wire.step import NO_LOGPROBS, BoolArray, Int32Array, RowFlag, StepResult

SEED_STRIDE = np.uint64(0x9E3779B97F4A7C15)


def add_samples(
    result: StepResult,
    index: npt.NDArray[np.int64],
    language: FakeLanguage,
    histories: UInt64Array,
    num_missing: Int32Array,
    rows: SampleRows,
) -> None:
    """Fill in what sampled rows get: tokens, log-probabilities, alternatives, a flag where nothing is left.

    Args:
        result: Has a place for each sample row of the step.
        index: Which of them the rows are, [num_rows]; the others are beams'.
        language: Says what follows.
        histories: Hash of each row's history, [num_rows].
        num_missing: Bytes that the last character of each lacks, [num_rows].
        rows: The rows.
    """
    sampling = rows.sampling
    token_ids = language.sample(histories, num_missing, sampling)
    processed = np.flatnonzero(rows.are_processed())
    if len(processed):
        is_random = sampling["temperature"][processed] > 0
        outputs = (sampling["output_index"][processed].astype(np.uint64) + np.uint64(1)) * SEED_STRIDE
        states = histories[processed] ^ np.where(is_random, sampling["seed"][processed] ^ outputs, np.uint64(0))
        scores = processed_scores(language.logprobs(states, num_missing[processed]), rows[processed])
        token_ids[processed] = scores.argmax(axis=1)
        flag_empty(result, index[processed], scores, None if rows.is_guided is None else rows.is_guided[processed])
    result.sampled_token_ids[index] = token_ids
    asked = np.flatnonzero(sampling["num_logprobs"] != NO_LOGPROBS)
    if not len(asked):
        return
    all_logprobs = language.logprobs(histories[asked], num_missing[asked])
    result.logprobs = np.full(len(result.sampled_token_ids), np.nan, np.float32)
    result.logprobs[index[asked]] = all_logprobs[np.arange(len(asked)), token_ids[asked]]
    counts = np.maximum(sampling["num_logprobs"][asked], 0)
    result.alternative_token_ids, result.alternative_logprobs = likeliest(all_logprobs, counts)


def flag_empty(
    result: StepResult, index: npt.NDArray[np.int64], scores: Float32Array, is_guided: BoolArray | None = None
) -> None:
    """Flag the rows of a step in which no token may come.

    Args:
        result: Has a place for each sample row of the step.
        index: Which of them the rows are, [num_rows].
        scores: Processed, [num_rows, VOCAB_SIZE].
        is_guided: Rows with a grammar, [num_rows]; None: there is none.
    """
    has_none = scores.max(axis=1) == -np.inf
    if not has_none.any():
        return
    if result.row_flags is None:
        result.row_flags = np.zeros(len(result.sampled_token_ids), np.uint8)
    of_grammar = np.zeros(len(index), np.bool_) if is_guided is None else is_guided
    flags = np.where(of_grammar, RowFlag.NO_TOKEN_ALLOWED, RowFlag.NOT_FINITE)
    result.row_flags[index[has_none]] = flags[has_none]


def likeliest(
    scores: Float32Array, counts: npt.NDArray[np.integer]
) -> tuple[Int32Array, Float32Array] | tuple[None, None]:
    """Return the `counts` largest of each row of scores, [num_rows, VOCAB_SIZE], joined; None: no row wants any."""
    if not counts.any():
        return None, None
    token_ids = np.argsort(-scores, axis=1, kind="stable").astype(np.int32)
    wanted = np.arange(VOCAB_SIZE) < counts[:, None]
    return token_ids[wanted], np.take_along_axis(scores, token_ids, 1)[wanted]


def processed_scores(scores: Float32Array, rows: SampleRows) -> Float32Array:
    """Apply rules and penalties to log-probabilities, [num_rows, VOCAB_SIZE]; they are overwritten."""
    biased, biases = rows.biased_tokens()
    scores[_places(biased)] += biases
    sampling = rows.sampling
    every_row = np.arange(len(rows))
    history = rows.history(every_row, output_only=False)
    former, penalties = scores[_places(history)], sampling["repetition_penalty"][history.rows]
    scores[_places(history)] = np.where(former < 0, former * penalties, former / penalties)
    output = rows.history(every_row, output_only=True)
    counts = np.zeros(scores.shape, np.float32)
    np.add.at(counts, _places(output), 1)
    scores -= sampling["frequency_penalty"][:, None] * counts
    scores -= sampling["presence_penalty"][:, None] * (counts > 0)
    scores[_places(_repeating_tokens(rows))] = -np.inf
    scores[_places(rows.forbidden_tokens())] = -np.inf
    scores[_places(rows.completed_tokens())] = -np.inf
    asking, masks = rows.allowed_masks()
    for row, mask in zip(asking.tolist(), masks, strict=True):
        scores[row, np.unpackbits(mask, count=VOCAB_SIZE, bitorder="little") == 0] = -np.inf
    return scores


def _repeating_tokens(rows: SampleRows) -> FlatTokens:
    """Return the tokens that would end an n-gram that their row has already."""
    found: list[tuple[int, int]] = []
    for row, size in enumerate(rows.sampling["no_repeat_ngram_size"].tolist()):
        if not size:
            continue
        history = rows.token_ids[rows.slots[row], : rows.num_tokens[row]].tolist()
        last = history[len(history) - size + 1 :]
        for begin in range(len(history) - size + 1):
            *prefix, end = history[begin : begin + size]
            if prefix == last:
                found.append((row, end))
    places = np.array(found, np.int64).reshape(-1, 2)
    return FlatTokens(places[:, 0], places[:, 1])


def _places(tokens: FlatTokens) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    return tokens.rows, tokens.token_ids
