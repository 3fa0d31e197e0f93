"""The sampler in torch, for a CPU: the reference for the sampler in C, and for a GPU's (`device_sampler.py`).

Some rows at a time, so that the memory for it has a bound that does not grow with the batch.
"""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F  # noqa: N812

from executor_svc.device.transfer import index_to_device, to_device
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
from executor_svc.sampler.interface import NOT_FINITE, Alternatives, Float32Array, join_alternatives
from executor_svc.sampler.likeliest import (
    Ranked,
    are_finite,
    largest_index,
    likeliest,
    log_softmax,
    logprobs_of,
    rows_of,
    take_wanted,
)
from executor_svc.sampler.sample_rows import FlatTokens, History, IndexArray, SampleRows, uniforms
from octavo_shared.step_wire.step import BoolArray, Int32Array
from octavo_shared.step_wire.token_rules import NO_TOKEN

# Logits that are worked on at one time: it takes some ten times their memory, in float64 and int64 too.
VALUES_AT_ONCE = 4 * 2**20

# (token ids of the batch table, the slot and the position of each) -> the same on the device, where all are known, in
# memory of its own; [num_tokens] all.
KnownTokens = Callable[[IndexArray, IndexArray, IndexArray], torch.Tensor]


class TorchBackend:
    """`SamplingBackend` by torch."""

    def choose(self, logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows) -> Int32Array:
        """Return a token for each row; see `SamplingBackend`."""
        logits = logits.contiguous()
        token_ids = np.empty(len(rows), np.int32)
        for span in row_spans(len(rows), logits.shape[1]):
            token_ids[span] = self._choose(logits, logit_rows[span], rows[span])
        return token_ids

    def _choose(self, logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows) -> Int32Array:
        token_ids = np.empty(len(rows), np.int32)
        is_greedy, is_processed = rows.sampling["temperature"] <= 0, rows.are_processed()
        plain = np.flatnonzero(is_greedy & ~is_processed)
        if len(plain):
            distinct, inverse = np.unique(logit_rows[plain], return_inverse=True)
            token_ids[plain] = largest_index(rows_of(logits, distinct)).numpy()[inverse]
        others = np.flatnonzero(~is_greedy | is_processed)
        if len(others):
            scores, of_scores = _processed(logits, logit_rows[others], rows[others], is_processed[others])
            token_ids[others] = _choose_from(scores, of_scores, rows[others])
        return token_ids

    def logprobs(
        self, logits: torch.Tensor, logit_rows: Int32Array, token_ids: Int32Array, num_alternatives: Int32Array
    ) -> tuple[Float32Array, Alternatives | None]:
        """Return the log-probability of a token of each row, and of the likeliest; see `SamplingBackend`."""
        logits = logits.contiguous()
        logprobs = np.empty(len(logit_rows), np.float32)
        found: list[Alternatives] = []
        for span in row_spans(len(logit_rows), logits.shape[1]):
            of_span = torch.from_numpy(token_ids[span]).long()
            its, ranked = logprobs_of(logits, logit_rows[span], of_span, num_alternatives[span])
            logprobs[span] = its.numpy()
            if ranked is not None:
                found.append(_on_host(ranked))
        return logprobs, join_alternatives(found)

    def candidates(
        self, logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows, num_candidates: Int32Array
    ) -> Alternatives:
        """Return the likeliest tokens of beam rows; see `SamplingBackend`."""
        logits = logits.contiguous()
        parts = [
            _on_host(rank_candidates(logits, logit_rows[span], rows[span], num_candidates[span]))
            for span in row_spans(len(rows), logits.shape[1])
        ]
        found = join_alternatives(parts)
        assert found is not None, "there are beams"
        return found


def _on_host(ranked: Ranked) -> Alternatives:
    return take_wanted(ranked.token_ids.numpy(), ranked.logprobs.numpy(), ranked.counts)


