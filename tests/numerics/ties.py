"""Where our numbers are compared with those of transformers: what is forgiven. Of our own numbers nothing is.

transformers adds in another order, so log-probabilities and scores may differ by `TOLERANCE`, and of two choices
whose numbers are within `TIE` either may be made. A beam search returns whole hypotheses by rank, so what is compared
there are the scores of each rank: a hypothesis other than the reference's must have the same score, and the reference
model must say so too.
"""

from collections.abc import Callable, Sequence

import torch

from tests.support.fleet import FoundHypothesis

TIE = 1e-4
TOLERANCE = 1e-4

# Raw float32 logits of a history of tokens, at each position from the given one: [num_tokens - first, vocab_size].
Logits = Callable[[Sequence[int], int], torch.Tensor]


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
