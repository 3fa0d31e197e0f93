"""What a step asks of its logits: tokens, log-probabilities, candidates of beams. Read it first."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.native.sampling import NO_MASK, NO_PROCESSING, PROCESSING, PROCESSORS, NativeSampling, Processors
from executor_svc.sampler.interface import (
    NOT_FINITE,
    Alternatives,
    Float32Array,
    SamplingBackend,
    join_alternatives,
)
from executor_svc.sampler.sample_rows import FlatTokens, SampleRows, uniforms
from executor_svc.sampler.torch_backend import TorchBackend
from octavo_shared.step_wire.step import NO_LOGPROBS, Int32Array, RowFlag, RowFlags

# Logits of a prompt that exist at once, in rows: a whole chunk's would be hundreds of MiB.
PROMPT_TOKENS_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token for each sample row, and what was asked for beside it.

    `logprobs` are NaN in rows that did not ask; None: no row did. `alternatives` are for the rows with `num_logprobs`
    above 0; None: there is no such row. All are of the raw logits. `row_flags`: NOT_FINITE in rows with a token and
    log-probabilities that mean nothing; None: there is no such row.
    """

    token_ids: Int32Array  # [num_samples]
    logprobs: Float32Array | None = None  # [num_samples]
    alternatives: Alternatives | None = None
    row_flags: RowFlags | None = None  # [num_samples]


class Sampler:
    """Draws one token for each sample row, or lists candidates. Rows carry their parameters; nothing is kept.

    Args:
        native: The C library, for logits on a CPU; None: torch does it all. The two give the same tokens, but where a
            draw falls on the edge between two, up to rounding.
    """

    def __init__(self, native: NativeSampling | None = None) -> None:
        self._backend: SamplingBackend = TorchBackend() if native is None else NativeBackend(native)

    def sample(
        self, logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows, likeliest: Int32Array | None = None
    ) -> Sampled:
        """Return the sampled tokens, and the log-probabilities of the rows that ask for them.

        A row with NaN or infinity in its logits, or in which no token may come, gets token 0 and a flag.

        Args:
            logits: Raw, [num_logit_rows, vocab_size] float32; unchanged.
            logit_rows: The row of `logits` that each sample row uses, [num_samples].
            rows: The sample rows.
            likeliest: If all rows take it, the likeliest token of each row of `logits`, or NOT_FINITE; None: it is
                looked for.
        """
        if likeliest is not None:
            token_ids, row_flags = _flagged(likeliest.take(logit_rows))
            return Sampled(token_ids, row_flags=row_flags)
        token_ids, row_flags = _flagged(self._backend.choose(logits, logit_rows, rows))
        num_logprobs = rows.sampling["num_logprobs"]
        asked = np.flatnonzero(num_logprobs != NO_LOGPROBS)
        if not len(asked):
            return Sampled(token_ids, row_flags=row_flags)
        logprobs = np.full(len(rows), np.nan, np.float32)
        logprobs[asked], alternatives = self._backend.logprobs(
            logits, logit_rows[asked], token_ids[asked], num_logprobs[asked]
        )
        return Sampled(token_ids, logprobs, alternatives, row_flags)

    def candidates(
        self, logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows, num_candidates: Int32Array
    ) -> Alternatives:
        """Return the likeliest tokens of beam rows, after the processors; see `SamplingBackend.candidates`.

        Args:
            logits: Raw, [num_logit_rows, vocab_size] float32; unchanged.
            logit_rows: The row of `logits` that each beam row uses, [num_beams].
            rows: The beam rows.
            num_candidates: How many each beam row wants, [num_beams], at most vocab_size.
        """
        return self._backend.candidates(logits, logit_rows, rows, num_candidates)

    def prompt_logprobs(
        self,
        hidden: torch.Tensor,
        to_logits: Callable[[torch.Tensor], torch.Tensor],
        token_ids: Int32Array,
        num_alternatives: Int32Array,
    ) -> tuple[Float32Array, Alternatives | None]:
        """Return the log-probability of each of some prompt tokens, [num_tokens], and the likeliest in its place.

        NaN where the logits are not finite.

        Args:
            hidden: What the model made of the token before each, [num_tokens, hidden_size].
            to_logits: Turns hidden states into raw float32 logits, [any, vocab_size].
            token_ids: The tokens, [num_tokens].
            num_alternatives: How many of the likeliest are wanted for each, [num_tokens].
        """
        logprobs = np.empty(len(token_ids), np.float32)
        found: list[Alternatives] = []
        for span in prompt_spans(len(token_ids)):
            rows = np.arange(len(token_ids[span]), dtype=np.int32)
            logits = to_logits(hidden[span])
            logprobs[span], some = self._backend.logprobs(logits, rows, token_ids[span], num_alternatives[span])
            if some is not None:
                found.append(some)
        return logprobs, join_alternatives(found)