def row_spans(num_rows: int, vocab_size: int, values_at_once: int | None = None) -> Iterator[slice]:
    """Return the parts of [num_rows] rows that are worked on at one time."""
    num_at_once = max(1, (values_at_once or VALUES_AT_ONCE) // vocab_size)
    for begin in range(0, num_rows, num_at_once):
        yield slice(begin, min(begin + num_at_once, num_rows))


def _processed(
    logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows, is_processed: BoolArray
) -> tuple[torch.Tensor, Int32Array]:
    """Return scores, [any, vocab_size], and which of them each row chooses from; the logits if none changes."""
    if not is_processed.any():
        return logits, logit_rows
    scores, _ = processed_scores(logits, logit_rows, rows, all_known(logits.device))
    return scores, np.arange(len(rows), dtype=np.int32)


def processed_scores(
    logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows, known: KnownTokens
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of some rows, changed by rules and penalties, and whether they were finite, [num_rows]."""
    scores = logits.index_select(0, index_to_device(logit_rows, logits.device))
    is_finite = are_finite(scores)
    process(scores, rows, known)  # the lists of a row without rules are empty
    scores[:, 0].masked_fill_(~is_finite, torch.nan)  # the rules may have hidden it
    return scores, is_finite


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


def rank_candidates(
    logits: torch.Tensor,
    logit_rows: Int32Array,
    rows: SampleRows,
    num_candidates: Int32Array,
    known: KnownTokens | None = None,
) -> Ranked:
    """Return the likeliest tokens of beam rows, without waiting; see `SamplingBackend.candidates`."""
    logprobs = log_softmax(rows_of(logits, logit_rows))
    if rows.are_processed().any():
        process(logprobs, rows, known)
    values, token_ids = likeliest(logprobs, int(num_candidates.max()))
    return Ranked(token_ids, values, num_candidates)


# Added to the 8 tokens of a byte of an allow-list: twice as fast as a mask that is filled in.
_ADDED_BY_BYTE = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1, 0.0, -np.inf
).astype(np.float32)


def all_known(device: torch.device) -> KnownTokens:
    """Return what gives tokens of the batch table that are all known there."""
    return lambda token_ids, _slots, _positions: index_to_device(token_ids, device)


def process(scores: torch.Tensor, rows: SampleRows, known: KnownTokens | None = None) -> None:
    """Apply the rules and penalties of some rows to their scores, without waiting for a device.

    Args:
        scores: [num_rows, vocab_size] float32, contiguous; overwritten. -inf: the token cannot come.
        rows: The rows, in the same order.
        known: Gives tokens of the batch table that are not known there yet; None: all are.
    """
    known = known or all_known(scores.device)
    _add_biases(scores, rows)
    _penalize_repetition(scores, rows, known)
    _penalize_output(scores, rows, known)
    if rows.sampling["no_repeat_ngram_size"].any():
        _ban_repeated_ngrams(scores, rows, known)
    scores.view(-1).index_fill_(0, _places(rows.forbidden_tokens(), scores), -torch.inf)
    _ban_words(scores, rows, known)
    _keep_allowed(scores, rows)


def _add_biases(scores: torch.Tensor, rows: SampleRows) -> None:
    tokens, biases = rows.biased_tokens()
    if len(biases):
        scores.view(-1).scatter_add_(0, _places(tokens, scores), to_device(biases, scores.device))


def _penalize_repetition(scores: torch.Tensor, rows: SampleRows, known: KnownTokens) -> None:
    """Make every token of prompt and output less likely, once however often it is there.

    Source: Keskar et al. 2019, "CTRL", section 4.1; negative logits are multiplied, as in transformers.
    """
    asking = np.flatnonzero(rows.sampling["repetition_penalty"] != 1)
    if not len(asking):
        return
    history = rows.history(asking, output_only=False)
    flat, places = scores.view(-1), _places_of_history(history, rows, scores, known)
    penalties = _of_tokens(rows.sampling["repetition_penalty"], history, scores.device)
    former = flat[places]
    flat.scatter_(0, places, torch.where(former < 0, former * penalties, former / penalties))


def _penalize_output(scores: torch.Tensor, rows: SampleRows, known: KnownTokens) -> None:
    presence, frequency = rows.sampling["presence_penalty"], rows.sampling["frequency_penalty"]
    asking = np.flatnonzero((presence != 0) | (frequency != 0))
    if not len(asking):
        return
    output = rows.history(asking, output_only=True)
    flat, places = scores.view(-1), _places_of_history(output, rows, scores, known)
    counts = torch.zeros_like(flat, dtype=torch.int32)
    counts.scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))
    penalties = _of_tokens(frequency, output, scores.device) * counts[places]
    penalties += _of_tokens(presence, output, scores.device)
    flat.scatter_(0, places, flat[places] - penalties)


def _ban_repeated_ngrams(scores: torch.Tensor, rows: SampleRows, known: KnownTokens) -> None:
    """Rule out each token that would end an n-gram that prompt and output have already.

    Source: Paulus et al. 2017, "A Deep Reinforced Model for Abstractive Summarization", section 2.5, for trigrams.
    """
    sizes = rows.sampling["no_repeat_ngram_size"]
    history = rows.history(np.flatnonzero(sizes), output_only=False)
    token_ids = known(history.token_ids, rows.slots[history.rows], history.positions)
    # A token ends an n-gram that the next one may end again if the tokens before both are the same.
    ends = np.flatnonzero(history.positions >= sizes[history.rows] - 1)
    rows_of_ends = history.rows[ends]
    next_tokens = ends + (rows.num_tokens[rows_of_ends] - history.positions[ends])
    lengths = sizes[rows_of_ends].astype(np.int64) - 1
    places = _places(FlatTokens(rows_of_ends, np.zeros_like(ends)), scores)
    at, at_next, before = (index_to_device(each, scores.device) for each in (ends, next_tokens, lengths))
    repeats = torch.ones_like(at, dtype=torch.bool)
    for distance in range(1, int(sizes.max())):
        one, other = (token_ids[(each - distance).clamp_(min=0)] for each in (at, at_next))
        repeats &= (one == other) | (before < distance)  # or the n-gram is shorter
    lowered = torch.zeros_like(places, dtype=torch.float32).masked_fill_(repeats, -torch.inf)
    scores.view(-1).scatter_add_(0, places.add_(token_ids[at]), lowered)


def _ban_words(scores: torch.Tensor, rows: SampleRows, known: KnownTokens) -> None:
    """Rule out the last token of each word whose other tokens are the last ones of a row."""
    banned = rows.banned_words()
    if banned is None:
        return
    slots, width = rows.slots[banned.rows], banned.positions.shape[1]
    flat_tails = known(rows.tails_of(banned).ravel(), slots.repeat(width), banned.positions.ravel())
    words = index_to_device(banned.words, scores.device)
    prefixes, tails = words[:, :-1], flat_tails.view(-1, width)
    completes = ((prefixes == NO_TOKEN) | (prefixes == tails)).all(1)
    places = index_to_device(banned.rows, scores.device) * scores.shape[1] + words[:, -1]
    lowered = torch.zeros_like(places, dtype=torch.float32).masked_fill_(completes, -torch.inf)
    scores.view(-1).scatter_add_(0, places, lowered)


def _keep_allowed(scores: torch.Tensor, rows: SampleRows) -> None:
    asking, packed = rows.allowed_masks()
    if not len(asking):
        return
    added = F.embedding(index_to_device(packed, scores.device), to_device(_ADDED_BY_BYTE, scores.device)).flatten(1)
    added = added[:, : scores.shape[1]]
    if len(asking) == len(scores):
        scores.add_(added)
    else:
        scores.index_add_(0, index_to_device(asking, scores.device), added)


def _places(tokens: FlatTokens, scores: torch.Tensor) -> torch.Tensor:
    """Return where in the flat scores the tokens are, [num_tokens] int64."""
    return index_to_device(tokens.rows * scores.shape[1] + tokens.token_ids, scores.device)


def _places_of_history(history: History, rows: SampleRows, scores: torch.Tensor, known: KnownTokens) -> torch.Tensor:
    """Do what `_places` does with tokens that the host may not know."""
    token_ids = known(history.token_ids, rows.slots[history.rows], history.positions)
    return token_ids.add_(index_to_device(history.rows * scores.shape[1], scores.device))


def _of_tokens(values: npt.NDArray[np.generic], tokens: FlatTokens, device: torch.device) -> torch.Tensor:
    """Return for each token the value of its row, [num_tokens]."""
    return to_device(np.ascontiguousarray(values)[tokens.rows], device)
