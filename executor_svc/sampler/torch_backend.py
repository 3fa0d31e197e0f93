"""The sampler in torch, for every device, and the reference for the sampler in C.

Some rows at a time, so that the memory for it has a bound that does not grow with the batch.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F  # noqa: N812

from executor_svc.sampler.filters import (
    WIDTHS,
    Draws,
    SamplingRows,
    are_cut_by_likelihood,
    draw,
    draw_survivor,
    filtered_scores,
    likeliest_survivors,
)
from executor_svc.sampler.interface import NOT_FINITE, Alternatives, DrawOnDevice, Float32Array, join_alternatives
from executor_svc.sampler.likeliest import (
    are_finite,
    largest_index,
    likeliest,
    log_softmax,
    logprobs_of,
    rows_of,
    take_first,
)
from executor_svc.sampler.sample_rows import FlatTokens, SampleRows, uniforms
from octavo_shared.step_wire.step import BoolArray, Int32Array

# Logits that are worked on at one time: it takes some ten times their memory, in float64 and int64 too.
VALUES_AT_ONCE = 4 * 2**20


class TorchBackend:
    """`SamplingBackend` by torch.

    Args:
        draw_on_device: Filters and draws on a GPU, one row like another; None: torch does, with sums on a GPU in an
            order that follows the number of rows.
    """

    def __init__(self, draw_on_device: DrawOnDevice | None = None) -> None:
        self._choose_from = _choose_from if draw_on_device is None else partial(_choose_on_device, draw_on_device)

    def choose(self, logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows) -> Int32Array:
        """Return a token for each row; see `SamplingBackend`."""
        logits = logits.contiguous()
        token_ids = np.empty(len(rows), np.int32)
        for span in _row_spans(len(rows), logits.shape[1]):
            token_ids[span] = self._choose(logits, logit_rows[span], rows[span])
        return token_ids

    def _choose(self, logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows) -> Int32Array:
        token_ids = np.empty(len(rows), np.int32)
        is_greedy, is_processed = rows.sampling["temperature"] <= 0, rows.are_processed()
        plain = np.flatnonzero(is_greedy & ~is_processed)
        if len(plain):
            distinct, inverse = np.unique(logit_rows[plain], return_inverse=True)
            token_ids[plain] = largest_index(rows_of(logits, distinct)).cpu().numpy()[inverse]
        others = np.flatnonzero(~is_greedy | is_processed)
        if len(others):
            scores, of_scores = _processed(logits, logit_rows[others], rows[others], is_processed[others])
            token_ids[others] = self._choose_from(scores, of_scores, rows[others])
        return token_ids

    def logprobs(
        self, logits: torch.Tensor, logit_rows: Int32Array, token_ids: Int32Array, num_alternatives: Int32Array
    ) -> tuple[Float32Array, Alternatives | None]:
        """Return the log-probability of a token of each row, and of the likeliest; see `SamplingBackend`."""
        logits = logits.contiguous()
        logprobs = np.empty(len(logit_rows), np.float32)
        found: list[Alternatives] = []
        for span in _row_spans(len(logit_rows), logits.shape[1]):
            logprobs[span], some = logprobs_of(logits, logit_rows[span], token_ids[span], num_alternatives[span])
            if some is not None:
                found.append(some)
        return logprobs, join_alternatives(found)

    def candidates(
        self, logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows, num_candidates: Int32Array
    ) -> Alternatives:
        """Return the likeliest tokens of beam rows; see `SamplingBackend`."""
        logits = logits.contiguous()
        parts = [
            _candidates(logits, logit_rows[span], rows[span], num_candidates[span])
            for span in _row_spans(len(rows), logits.shape[1])
        ]
        found = join_alternatives(parts)
        assert found is not None, "there are beams"
        return found


def _row_spans(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Return the parts of [num_rows] rows that are worked on at one time."""
    num_at_once = max(1, VALUES_AT_ONCE // vocab_size)
    for begin in range(0, num_rows, num_at_once):
        yield slice(begin, min(begin + num_at_once, num_rows))


def _processed(
    logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows, is_processed: BoolArray
) -> tuple[torch.Tensor, Int32Array]:
    """Return scores, [any, vocab_size], and which of them each row chooses from; the logits if none changes."""
    if not is_processed.any():
        return logits, logit_rows
    scores = logits.index_select(0, torch.from_numpy(logit_rows).to(logits.device))
    is_finite = are_finite(scores)
    process(scores, rows)  # the lists of a row without rules are empty
    scores[:, 0].masked_fill_(~is_finite, torch.nan)  # the rules may have hidden it
    return scores, np.arange(len(rows), dtype=np.int32)


def _choose_from(scores: torch.Tensor, of_scores: Int32Array, rows: SampleRows) -> Int32Array:
    """Return a token for each row, [num_rows]; `scores`, [any, vocab_size], are unchanged."""
    sampling = rows.sampling
    token_ids = np.empty(len(rows), np.int32)
    is_greedy = sampling["temperature"] <= 0
    greedy, drawing = np.flatnonzero(is_greedy), np.flatnonzero(~is_greedy)
    if len(greedy):
        token_ids[greedy] = largest_index(rows_of(scores, of_scores[greedy])).cpu().numpy()
    if len(drawing):
        draws = uniforms(sampling["seed"], sampling["output_index"], rows.num_output_tokens)[drawing]
        drawn_from = rows_of(scores, of_scores[drawing])
        is_finite = are_finite(drawn_from).cpu().numpy()
        token_ids[drawing] = np.where(is_finite, _draw(drawn_from, sampling[drawing], draws), NOT_FINITE)
    return token_ids


def _choose_on_device(
    draw_on_device: DrawOnDevice, scores: torch.Tensor, of_scores: Int32Array, rows: SampleRows
) -> Int32Array:
    """Return what `_choose_from` does, by the kernel that serves steps in which nothing but tokens is asked for."""
    sampling = rows.sampling
    draws = uniforms(sampling["seed"], sampling["output_index"], rows.num_output_tokens)
    token_ids, is_not_finite = draw_on_device(scores, of_scores, sampling, draws).cpu().numpy().astype(np.int32)
    return np.where(is_not_finite, np.int32(NOT_FINITE), token_ids)


def _draw(scores: torch.Tensor, sampling: SamplingRows, draws: Draws) -> Int32Array:
    """Return a token for each row, [num_rows], drawn from what the filters leave; `scores` are unchanged."""
    token_ids = np.empty(len(sampling), np.int32)
    is_open, may_be_cut = np.ones(len(sampling), np.bool_), are_cut_by_likelihood(sampling, scores.shape[1])
    for width in WIDTHS:
        cut = np.flatnonzero(is_open & may_be_cut)
        if len(cut):
            left = likeliest_survivors(rows_of(scores, cut), sampling[cut], width)
            token_ids[cut] = draw_survivor(left, draws[cut]).cpu().numpy()
            is_open[cut] = ~left.are_all
    rest = np.flatnonzero(is_open)
    if len(rest):
        filtered = filtered_scores(rows_of(scores, rest), sampling[rest])
        token_ids[rest] = draw(filtered, draws[rest]).cpu().numpy()
    return token_ids


def _candidates(
    logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows, num_candidates: Int32Array
) -> Alternatives:
    logprobs = log_softmax(rows_of(logits, logit_rows))
    if rows.are_processed().any():
        process(logprobs, rows)
    values, token_ids = likeliest(logprobs, int(num_candidates.max()))
    return take_first(token_ids, values, num_candidates)


# Added to the 8 tokens of a byte of an allow-list: twice as fast as a mask that is filled in.
_ADDED_BY_BYTE = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1, 0.0, -np.inf
).astype(np.float32)


