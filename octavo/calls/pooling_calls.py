"""Embeddings and scores: any number of inputs, in as many calls as they take."""

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from octavo.answer_reading import reading_answers
from octavo.calls.generation_calls import GenerationCalls, grpc_timeout, now_s
from octavo.errors import InvalidRequestError, OctavoError
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.values.pooling import (
    Embeddings,
    EmbedInput,
    PoolingOptions,
    Scores,
    embed_requests,
    rows_from_proto,
    score_requests,
)

if TYPE_CHECKING:
    from octavo.calls.generation_calls import _Method

# Calls under way at once: while one is answered the next is read.
_MAX_CALLS = 2

_INDEX = re.compile(r"(inputs|documents)\[(\d+)\]")

_Request = TypeVar("_Request", pb.EmbedRequest, pb.ScoreRequest)
_Response = TypeVar("_Response", pb.EmbedResponse, pb.ScoreResponse)


def _ignore(num_inputs: int) -> None:
    """Ignore the progress."""


class PoolingCalls(GenerationCalls):
    """Makes the calls; the arguments are as in `Client`."""

    async def embed(
        self,
        inputs: EmbedInput | Iterable[EmbedInput],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        tenant: str = "",
        timeout_s: float | None = None,
        on_progress: Callable[[int], None] = _ignore,
    ) -> Embeddings:
        """Return the vectors of texts, by a model that embeds.

        All of them or none: an input that is refused or fails ends the call. If the connection is lost, call again.

        Args:
            inputs: One text or one list of token ids, or any number of either.
            prompt_name: Which of the model's prompts to put before texts, such as "query"; "": none. None: the model's
                own default. `get_model` has their names.
            dimensions: Length of the vectors, for a model that was trained to be cut (Matryoshka); None: all of it.
            truncate_prompt_tokens: Cut inputs that have more tokens; -1: more than the model takes. None: they are
                refused.
            priority: A lower number is served first.
            tenant: The tenant that the call runs for.
            timeout_s: Time limit for all of it, in seconds; None: none.
            on_progress: Called with the number of inputs that are done, after each call.

        Raises:
            OctavoError: one of the tree in octavo/errors.py.
        """
        options = PoolingOptions(truncate_prompt_tokens, priority, tenant, self.model, prompt_name, dimensions)
        requests = list(embed_requests(inputs, options))
        answers = await self._run_calls(
            requests, lambda stub: stub.Embed, [len(each.inputs) for _, each in requests], timeout_s, on_progress
        )
        with reading_answers():
            rows = [
                row
                for (_, request), answer in zip(requests, answers, strict=True)
                for row in rows_from_proto(answer.values, answer.num_dimensions, len(request.inputs))
            ]
        return Embeddings(tuple(rows), sum(answer.num_prompt_tokens for answer in answers))

    async def score(
        self,
        queries: str | Iterable[str],
        documents: str | Iterable[str],
        *,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        tenant: str = "",
        timeout_s: float | None = None,
        on_progress: Callable[[int], None] = _ignore,
    ) -> Scores:
        """Return how well documents answer queries, by a model that scores.

        Args:
            queries: The first text of each pair; one is for all documents.
            documents: The second text of each pair.
            truncate_prompt_tokens: As in `embed`, of a pair: the longer text is cut.
            priority: As in `embed`.
            tenant: As in `embed`.
            timeout_s: As in `embed`.
            on_progress: As in `embed`.

        Raises:
            OctavoError: one of the tree in octavo/errors.py.
        """
        options = PoolingOptions(truncate_prompt_tokens, priority, tenant, self.model)
        requests = list(score_requests(queries, documents, options))
        answers = await self._run_calls(
            requests, lambda stub: stub.Score, [len(each.documents) for _, each in requests], timeout_s, on_progress
        )
        with reading_answers():
            rows = [
                row
                for (_, request), answer in zip(requests, answers, strict=True)
                for row in rows_from_proto(answer.values, answer.num_scores, len(request.documents))
            ]
        return Scores(tuple(rows), sum(answer.num_prompt_tokens for answer in answers))

    async def _run_calls(
        self,
        requests: Sequence[tuple[int, _Request]],
        method: "_Method[_Request, _Response]",
        nums_inputs: Sequence[int],
        timeout_s: float | None,
        on_progress: Callable[[int], None],
    ) -> list[_Response]:
        """Return the answers in order; the first error ends all calls."""
        deadline_s = None if timeout_s is None else now_s() + grpc_timeout(timeout_s)
        places, num_done = asyncio.Semaphore(_MAX_CALLS), 0

        async def run(first: int, request: _Request, num_inputs: int) -> _Response:
            nonlocal num_done
            async with places:
                try:
                    left_s = None if deadline_s is None else deadline_s - now_s()
                    answer = await self._answer(method, request, timeout_s=left_s)
                except InvalidRequestError as error:
                    raise _behind(error, first) from error
            num_done += num_inputs
            on_progress(num_done)
            return answer

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(run(first, request, num_inputs))
                    for (first, request), num_inputs in zip(requests, nums_inputs, strict=True)
                ]
        except* OctavoError as failed:
            raise _first_of(failed) from None
        return [task.result() for task in tasks]


def _behind(error: InvalidRequestError, first: int) -> InvalidRequestError:
    """Return an error with the index that an input has among the inputs of all calls."""
    if not first:
        return error
    sentence = _INDEX.sub(lambda match: f"{match[1]}[{int(match[2]) + first}]", str(error), count=1)
    return InvalidRequestError(sentence, field=error.field)


def _first_of(failed: BaseExceptionGroup[OctavoError]) -> OctavoError:
    error = failed.exceptions[0]
    return _first_of(error) if isinstance(error, BaseExceptionGroup) else error
