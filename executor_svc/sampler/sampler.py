"""The order of the stages: raw log-probabilities, processors, filters, draw. Read it first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.native.sampling import NativeSampling
from executor_svc.sampler.drawing import Draws, draw, draw_survivor
from executor_svc.sampler.filters import (
    WIDTHS,
    SamplingRows,
    are_cut_by_likelihood,
    filtered_scores,
    likeliest_survivors,
)
from executor_svc.sampler.likeliest import largest_index, likeliest
from executor_svc.sampler.logprobs import (
    Alternatives,
    join_alternatives,
    logprobs_of,
    prompt_logprobs,
    row_spans,
    rows_of,
    take_first,
)
from executor_svc.sampler.processors import process
from executor_svc.sampler.sample_rows import SampleRows, uniforms
from shared.step import NO_LOGPROBS, BoolArray, Int32Array

Float32Array = npt.NDArray[np.float32]

# (logits, row of the logits of each sample row, how each is sampled, its draw) -> token ids on the device.
DrawOnDevice = Callable[[torch.Tensor, Int32Array, SamplingRows, Draws], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token for each sample row, and what was asked for beside it.

    `logprobs` are NaN in rows that did not ask; None: no row did. `alternatives` are those of the rows
    with `num_logprobs` above 0; None: there is no such row. All are of the raw logits.
    """

    token_ids: Int32Array  # [num_samples]
    logprobs: Float32Array | None = None  # [num_samples]
    alternatives: Alternatives | None = None


