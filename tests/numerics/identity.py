"""When two outputs of a real model in float32 are identical: the one definition.

The same ids, or at the first difference a tie in the reference; log-probabilities and scores within
1e-4. A tie is a choice that numbers within `TIE` would have made differently: for a greedy token the gap
to the best logit, for a sampled one the distance of the draw from the token's part of the cumulative
distribution. What comes after a tie follows another history and is not compared. Matrix kernels round
differently for different batch shapes; that, and nothing larger, is forgiven.

A beam search returns whole hypotheses by rank, so what is compared there are the scores of each rank:
a hypothesis other than the reference's must have the same score, and the reference model must say so too.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from executor_svc.sampler.filters import filtered_scores
from executor_svc.sampler.sample_rows import uniforms
from shared.step import SAMPLING_ROW, SamplingRow
from tests.support.fleet import FoundHypothesis, Output

TIE = 1e-4
TOLERANCE = 1e-4

# Raw float32 logits of a history of tokens, at each position from the given one: [num_tokens - first, vocab_size].
Logits = Callable[[Sequence[int], int], torch.Tensor]


def assert_identical(
    output: Output, expected: Output, prompt: Sequence[int], sampling: SamplingRow, logits: Logits
) -> None:
    """Fail unless the outputs are identical.

    Args:
        output: What is to be judged.
        expected: What the reference run gave.
        prompt: Of both.
        sampling: Of both, with their output index.
        logits: The reference model.
    """
    ours, theirs = output.token_ids, expected.token_ids
    num_equal = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if num_equal is None:
        assert len(ours) == len(theirs), f"{len(ours)} tokens instead of {len(theirs)}"
        assert output.reason is expected.reason, f"ended by {output.reason} instead of {expected.reason}"
        num_logprobs = len(output.logprobs), len(expected.logprobs)
        assert num_logprobs[0] == num_logprobs[1], f"{num_logprobs[0]} log-probabilities instead of {num_logprobs[1]}"
        num_equal = len(ours)
    else:
        history = [*prompt, *theirs[:num_equal]]
        scores = logits(history, len(history) - 1)[0]
        for token_id in (ours[num_equal], theirs[num_equal]):
            distance = distance_of_choice(token_id, scores, sampling, num_equal)
            assert distance < TIE, (
                f"output token {num_equal} is {ours[num_equal]} instead of {theirs[num_equal]}; "
                f"{token_id} is {distance:.2e} away from being chosen"
            )
    for position, (ours_, theirs_) in enumerate(zip(output.logprobs, expected.logprobs, strict=False)):
        if position < num_equal:
            assert abs(ours_ - theirs_) < TOLERANCE, f"log-probability {position} is {ours_} instead of {theirs_}"


def distance_of_choice(token_id: int, logits: torch.Tensor, sampling: SamplingRow, num_output_tokens: int) -> float:
    """Return by how much the reference's numbers would have to change for this token to be chosen; 0: it is chosen.

    Args:
        token_id: The token.
        logits: Raw, [vocab_size] float32.
        sampling: How to choose.
        num_output_tokens: Output tokens before this one.
    """
    if sampling.temperature == 0:
        return float(logits.max() - logits[token_id])
    row = np.array([sampling.as_tuple()], SAMPLING_ROW)
    probabilities = torch.softmax(filtered_scores(logits[None].clone(), row)[0].double(), -1)
    if not probabilities[token_id]:
        return 1.0
    edge = float(probabilities[: token_id + 1].sum())
    draw = float(uniforms(row["seed"], row["output_index"], np.array([num_output_tokens], np.int32))[0])
    return max(0.0, draw - edge, edge - float(probabilities[token_id]) - draw)


def assert_same_search(
    found: Sequence[FoundHypothesis],
    expected: Sequence[tuple[list[int], float]],
    prompt: Sequence[int],
    length_penalty: float,
    logits: Logits,
) -> None:
    """Fail unless a search found the reference's hypotheses, (output tokens, score) by rank, ties aside.

    `logits` is the reference model.
    """
    assert len(found) == len(expected), f"{len(found)} hypotheses instead of {len(expected)}"
    assert len({hypothesis.token_ids for hypothesis in found}) == len(found), "a hypothesis was found twice"
    for rank, (hypothesis, (token_ids, score)) in enumerate(zip(found, expected, strict=True)):
        divisor = len(hypothesis.token_ids) ** length_penalty
        summed = sum(hypothesis.logprobs) / divisor
        assert abs(summed - hypothesis.score) < TOLERANCE, f"rank {rank} has a score that its tokens do not have"
        assert abs(hypothesis.score - score) < TOLERANCE, f"rank {rank} has score {hypothesis.score} instead of {score}"
        if list(hypothesis.token_ids) != token_ids:
            true_score = sum_logprobs(prompt, hypothesis.token_ids, logits) / divisor
            assert abs(true_score - score) < TIE, f"rank {rank} has other tokens and no tie"


def sum_logprobs(prompt: Sequence[int], output: Sequence[int], logits: Logits) -> float:
    """Return the log-probability of an output after a prompt."""
    logprobs = torch.log_softmax(logits([*prompt, *output[:-1]], len(prompt) - 1), -1)
    return float(logprobs.gather(1, torch.tensor(output)[:, None]).sum())
