"""From logits to tokens, or to the candidates of beam search, vectorised over the sample rows.

Each stage works only on the rows that ask for it: a greedy batch is one argmax, a row without
filters pays for no sort. The filters have the order and the meaning of transformers' logits warpers:
temperature, top-k, top-p, min-p. The draw inverts the cumulative distribution in the order of token
ids with the uniform number of `executor_svc/randomness.py`.
"""

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.randomness import uniforms
from shared.step import Int32Array

# Most nuclei are smaller than this; taking the likeliest tokens is ten times faster than sorting a
# vocabulary of 49,152 (measured: Intel Xeon 2.5 GHz, 2 cores, float32).
NUCLEUS_TOKENS = 1024

# Below, quotients may overflow to infinity and probabilities become NaN; the draw is greedy by then.
MIN_TEMPERATURE = np.float32(1e-6)


class Sampler:
    """Draws one token for each sample row. Stateless: rows carry their parameters."""

    def sample(
        self,
        logits: torch.Tensor,
        logit_rows: Int32Array,
        sampling: npt.NDArray[np.void],
        num_output_tokens: Int32Array,
    ) -> tuple[Int32Array, npt.NDArray[np.float32] | None]:
        """Return the sampled token ids, [num_samples], and their log-probabilities.

        Args:
            logits: Raw, [num_logit_rows, vocab_size] float32; unchanged.
            logit_rows: The row of `logits` that each sample row uses, [num_samples].
            sampling: How to sample, [num_samples] of `SAMPLING_ROW`.
            num_output_tokens: Output tokens that each sequence had before, [num_samples].

        Returns:
            The log-probabilities are those of the raw logits, [num_samples], NaN in rows that did not
            ask; None if no row asked.
        """
        token_ids: Int32Array = logits.argmax(-1).cpu().numpy()[logit_rows].astype(np.int32)
        random_rows = np.flatnonzero(sampling["temperature"] > 0)
        if len(random_rows):
            rows = sampling[random_rows]
            scores = filtered_scores(
                logits.index_select(0, torch.from_numpy(logit_rows[random_rows]).to(logits.device)), rows
            )
            draws = uniforms(rows["seed"], rows["output_index"], num_output_tokens[random_rows])
            token_ids[random_rows] = draw(scores, draws).cpu().numpy()
        asked = np.flatnonzero(sampling["num_logprobs"] >= 0)
        if not len(asked):
            return token_ids, None
        logprobs = np.full(len(token_ids), np.nan, np.float32)
        logprobs[asked] = _logprobs_of(logits, logit_rows[asked], token_ids[asked])
        return token_ids, logprobs

    def candidates(
        self, logits: torch.Tensor, logit_rows: Int32Array, num_candidates: Int32Array
    ) -> tuple[Int32Array, npt.NDArray[np.float32]]:
        """Return the likeliest tokens of beam rows and their log-probabilities, one row after the other.

        Args:
            logits: Raw, [num_logit_rows, vocab_size] float32; unchanged.
            logit_rows: The row of `logits` that each beam row uses, [num_beams].
            num_candidates: How many each beam row wants, [num_beams], at most vocab_size.

        Returns:
            [sum of num_candidates] both: log-softmax of the raw logits, falling, equal ones by token id.
        """
        logprobs = torch.log_softmax(logits[torch.from_numpy(logit_rows).to(logits.device)], -1)
        values, token_ids = _likeliest(logprobs, int(num_candidates.max()))
        wanted = np.arange(values.shape[1]) < num_candidates[:, None]
        return token_ids.cpu().numpy()[wanted].astype(np.int32), values.cpu().numpy()[wanted]


def filtered_scores(scores: torch.Tensor, sampling: npt.NDArray[np.void]) -> torch.Tensor:
    """Apply temperature, top-k, top-p and min-p; return logits with -inf where a token is out.

    Args:
        scores: [num_rows, vocab_size] float32; overwritten.
        sampling: [num_rows] of `SAMPLING_ROW`, temperatures above 0.
    """
    device = scores.device
    scores.div_(_column(np.maximum(sampling["temperature"], MIN_TEMPERATURE), device))
    wants_top_k = (sampling["top_k"] > 0) & (sampling["top_k"] < scores.shape[1])
    for name, wants, keep in (
        ("top_k", wants_top_k, _top_k_threshold),
        ("top_p", sampling["top_p"] < 1, _top_p_threshold),
        ("min_p", sampling["min_p"] > 0, _min_p_threshold),
    ):
        rows = np.flatnonzero(wants)
        if len(rows):
            index = torch.from_numpy(rows).to(device)
            selected = scores[index]
            threshold = keep(selected, _column(sampling[name][rows], device))
            scores[index] = selected.masked_fill_(selected < threshold, -torch.inf)
    return scores