class Sampler:
    """Draws one token for each sample row, or lists candidates. Rows carry their parameters; nothing is kept.

    Args:
        native: The C library, for logits on a CPU; None: torch does it all, on any device. The two give the same
            tokens, but where a draw falls on the edge between two, up to rounding.
        draw_on_device: What samples on a GPU without the host; None: the host waits for each step.
    """

    def __init__(self, native: NativeSampling | None = None, draw_on_device: DrawOnDevice | None = None) -> None:
        self._native = native
        self._draw_on_device = draw_on_device

    @property
    def samples_on_device(self) -> bool:
        """Whether there is `sample_on_device`."""
        return self._draw_on_device is not None

    def sample_on_device(self, logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows) -> torch.Tensor:
        """Return the tokens that `sample` does, [num_samples] int64, on the device, without waiting for it.

        Args:
            logits: Raw, [num_logit_rows, vocab_size] float32; unchanged.
            logit_rows: The row of `logits` that each sample row uses, [num_samples].
            rows: The sample rows, without penalties and rules.
        """
        assert self._draw_on_device is not None
        sampling = rows.sampling
        draws = uniforms(sampling["seed"], sampling["output_index"], rows.num_output_tokens)
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        return self._draw_on_device(logits, logit_rows, sampling, draws)

    def sample(self, logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows) -> Sampled:
        """Return the sampled tokens.

        A row in which no token may come gets some token: whoever makes the rules keeps that from happening. Some
        rows at a time, so that the memory for it has a bound that does not grow with the batch.

        Args:
            logits: Raw, [num_logit_rows, vocab_size] float32; unchanged.
            logit_rows: The row of `logits` that each sample row uses, [num_samples].
            rows: The sample rows.
        """
        logits = logits.contiguous()
        spans = list(row_spans(len(rows), logits.shape[1]))
        if len(spans) <= 1:
            return self._sample(logits, logit_rows, rows)
        return _join([self._sample(logits, logit_rows[span], rows[span]) for span in spans])

    def _sample(self, logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows) -> Sampled:
        """Do what `sample` does with all rows at once."""
        token_ids = np.empty(len(rows), np.int32)
        is_greedy, is_processed = rows.sampling["temperature"] <= 0, rows.are_processed()
        plain = np.flatnonzero(is_greedy & ~is_processed)
        if len(plain):
            distinct, inverse = np.unique(logit_rows[plain], return_inverse=True)
            token_ids[plain] = largest_index(rows_of(logits, distinct)).cpu().numpy()[inverse]
        others = np.flatnonzero(~is_greedy | is_processed)
        if len(others):
            scores, of_scores = self._processed(logits, logit_rows[others], rows[others], is_processed[others])
            token_ids[others] = self._choose(scores, of_scores, rows[others])
        return self._with_logprobs(logits, logit_rows, rows, token_ids)

    def candidates(
        self, logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows, num_candidates: Int32Array
    ) -> Alternatives:
        """Return the likeliest tokens of beam rows, after the processors, as transformers' beam search has them.

        Args:
            logits: Raw, [num_logit_rows, vocab_size] float32; unchanged.
            logit_rows: The row of `logits` that each beam row uses, [num_beams].
            rows: The beam rows.
            num_candidates: How many each beam row wants, [num_beams], at most vocab_size.

        Returns:
            The processors work on the log-softmax of the raw logits, and nothing is normalised after them; a
            token that may not come has -inf.
        """
        spans = row_spans(len(rows), logits.shape[1])
        return join_alternatives(
            [self._candidates(logits, logit_rows[span], rows[span], num_candidates[span]) for span in spans]
        )

    def _candidates(
        self, logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows, num_candidates: Int32Array
    ) -> Alternatives:
        """Do what `candidates` does with all rows at once."""
        logprobs = torch.log_softmax(logits.index_select(0, torch.from_numpy(logit_rows).to(logits.device)), -1)
        if rows.are_processed().any():
            process(logprobs, rows, self._native)
        values, token_ids = likeliest(logprobs, int(num_candidates.max()))
        return take_first(token_ids, values, num_candidates)

    def prompt_logprobs(
        self,
        hidden: torch.Tensor,
        to_logits: Callable[[torch.Tensor], torch.Tensor],
        token_ids: Int32Array,
        num_alternatives: Int32Array,
    ) -> tuple[Float32Array, Alternatives | None]:
        """Return the log-probabilities of prompt tokens; see `executor_svc.sampler.logprobs.prompt_logprobs`."""
        return prompt_logprobs(hidden, to_logits, token_ids, num_alternatives, self._native)

    def _with_logprobs(
        self, logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows, token_ids: Int32Array
    ) -> Sampled:
        num_logprobs = rows.sampling["num_logprobs"]
        asked = np.flatnonzero(num_logprobs != NO_LOGPROBS)
        if not len(asked):
            return Sampled(token_ids)
        logprobs = np.full(len(rows), np.nan, np.float32)
        logprobs[asked], alternatives = logprobs_of(
            logits, logit_rows[asked], token_ids[asked], num_logprobs[asked], self._native
        )
        return Sampled(token_ids, logprobs, alternatives)

    def _processed(
        self, logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows, is_processed: BoolArray
    ) -> tuple[torch.Tensor, Int32Array]:
        """Return scores, [any, vocab_size], and which of them each row chooses from; the logits if none changes."""
        if not is_processed.any():
            return logits, logit_rows
        scores = logits.index_select(0, torch.from_numpy(logit_rows).to(logits.device))
        process(scores, rows, self._native)  # the lists of a row without rules are empty
        return scores, np.arange(len(rows), dtype=np.int32)

    def _choose(self, scores: torch.Tensor, of_scores: Int32Array, rows: SampleRows) -> Int32Array:
        """Return a token for each row, [num_rows]; `scores`, [any, vocab_size], are unchanged."""
        sampling = rows.sampling
        token_ids = np.empty(len(rows), np.int32)
        is_greedy = sampling["temperature"] <= 0
        greedy, drawing = np.flatnonzero(is_greedy), np.flatnonzero(~is_greedy)
        if len(greedy):
            token_ids[greedy] = largest_index(rows_of(scores, of_scores[greedy])).cpu().numpy()
        if not len(drawing):
            return token_ids
        draws = uniforms(sampling["seed"], sampling["output_index"], rows.num_output_tokens)[drawing]
        if self._native is None:
            token_ids[drawing] = _draw_in_torch(rows_of(scores, of_scores[drawing]), sampling[drawing], draws)
        else:
            token_ids[drawing] = self._native.choose(scores, of_scores[drawing], sampling[drawing], draws)
        return token_ids


def _join(parts: Sequence[Sampled]) -> Sampled:
    """Return the samples of all rows; of two parts or more."""
    logprobs: Float32Array | None = None
    if any(part.logprobs is not None for part in parts):
        asked = [np.full(len(p.token_ids), np.nan, np.float32) if p.logprobs is None else p.logprobs for p in parts]
        logprobs = np.concatenate(asked)
    found = [part.alternatives for part in parts if part.alternatives is not None]
    return Sampled(
        np.concatenate([part.token_ids for part in parts]), logprobs, join_alternatives(found) if found else None
    )


def _draw_in_torch(scores: torch.Tensor, sampling: SamplingRows, draws: Draws) -> Int32Array:
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