def process(scores: torch.Tensor, rows: SampleRows) -> None:
    """Apply the rules and penalties of some rows to their scores.

    Args:
        scores: [num_rows, vocab_size] float32, contiguous; overwritten. -inf: the token cannot come.
        rows: The rows, in the same order.
    """
    _add_biases(scores, rows)
    _penalize_repetition(scores, rows)
    _penalize_output(scores, rows)
    scores.view(-1).index_fill_(0, _places(rows.forbidden_tokens(), scores), -torch.inf)
    _keep_allowed(scores, rows)


def _add_biases(scores: torch.Tensor, rows: SampleRows) -> None:
    tokens, biases = rows.biased_tokens()
    if len(biases):
        scores.view(-1).scatter_add_(0, _places(tokens, scores), torch.from_numpy(biases).to(scores.device))


def _penalize_repetition(scores: torch.Tensor, rows: SampleRows) -> None:
    """Make every token of prompt and output less likely, once however often it is there.

    Source: Keskar et al. 2019, "CTRL", section 4.1; negative logits are multiplied, as in transformers.
    """
    asking = np.flatnonzero(rows.sampling["repetition_penalty"] != 1)
    if not len(asking):
        return
    history = rows.history(asking, output_only=False)
    flat, places = scores.view(-1), _places(history, scores)
    penalties = _of_rows(rows.sampling["repetition_penalty"], history, scores.device)
    former = flat[places]
    flat.scatter_(0, places, torch.where(former < 0, former * penalties, former / penalties))


def _penalize_output(scores: torch.Tensor, rows: SampleRows) -> None:
    presence, frequency = rows.sampling["presence_penalty"], rows.sampling["frequency_penalty"]
    asking = np.flatnonzero((presence != 0) | (frequency != 0))
    if not len(asking):
        return
    output = rows.history(asking, output_only=True)
    vocab_size = scores.shape[1]
    distinct, counts = np.unique(output.rows * vocab_size + output.token_ids, return_counts=True)
    of_rows = distinct // vocab_size
    penalties = frequency[of_rows] * counts.astype(np.float32) + presence[of_rows]
    places = torch.from_numpy(distinct).to(scores.device)
    scores.view(-1).scatter_add_(0, places, torch.from_numpy(-penalties).to(scores.device))


def _keep_allowed(scores: torch.Tensor, rows: SampleRows) -> None:
    asking, packed = rows.allowed_masks()
    if not len(asking):
        return
    table = torch.from_numpy(_ADDED_BY_BYTE).to(scores.device)
    added = F.embedding(torch.from_numpy(packed.astype(np.int64)).to(scores.device), table).flatten(1)
    added = added[:, : scores.shape[1]]
    if len(asking) == len(scores):
        scores.add_(added)
    else:
        scores.index_add_(0, torch.from_numpy(asking).to(scores.device), added)


def _places(tokens: FlatTokens, scores: torch.Tensor) -> torch.Tensor:
    """Return where in the flat scores the tokens are, [num_tokens] int64."""
    return torch.from_numpy(tokens.rows * scores.shape[1] + tokens.token_ids).to(scores.device)


def _of_rows(values: npt.NDArray[np.generic], tokens: FlatTokens, device: torch.device) -> torch.Tensor:
    """Return for each token the value of its row, [num_tokens]."""
    return torch.from_numpy(np.ascontiguousarray(values)[tokens.rows]).to(device)