def _flagged(token_ids: Int32Array) -> tuple[Int32Array, RowFlags | None]:
    """Return tokens that are ones, and the flags of the rows that have NOT_FINITE in place of one; None: no row has."""
    is_finite = token_ids != NOT_FINITE
    if is_finite.all():
        return token_ids, None
    return np.where(is_finite, token_ids, 0), np.where(is_finite, 0, RowFlag.NOT_FINITE).astype(np.uint8)


def flags_of_candidates(found: Alternatives, num_candidates: Int32Array) -> RowFlags:
    """Return the flags of beam rows, [num_beams]: the likeliest candidate of each, its first one, says it."""
    is_finite = np.isfinite(found.logprobs[np.cumsum(num_candidates) - num_candidates])
    return np.where(is_finite, 0, RowFlag.NOT_FINITE).astype(np.uint8)


def prompt_spans(num_tokens: int) -> Iterator[slice]:
    """Return the parts of [num_tokens] prompt tokens that have their logits in memory at one time."""
    for begin in range(0, num_tokens, PROMPT_TOKENS_AT_ONCE):
        yield slice(begin, min(begin + PROMPT_TOKENS_AT_ONCE, num_tokens))


Int64Array = npt.NDArray[np.int64]


class NativeBackend:
    """`SamplingBackend` by the C library. Torch computes nothing: logits that do not lie row by row are copied."""

    def __init__(self, native: NativeSampling) -> None:
        self._native = native

    def choose(self, logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows) -> Int32Array:
        """Return a token for each row; see `SamplingBackend`."""
        sampling = rows.sampling
        draws = np.zeros(len(rows))
        if sampling["temperature"].any():
            draws = uniforms(sampling["seed"], sampling["output_index"], rows.num_output_tokens)
        return self._native.choose(logits.contiguous(), logit_rows, sampling, draws, _processors(rows))

    def logprobs(
        self, logits: torch.Tensor, logit_rows: Int32Array, token_ids: Int32Array, num_alternatives: Int32Array
    ) -> tuple[Float32Array, Alternatives | None]:
        """Return the log-probability of a token of each row, and of the likeliest; see `SamplingBackend`."""
        logprobs, likeliest_ids, likeliest = self._native.logprobs(
            logits.contiguous(), logit_rows, token_ids, num_alternatives
        )
        return logprobs, Alternatives(likeliest_ids, likeliest) if num_alternatives.any() else None

    def candidates(
        self, logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows, num_candidates: Int32Array
    ) -> Alternatives:
        """Return the likeliest tokens of beam rows; see `SamplingBackend`."""
        found = self._native.candidates(logits.contiguous(), logit_rows, num_candidates, _processors(rows))
        return Alternatives(*found)


def _processors(rows: SampleRows) -> Processors | None:
    """Return what changes the rows before anything is chosen; None: nothing."""
    is_processed = rows.are_processed()
    if not is_processed.any():
        return None
    rows = rows[is_processed]
    records = np.empty(len(rows), PROCESSING)
    for parameter in PROCESSORS:
        records[parameter.name] = rows.sampling[parameter.name]
    histories = np.ascontiguousarray(rows.token_ids)
    records["history_begin"] = rows.slots.astype(np.int64) * histories.shape[1]
    records["num_tokens"], records["num_prompt_tokens"] = rows.num_tokens, rows.num_prompt_tokens
    biased, biases = rows.biased_tokens()
    forbidden = _row_by_row(rows.forbidden_tokens(), rows.completed_tokens())
    records["biases_begin"], records["num_biases"] = _parts(biased, len(rows))
    records["forbidden_begin"], records["num_forbidden"] = _parts(forbidden, len(rows))
    with_mask, masks = rows.allowed_masks()
    records["mask_begin"] = NO_MASK
    records["mask_begin"][with_mask] = np.arange(len(masks)) * masks.shape[1]
    return Processors(
        of_rows=np.where(is_processed, np.cumsum(is_processed) - 1, NO_PROCESSING),
        records=records,
        histories=histories,
        masks=masks,
        biased_ids=biased.token_ids.astype(np.int32),
        biases=biases,
        forbidden_ids=forbidden.token_ids.astype(np.int32),
    )


def _row_by_row(*lists: FlatTokens) -> FlatTokens:
    rows, token_ids = (
        np.concatenate(parts) for parts in zip(*((each.rows, each.token_ids) for each in lists), strict=True)
    )
    order = np.argsort(rows, kind="stable")
    return FlatTokens(rows[order], token_ids[order])


def _parts(tokens: FlatTokens, num_rows: int) -> tuple[Int64Array, Int64Array]:
    """Return where the tokens of each row begin, and how many they are, [num_rows]; they lie row by row."""
    counts = np.bincount(tokens.rows, minlength=num_rows)
    return np.cumsum(counts) - counts, counts
