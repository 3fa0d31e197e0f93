"""What the engine has to tell one front: a message that grows until the front takes it."""

import math
from collections.abc import Sequence

from octavo.core.v1 import core_service_pb2 as pb
from scheduler_svc.request.outputs import Alternatives


class AnswerBatch:
    """Collects answers; a protobuf message takes whole lists faster than single numbers.

    Attributes:
        response: Where everything but tokens goes.
        is_announced: Whether the session knows that it is not empty.
    """

    def __init__(self) -> None:
        self.response = pb.JoinResponse()
        self.is_announced = False
        self._numbers: list[int] = []
        self._output_indexes: list[int] = []
        self._token_ids: list[int] = []
        self._positions: list[int] = []
        self._logprobs: list[float] = []
        self._has_logprobs = False
        self._alternative_counts: list[int] = []
        self._alternatives = Alternatives([], [])

    @property
    def num_tokens(self) -> int:
        """How many tokens it has."""
        return len(self._numbers)

    def add_token(
        self,
        number: int,
        output_index: int,
        position: int,
        token_id: int,
        logprob: float | None,
        alternatives: Alternatives | None,
    ) -> None:
        """Add a token of a request's output."""
        self._numbers.append(number)
        self._output_indexes.append(output_index)
        self._positions.append(position)
        self._token_ids.append(token_id)
        if logprob is None:
            self._logprobs.append(math.nan)
        else:
            self._logprobs.append(logprob)
            self._has_logprobs = True
        if alternatives is None:
            self._alternative_counts.append(0)
        else:
            self._alternative_counts.append(len(alternatives.token_ids))
            self._alternatives.extend(alternatives)

    def add_prompt(self, number: int, logprobs: Sequence[float], alternatives: Alternatives) -> None:
        """Add log-probabilities of a request's prompt."""
        self.response.prompt_logprobs.add(
            number=number,
            logprobs=logprobs,
            alternative_token_ids=alternatives.token_ids,
            alternative_logprobs=alternatives.logprobs,
        )

    def message(self) -> pb.JoinResponse:
        """Return all of it; the batch is not used again."""
        if self._numbers:
            tokens = self.response.tokens
            tokens.numbers.extend(self._numbers)
            if any(self._output_indexes):
                tokens.output_indexes.extend(self._output_indexes)
            tokens.token_ids.extend(self._token_ids)
            tokens.positions.extend(self._positions)
            if self._has_logprobs:
                tokens.logprobs.extend(self._logprobs)
            if self._alternatives.token_ids:
                tokens.alternative_counts.extend(self._alternative_counts)
                tokens.alternative_token_ids.extend(self._alternatives.token_ids)
                tokens.alternative_logprobs.extend(self._alternatives.logprobs)
        return self.response
