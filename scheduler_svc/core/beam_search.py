"""Beam search over candidates that an executor computed; knows no slots, blocks or executors.

The search means what `generate(num_beams=w, do_sample=False)` means in transformers 5.23
(`GenerationMixin._beam_search` and its helpers). It keeps up to w *live* beams, continuations of the
prompt that have not ended, and up to w *hypotheses*, the best ended ones. A step gets the most likely
next tokens of each live beam and

1. adds their log-probabilities to the scores of the beams and ranks them all in one list;
2. ends each continuation that reaches an end token or the length limit. It becomes a hypothesis only if it
   ranks among the first w, and keeps its place only while it is among the w best hypotheses;
3. makes the first w others the new live beams. With e end tokens, w + e candidates of a beam are enough;
   a row has max(2, 1 + e) * w, as in transformers.

A beam's score is the sum of its log-probabilities. A hypothesis's is that sum over
length ** length_penalty, where length counts output tokens, the end token included. Sums and quotients
are float32, so that scores that tie in transformers tie here. Ties go by parent rank, then token id;
between hypotheses the older one wins. (transformers leaves ties to torch.topk, which promises no order.)

The search is over when no beam is live or, with w hypotheses found, by `EarlyStopping`. Only ended
beams are ever returned: at the length limit the first w have all ended, so there are w hypotheses
unless the vocabulary is too small to form so many. Where transformers needs a beam that does not
exist (all but one at the start, hypotheses not yet found) it uses a stand-in with a score of -1e9, and may
return it. Here there is none. The results differ only where a stand-in ranks among the first w:
when the vocabulary is smaller than w, or a true score gets as low as -1e9 (an extreme length_penalty).

The histories of beams are linked nodes, shared between beams of a common past: a step adds one node
to each beam, whatever its length. Next: `sequence.py`, `executor_planner.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from octavo_shared.step_wire.step import Int32Array
from scheduler_svc.request.outputs import FinishReason, Float32Array, Hypothesis
from scheduler_svc.request.parameters import BeamSearchParams, EarlyStopping

# transformers adds this to a score to rule a candidate out.
_IMPOSSIBLE: Final = np.float32(-1e9)


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The most likely next tokens of one live beam, most likely first, equal ones by token id.

    `token_ids` and `logprobs` are [num_candidates]; a token that cannot come may have -inf, none has NaN.
    """

    token_ids: Int32Array
    logprobs: Float32Array


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """The last token of a history and the node before it; None: the prompt."""

    parent: _Node | None = field(repr=False)
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A continuation of the prompt; `score` is the sum of its log-probabilities."""

    score: float
    last: _Node | None = field(default=None, repr=False)

    @property
    def token_ids(self) -> Int32Array:
        """The output tokens, [num_output_tokens]; collected at each call."""
        return np.array([node.token_id for node in self._history()], np.int32)

    @property
    def logprobs(self) -> Float32Array:
        """The log-probability of each output token, [num_output_tokens]; collected at each call."""
        return np.array([node.logprob for node in self._history()], np.float32)

    def _history(self) -> list[_Node]:
        nodes = []
        node = self.last
        while node is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


@dataclass(frozen=True, slots=True, eq=False)
class _Ended:
    """A hypothesis with its history still in linked nodes."""

    beam: Beam
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, eq=False)
class _Continuations:
    """All continuations of the live beams by one token, best first; each array is [num_continuations]."""

    parents: npt.NDArray[np.intp]
    token_ids: Int32Array
    logprobs: Float32Array
    scores: Float32Array

    def beam(self, rank: int, live: list[Beam]) -> Beam:
        """Return the continuation at `rank` of the beams in `live`."""
        node = _Node(live[self.parents[rank]].last, int(self.token_ids[rank]), float(self.logprobs[rank]))
        return Beam(float(self.scores[rank]), node)


class BeamSearch:
    """One search. Starts with one live beam, the prompt.

    Args:
        params: Width, number of outputs, length penalty and when to stop.
        num_prompt_tokens: Length of the prompt.
        max_num_tokens: Most tokens of a hypothesis, prompt and output; more than the prompt has.
        stop_token_ids: The end tokens.
        vocab_size: Number of different tokens, as many candidates as there can be.
    """

    def __init__(
        self,
        params: BeamSearchParams,
        num_prompt_tokens: int,
        max_num_tokens: int,
        stop_token_ids: frozenset[int],
        *,
        vocab_size: int,
    ) -> None:
        self.params: Final = params
        self._num_prompt_tokens: Final = num_prompt_tokens
        # A beam has one continuation for each end token, so at least `beam_width` of these go on.
        self._num_ranked = max(2, 1 + len(stop_token_ids)) * params.beam_width
        self.num_candidates: Final = min(self._num_ranked, vocab_size)
        self._stop_token_ids: Int32Array = np.array(sorted(stop_token_ids), np.int32)
        self._num_output_tokens = 0
        self.limit_length(max_num_tokens)
        self._live = [Beam(0.0)]
        self._ended: list[_Ended] = []

    def limit_length(self, max_num_tokens: int) -> None:
        """Limit the tokens of a hypothesis, prompt and output; more than the live beams have."""
        self._max_num_output_tokens = max_num_tokens - self._num_prompt_tokens
        assert self._num_output_tokens < self._max_num_output_tokens

    @property
    def live(self) -> list[Beam]:
        """The live beams, best first; none: the search is over."""
        return self._live

    @property
    def is_over(self) -> bool:
        """Whether `finished_hypotheses` will not change any more."""
        return not self._live

    def advance(self, candidates: list[Candidates]) -> list[tuple[int, int]]:
        """Take one step with the candidates of the live beams, in their order.

        Returns (index of the parent among the former live beams, token id) of each new live beam, best
        first; empty: the search is over. A parent may occur several times or not at all.
        """
        ranked = self._rank(candidates)
        self._num_output_tokens += 1
        width, at_limit = self.params.beam_width, self._num_output_tokens == self._max_num_output_tokens
        is_stop = (ranked.token_ids[:, None] == self._stop_token_ids).any(axis=1)
        is_end = is_stop | at_limit

        for rank in np.flatnonzero(is_end[:width]).tolist():
            self._ended.append(self._end(ranked.beam(rank, self._live), stopped=bool(is_stop[rank])))
        # The sort is stable: of equal ones, the older and then the better ranked comes first.
        self._ended.sort(key=lambda ended: ended.score, reverse=True)
        del self._ended[width:]

        survivors = np.flatnonzero(~is_end)[:width].tolist()
        if not survivors or not self._may_improve(float(ranked.scores[survivors[0]])):
            self._live = []
            return []
        self._live = [ranked.beam(rank, self._live) for rank in survivors]
        return [(int(ranked.parents[rank]), int(ranked.token_ids[rank])) for rank in survivors]

    def finished_hypotheses(self) -> list[Hypothesis]:
        """Return the best hypotheses so far, best first, at most `num_outputs`.

        When the search is over there are fewer only if the vocabulary cannot form so many.
        """
        return [
            Hypothesis(ended.beam.token_ids, ended.beam.logprobs, ended.score, ended.finish_reason)
            for ended in self._ended[: self.params.num_outputs]
        ]

    def _rank(self, candidates: list[Candidates]) -> _Continuations:
        assert len(candidates) == len(self._live), "each live beam has its candidates"
        parents = np.repeat(np.arange(len(candidates)), [len(beam.token_ids) for beam in candidates])
        token_ids = np.concatenate([beam.token_ids for beam in candidates])
        logprobs = np.concatenate([beam.logprobs for beam in candidates])
        scores = logprobs + np.array([beam.score for beam in self._live], np.float32)[parents]

        if len(scores) > self._num_ranked:
            lowest = np.partition(scores, -self._num_ranked)[-self._num_ranked]
            best = np.flatnonzero(scores >= lowest)
            parents, token_ids, logprobs, scores = parents[best], token_ids[best], logprobs[best], scores[best]
        # Not by the order of the candidates: of two that differ, the sums may be equal after rounding.
        order = np.lexsort((token_ids, parents, -scores))
        order = order[: np.count_nonzero(scores > _IMPOSSIBLE)]
        return _Continuations(parents[order], token_ids[order], logprobs[order], scores[order])

    def _end(self, beam: Beam, stopped: bool) -> _Ended:
        score = self._score(beam.score, self._num_output_tokens)
        return _Ended(beam, score, FinishReason.STOP if stopped else FinishReason.LENGTH)

    def _may_improve(self, best_live_score: float) -> bool:
        """Whether a live beam may still become one of the hypotheses, as `EarlyStopping` judges it."""
        if len(self._ended) < self.params.beam_width:
            return True
        early_stopping, length = self.params.early_stopping, self._num_output_tokens
        if early_stopping is EarlyStopping.TRUE:
            return False
        if early_stopping is EarlyStopping.NEVER and self.params.length_penalty > 0.0:
            length = self._max_num_output_tokens
        return self._score(best_live_score, length) > self._ended[-1].score

    def _score(self, sum_logprobs: float, length: int) -> float:
        """Return the score of a hypothesis of `length` output tokens, in float32."""
        limits = np.finfo(np.float32)
        with np.errstate(over="ignore"):  # an extreme length_penalty makes all scores -0.0, or all -inf
            penalty = float(np.float64(length) ** self.params.length_penalty)
            penalty = max(float(limits.tiny), min(penalty, float(limits.max)))
            return float(np.float32(sum_logprobs) / np.float32(penalty))
