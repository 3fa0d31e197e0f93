"""The sampler of a GPU: what a step asks of its logits stays there, and nothing waits for it.

What the host has to know (`SampleRows`) it knows before the step, but for the last tokens of the history: these come
from the device too (`KnownTokens`). Tokens are drawn by one kernel for all rows (`device_sampling.py`), so that the
token of a row does not depend on what others ask for; rules, penalties and log-probabilities are those of
`torch_backend.py`. Results are on their way to the host when a call returns (`Arrivals`).
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.device.transfer import index_to_device, to_device
from executor_svc.sampler.interface import DrawOnDevice
from executor_svc.sampler.likeliest import Ranked, logprobs_of
from executor_svc.sampler.sample_rows import SampleRows, uniforms
from executor_svc.sampler.torch_backend import KnownTokens, processed_scores, rank_candidates, row_spans
from octavo_shared.step_wire.step import Int32Array, RowFlag

# Logits that are worked on at one time: it takes some five times their memory.
VALUES_AT_ONCE = 32 * 2**20


class Arrivals:
    """What is on its way from the device to the host, and where it goes."""

    def __init__(self) -> None:
        self._parts: list[tuple[tuple[torch.Tensor, ...], Callable[..., None]]] = []

    def send(self, put: Callable[..., None], *tensors: torch.Tensor) -> None:
        """Copy tensors, from a GPU into pinned memory; `put` gets them as arrays once all are there."""
        self._parts.append((tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors), put))

    def take(self) -> None:
        """Put all where it goes, in order; the device is done with the step."""
        for tensors, put in self._parts:
            put(*(tensor.numpy() for tensor in tensors))


class DeviceSampler:
    """Draws one token for each sample row, or lists candidates, as `Sampler` does. Nothing is kept.

    Args:
        draw: Filters and draws.
    """

    def __init__(self, draw: DrawOnDevice) -> None:
        self._draw = draw

    def sample(
        self, logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows, known: KnownTokens
    ) -> torch.Tensor:
        """Return the sampled tokens and the flags of the rows, [2, num_samples] int64.

        A row with NaN or infinity in its logits, or in which no token may come, gets some token and a flag.

        Args:
            logits: Raw, [num_logit_rows, vocab_size] float32, row by row; unchanged.
            logit_rows: The row of `logits` that each sample row uses, [num_samples].
            rows: The sample rows; guided ones have their masks.
            known: Gives tokens that are not in the batch table yet.
        """
        sampling, is_processed = rows.sampling, rows.are_processed()
        draws = uniforms(sampling["seed"], sampling["output_index"], rows.num_output_tokens)
        if not is_processed.any():
            return self._drawn(logits, logit_rows, sampling, draws)
        sampled = torch.empty((2, len(rows)), dtype=torch.int64, device=logits.device)
        plain, processed = np.flatnonzero(~is_processed), np.flatnonzero(is_processed)
        if len(plain):
            drawn = self._drawn(logits, logit_rows[plain], sampling[plain], draws[plain])
            sampled[:, index_to_device(plain, logits.device)] = drawn
        for span in row_spans(len(processed), logits.shape[1], VALUES_AT_ONCE):
            some = processed[span]
            scores, was_finite = processed_scores(logits, logit_rows[some], rows[some], known)
            each = np.arange(len(some), dtype=np.int32)
            token_ids, flags = self._drawn(scores, each, sampling[some], draws[some])
            if rows.is_guided is not None:
                # With numbers to choose by, it was the mask, and what else the row rules out, that left nothing.
                is_guided = to_device(rows.is_guided[some], logits.device)
                flags.masked_fill_(is_guided & was_finite & (flags > 0), int(RowFlag.NO_TOKEN_ALLOWED))
            sampled[:, index_to_device(some, logits.device)] = torch.stack((token_ids, flags))
        return sampled

    def logprobs(
        self, logits: torch.Tensor, logit_rows: Int32Array, token_ids: torch.Tensor, num_alternatives: Int32Array
    ) -> tuple[torch.Tensor, Ranked | None]:
        """Return the log-probability of one token of each row, [num_rows], and of the likeliest; see `logprobs_of`."""
        most = int(num_alternatives.max(initial=0))
        parts = [
            logprobs_of(logits, logit_rows[span], token_ids[span], np.full_like(num_alternatives[span], most))
            for span in row_spans(len(logit_rows), logits.shape[1], VALUES_AT_ONCE)
        ]
        logprobs = torch.cat([of_tokens for of_tokens, _ in parts])
        ranked = [each for _, each in parts if each is not None]
        return logprobs, _joined(ranked, num_alternatives) if ranked else None

    def candidates(
        self,
        logits: torch.Tensor,
        logit_rows: Int32Array,
        rows: SampleRows,
        num_candidates: Int32Array,
        known: KnownTokens,
    ) -> Ranked:
        """Return the likeliest tokens of beam rows, after the processors; see `SamplingBackend.candidates`."""
        most = int(num_candidates.max())
        parts = [
            rank_candidates(logits, logit_rows[span], rows[span], np.full_like(num_candidates[span], most), known)
            for span in row_spans(len(rows), logits.shape[1], VALUES_AT_ONCE)
        ]
        return _joined(parts, num_candidates)

    def _drawn(
        self,
        scores: torch.Tensor,
        of_scores: Int32Array,
        sampling: npt.NDArray[np.void],
        draws: npt.NDArray[np.float64],
    ) -> torch.Tensor:
        drawn = self._draw(scores, of_scores, sampling, draws)
        drawn[1].mul_(int(RowFlag.NOT_FINITE))  # `*=` would copy the row onto itself too
        return drawn


def _joined(parts: list[Ranked], counts: Int32Array) -> Ranked:
    return Ranked(torch.cat([part.token_ids for part in parts]), torch.cat([part.logprobs for part in parts]), counts)