def draw(scores: torch.Tensor, draws: npt.NDArray[np.float64]) -> torch.Tensor:
    """Return for each row the first token id whose cumulative probability exceeds the draw, [num_rows].

    A token at -inf is never drawn: it does not raise the cumulative sum. Sums are float64 because
    float32 would round small probabilities away.
    """
    cumulative = torch.softmax(scores, -1).cumsum(-1, dtype=torch.float64)
    targets = torch.from_numpy(draws).to(scores.device)[:, None] * cumulative[:, -1:]
    token_ids = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    return token_ids.clamp_(max=scores.shape[1] - 1)  # past the end only if the logits are NaN


def _top_k_threshold(scores: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Return the k-th largest score of each row, [num_rows, 1]; ties with it stay, as in transformers."""
    likeliest = scores.topk(int(top_k.max()), dim=-1).values
    return likeliest.gather(1, top_k.long() - 1)


def _top_p_threshold(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the smallest score in the nucleus of each row, [num_rows, 1]; ties with it stay.

    A token is in the nucleus if the likelier ones together do not reach top_p. transformers cuts
    between tokens of equal score, in an order that its sort leaves open.
    Source: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration".
    """
    log_total = scores.logsumexp(-1, keepdim=True)
    num_tokens = min(NUCLEUS_TOKENS, scores.shape[1])
    threshold, is_complete = _nucleus_among(scores.topk(num_tokens, dim=-1).values, log_total, top_p)
    rows = torch.nonzero(~is_complete[:, 0])[:, 0]
    if len(rows):
        descending = scores[rows].sort(dim=-1, descending=True).values
        threshold[rows], _ = _nucleus_among(descending, log_total[rows], top_p[rows])
    return threshold


def _nucleus_among(
    descending: torch.Tensor, log_total: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest nucleus score among the likeliest tokens, and whether they reach top_p, both [n, 1]."""
    probs = (descending - log_total).exp_()
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    likelier = cumulative - probs
    num_kept = (likelier < top_p).sum(-1, keepdim=True).clamp_(min=1)
    return descending.gather(1, num_kept - 1), cumulative[:, -1:] >= top_p


def _min_p_threshold(scores: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Return the score whose probability is min_p times the largest one, [num_rows, 1]."""
    return scores.amax(-1, keepdim=True) + min_p.log()


def _likeliest(logprobs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and token ids of the `count` largest of each row, equal ones by token id, [num_rows, count].

    topk leaves open in which order equal ones come, and which of them it takes when not all fit.
    """
    values, token_ids = logprobs.topk(count, dim=-1)
    token_ids, by_id = token_ids.sort(dim=-1)
    values, by_value = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    token_ids = token_ids.gather(1, by_value)
    cut_between_equals = torch.nonzero((logprobs >= values[:, -1:]).sum(-1) != count)[:, 0]
    if len(cut_between_equals):
        ordered = logprobs[cut_between_equals].sort(dim=-1, descending=True, stable=True)
        values[cut_between_equals], token_ids[cut_between_equals] = (
            ordered.values[:, :count],
            ordered.indices[:, :count],
        )
    return values, token_ids


def _logprobs_of(logits: torch.Tensor, logit_rows: Int32Array, token_ids: Int32Array) -> npt.NDArray[np.float32]:
    """Return the log-softmax at each token, [num_rows]."""
    rows, inverse = np.unique(logit_rows, return_inverse=True)
    selected = logits[torch.from_numpy(rows).to(logits.device)]
    normalizers = selected.logsumexp(-1).cpu().numpy()
    chosen = logits[torch.from_numpy(logit_rows).to(logits.device), torch.from_numpy(token_ids).to(logits.device)]
    result: npt.NDArray[np.float32] = chosen.cpu().numpy() - normalizers[inverse]
    return result


def _column(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Return one field of the sampling rows as [num_rows, 1]; fields of records are strided, so copy."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)[:, None]
