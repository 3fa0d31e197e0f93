"""The sampler in torch, for every device, and the reference for the sampler in C.

Some rows at a time, so that the memory for it has a bound that does not grow with the batch.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from executor_svc.sampler.drawing import Draws, draw, draw_survivor
from executor_svc.sampler.filters import (
    WIDTHS,
    SamplingRows,
    are_cut_by_likelihood,
    filtered_scores,
    likeliest_survivors,
)
from executor_svc.sampler.interface import NOT_FINITE, Alternatives, DrawOnDevice, Float32Array, join_alternatives
from executor_svc.sampler.likeliest import are_finite, largest_index, likeliest
from executor_svc.sampler.logprobs import log_softmax, logprobs_of, rows_of, take_first
from executor_svc.sampler.processors import process
from executor_svc.sampler.sample_rows import SampleRows, uniforms
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
