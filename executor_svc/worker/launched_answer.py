"""From logits to the answer of a step on a device that the host is ahead of: nothing here waits for it.

`step_answer.py` does the same on the host.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.device.transfer import index_to_device
from executor_svc.models.language_model import LanguageModel
from executor_svc.sampler.device_sampler import Arrivals, DeviceSampler
from executor_svc.sampler.interface import Alternatives, join_alternatives
from executor_svc.sampler.likeliest import Ranked, take_wanted
from executor_svc.sampler.sample_rows import SampleRows
from executor_svc.sampler.sampler import flags_of_candidates, prompt_spans
from executor_svc.sampler.torch_backend import KnownTokens
from executor_svc.worker.model_runner import SampleLogits
from executor_svc.worker.step_answer import prompt_tokens
from octavo_shared.step_wire.batch_table import BatchTable, StepLayout
from octavo_shared.step_wire.step import NO_LOGPROBS, UNKNOWN_TOKEN, Int32Array, StepResult


def launch_answer(
    result: StepResult,
    table: BatchTable,
    layout: StepLayout,
    rows: SampleRows,
    computed: SampleLogits,
    model: LanguageModel,
    sampler: DeviceSampler,
    known: KnownTokens,
) -> tuple[torch.Tensor, Arrivals]:
    """Launch what `answer_step` returns.

    Args:
        result: An answer without tokens yet; what arrives is put there, behind the tokens and flags.
        table: With the step applied.
        layout: Of the step.
        rows: Its sample rows; guided ones have their masks.
        computed: What the model made of the step.
        model: For the logits of prompts.
        sampler: Of the device.
        known: Gives tokens that are not in the batch table yet.

    Returns:
        The sampled tokens and the flags of the rows, on the device, [2, num_samples] int64, and all that is on its way.
    """
    assert computed.logits is not None, "this is rank 0"
    logits, logit_rows, arrivals = computed.logits.contiguous(), computed.logit_rows, Arrivals()
    if layout.num_candidates is None or not layout.num_candidates.any():
        sampled, others = sampler.sample(logits, logit_rows, rows, known), np.arange(len(rows))
    else:
        sampled, others = _launch_beams(result, layout.num_candidates, rows, computed, sampler, known, arrivals)
    asked = others[rows.sampling["num_logprobs"][others] != NO_LOGPROBS]
    if len(asked):
        of_tokens = sampled[0, index_to_device(asked, logits.device)]
        num_logprobs = rows.sampling["num_logprobs"][asked]
        logprobs, ranked = sampler.logprobs(logits, logit_rows[asked], of_tokens, num_logprobs)
        result.logprobs = np.full(len(rows), np.nan, np.float32)
        arrivals.send(partial(_put, result.logprobs, asked), logprobs)
        if ranked is not None:
            _send_ranked(arrivals, ranked, partial(_put_alternatives, result, "alternative"))
    if computed.prompt_hidden is not None:
        _launch_prompt(result, table, layout, computed.prompt_hidden, model, sampler, arrivals)
    return sampled, arrivals


def _launch_beams(
    result: StepResult,
    num_candidates: Int32Array,
    rows: SampleRows,
    computed: SampleLogits,
    sampler: DeviceSampler,
    known: KnownTokens,
    arrivals: Arrivals,
) -> tuple[torch.Tensor, npt.NDArray[np.int64]]:
    """Launch the candidates of the beam rows, and what is sampled in the others; return that, and which these are."""
    assert computed.logits is not None, "this is rank 0"
    logits, logit_rows = computed.logits.contiguous(), computed.logit_rows
    beams, others = np.flatnonzero(num_candidates > 0), np.flatnonzero(num_candidates == 0)
    sampled = torch.full((2, len(rows)), UNKNOWN_TOKEN, dtype=torch.int64, device=logits.device)
    sampled[1] = 0
    if len(others):
        of_others = sampler.sample(logits, logit_rows[others], rows[others], known)
        sampled[:, index_to_device(others, logits.device)] = of_others
    counts = num_candidates[beams]
    ranked = sampler.candidates(logits, logit_rows[beams], rows[beams], counts, known)

    def put(found: Alternatives) -> None:
        _put_alternatives(result, "candidate", found)
        assert result.row_flags is not None, "tokens and flags came before"
        result.row_flags[beams] = flags_of_candidates(found, counts)

    _send_ranked(arrivals, ranked, put)
    return sampled, others


def _launch_prompt(
    result: StepResult,
    table: BatchTable,
    layout: StepLayout,
    hidden: torch.Tensor,
    model: LanguageModel,
    sampler: DeviceSampler,
    arrivals: Arrivals,
) -> None:
    """Launch the log-probabilities of prompt tokens; `hidden` has the states of the tokens before them."""
    token_ids, num_alternatives = prompt_tokens(table, layout)
    result.prompt_logprobs = np.empty(len(token_ids), np.float32)
    found: list[Alternatives] = []
    for span in prompt_spans(len(token_ids)):
        logits = model.logits(hidden[span])
        assert logits is not None, "this is rank 0"
        of_span = index_to_device(token_ids[span], logits.device)
        each = np.arange(len(of_span), dtype=np.int32)
        logprobs, ranked = sampler.logprobs(logits.contiguous(), each, of_span, num_alternatives[span])
        arrivals.send(partial(_put, result.prompt_logprobs, span), logprobs)
        if ranked is not None:
            _send_ranked(arrivals, ranked, found.append)

    def put() -> None:
        if (alternatives := join_alternatives(found)) is not None:
            _put_alternatives(result, "prompt_alternative", alternatives)

    arrivals.send(put)


def _put(array: npt.NDArray[np.float32], index: slice | npt.NDArray[np.int64], values: npt.NDArray[np.float32]) -> None:
    array[index] = values


def _send_ranked(arrivals: Arrivals, ranked: Ranked, put: Callable[[Alternatives], object]) -> None:
    def put_wanted(token_ids: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]) -> None:
        put(take_wanted(token_ids, logprobs, ranked.counts))

    arrivals.send(put_wanted, ranked.token_ids, ranked.logprobs)


def _put_alternatives(result: StepResult, kind: str, found: Alternatives) -> None:
    setattr(result, f"{kind}_token_ids", found.token_ids)
    setattr(result, f"{kind}_logprobs", found.logprobs)
