"""The sampler in C, for logits on a CPU: here, what each row asks for becomes the records that the library reads."""

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.native.sampling import NO_MASK, NO_PROCESSING, PROCESSING, PROCESSORS, NativeSampling, Processors
from executor_svc.sampler.interface import Alternatives, Float32Array
from executor_svc.sampler.sample_rows import FlatTokens, SampleRows, uniforms
from octavo_shared.step_wire.step import Int32Array

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
    forbidden = _row_by_row(rows.forbidden_tokens())
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


def _row_by_row(tokens: FlatTokens) -> FlatTokens:
    order = np.argsort(tokens.rows, kind="stable")
    return FlatTokens(tokens.rows[order], tokens.token_ids[order])


def _parts(tokens: FlatTokens, num_rows: int) -> tuple[Int64Array, Int64Array]:
    """Return where the tokens of each row begin, and how many they are, [num_rows]; they lie row by row."""
    counts = np.bincount(tokens.rows, minlength=num_rows)
    return np.cumsum(counts) - counts, counts
