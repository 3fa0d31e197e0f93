"""The fields of `SamplingParams` that are numbers.

Written by `make protos` from octavo/values/sampling_params_table.py; changes here are lost.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingNumbers:
    """The fields of `SamplingParams` that are numbers. None is "absent".

    Attributes:
        temperature: Higher values are more random; 0: greedy decoding. Range 0 to 100. Absent: the model's,
            else 1.
        top_k: Sample from this many of the most likely tokens; 0: all. Absent: the model's, else 0.
        top_p: Nucleus sampling: keep the most likely tokens whose probabilities add up to this. Range above 0
            to 1. Absent: the model's, else 1.
        min_p: Drop tokens less likely than this fraction of the most likely one. Range 0 to 1. Absent: the
            model's, else 0.
        typical_p: Typical sampling: keep the most typical tokens whose probabilities add up to this. Range
            above 0 to 1. Absent: the model's, else 1.
        repetition_penalty: Above 1: makes tokens that are in the prompt or the output less likely. Range
            above 0 to 100. Absent: the model's, else 1.
        presence_penalty: Subtract this from the logit of each token that is in the output. Range -100 to 100.
            Absent: 0.
        frequency_penalty: Subtract this from a token's logit for each time it occurs in the output. Range
            -100 to 100. Absent: 0.
        no_repeat_ngram_size: No run of so many tokens comes twice in prompt and output; 0: off. Range 0 to
            64. Absent: the model's, else 0.
        min_tokens: Minimum number of output tokens. Absent: 0.
        max_tokens: Maximum number of output tokens. Range 1 and up. Absent: as many as fit.
        seed: Equal seeds give equal outputs, whatever else is running. Absent: chosen by the scheduler.
        n: Number of outputs. Range 1 and up. Absent: 1.
        best_of: Generate this many outputs and return the n most likely, best first. Absent: n.
        beam_width: Beam search with this many beams for the n best outputs, instead of sampling. Absent: no
            beam search.
        length_penalty: Beam search only: above 0 favours long outputs, below 0 short ones. Range -10 to 10.
            Absent: 1.
        logprobs: Return log-probabilities: of each token, and of this many of the most likely alternatives.
            Range 0 to 20. Absent: none.
        prompt_logprobs: Return log-probabilities of the prompt tokens, as logprobs does for the output. Range
            0 to 20. Absent: none.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
