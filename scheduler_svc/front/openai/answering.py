"""What completions, chats and messages share: from fields to responses, and the count of tokens."""

import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from aiohttp import web

from octavo_shared.errors import InvalidFieldError, OctavoServiceError
from scheduler_svc.front.api.models import Models
from scheduler_svc.front.api.request_limits import PromptTooLongError, RequestLimits
from scheduler_svc.front.openai.call import Call
from scheduler_svc.front.openai.errors import PROMPT_FIELDS, api_error
from scheduler_svc.front.openai.field_reader import Reader, in_place_of
from scheduler_svc.front.openai.fields import DecodingFields, PoolingFields, RequestFields
from scheduler_svc.front.openai.logprobs import TokenTexts
from scheduler_svc.front.openai.requests import Asked
from scheduler_svc.front.output import Output
from scheduler_svc.front.response import Response
from scheduler_svc.front.text.text_model import TextModel, check_model
from scheduler_svc.request.outputs import FinishReason

_Fields = TypeVar("_Fields", bound=RequestFields)
_Asked = TypeVar("_Asked")

FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class Answering:
    """Runs the requests of an API's endpoints."""

    def __init__(self, models: Models, reader: Reader) -> None:
        self.models = models
        self._reader = reader
        self._texts: dict[str, TokenTexts] = {}  # by model, for its last tokenizer

    async def read(
        self,
        call: Call,
        kind: type[_Fields],
        ask: Callable[[_Fields, RequestLimits], _Asked],
        *,
        needs_model: bool = True,
    ) -> tuple[_Fields, _Asked, TextModel]:
        """Return the fields of a call, its native requests, and the model; it counts as waiting while it is read.

        Raises: OctavoServiceError: the call is refused.
        """

        def make(parsed: dict[str, Any]) -> tuple[_Fields, _Asked, TextModel]:
            fields = self._reader.read(parsed, kind, call.headers)
            if fields.model is None and needs_model:
                rule = f"the name of the served model, {' or '.join(self.models.names)}"
                raise InvalidFieldError("model", "absent", rule + in_place_of("model", parsed, kind))
            model, limits = self.models.choose(fields.model or "").served()
            if fields.model is not None:
                check_model(fields.model, model)
            return fields, ask(fields, limits), model

        async with self.models.reading():
            return await call.read(make)

    @asynccontextmanager
    async def running(self, call: Call, answer_id: str, asked: Asked) -> AsyncIterator[list[Response]]:
        """Run the requests of a call; they end if the caller leaves. Raises OctavoServiceError: one is refused."""
        generation = self.models.choose(asked.requests[0].model)
        num_prompts, most = len(asked.requests), generation.engine.max_requests
        if most is not None and num_prompts > most:
            limit = f"at most {most} prompts: the number that can wait (--max-waiting-requests) and run at once"
            raise InvalidFieldError("prompt", f"{num_prompts} prompts", limit)
        async with AsyncExitStack() as stack:
            responses = []
            for place, request in enumerate(asked.requests):
                request.request_id = answer_id if len(asked.requests) == 1 else f"{answer_id}-{place}"
                running = generation.running(request, call.trace_metadata, make_grammar=asked.make_grammar)
                try:
                    responses.append(await stack.enter_async_context(running))
                except InvalidFieldError as error:
                    if num_prompts == 1:
                        raise
                    raise _of_prompt(error, place) from error
            if call.counted is not None:
                call.counted.accept()
            yield responses

    def waits_for(self, asked: Asked, response: Response) -> str:
        """Return what a stream without news waits for."""
        engine = self.models.choose(asked.requests[0].model).engine
        return engine.waits_for(response.request_id, response.request.tenant)

    def token_texts(self, model: TextModel) -> TokenTexts:
        """Return the texts of a model's tokens; they are kept."""
        if (texts := self._texts.get(model.name)) is None or texts.tokenizer is not model.tokenizer:
            texts = self._texts[model.name] = TokenTexts(model.tokenizer)
        return texts


async def in_openai_words(asked: Asked, answering: Awaitable[web.StreamResponse]) -> web.StreamResponse:
    """Return an answer; in errors, fields have OpenAI's names, and numbers are as they were sent."""
    try:
        return await answering
    except OctavoServiceError as error:
        raise api_error(error, asked.names, asked.numbers) from error


def answer_id(prefix: str, call: Call, fields: DecodingFields | PoolingFields) -> str:
    """Return the `id` of an answer, by which the request is known here too."""
    return f"{prefix}-{fields.request_id or call.request_id}"


def answered_model(model: TextModel, response: Response) -> str:
    """Return what an answer says made it: the adapter of its request, or the model."""
    return response.request.lora_adapter or model.name


def answer_head(identifier: str, kind: str, model: TextModel, response: Response) -> dict[str, object]:
    """Return what the JSON object of an answer begins with."""
    head: dict[str, object] = {
        "id": identifier,
        "object": kind,
        "created": int(time.time()),
        "model": answered_model(model, response),
    }
    if known := fingerprint(model):
        head["system_fingerprint"] = known
    return head


def usage_of(
    responses: Sequence[Response],
    num_copies: int,
    *,
    tells_outputs: bool = True,
    num_reasoning_tokens: int | None = None,
) -> dict[str, Any]:
    """Return the `usage` of an answer whose requests have ended; `num_reasoning_tokens` None: it is not counted."""
    ended = [response.ended for response in responses if response.ended is not None]
    num_outputs = sum(one.num_output_tokens for one in ended) * num_copies if tells_outputs else 0
    num_cached = sum(one.num_cached_tokens for one in ended)
    num_inputs = sum(response.num_input_tokens for response in responses if response.ended is not None)
    counts = usage(num_inputs, num_outputs, num_cached)
    if num_reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens * num_copies}
    return counts


def usage(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int | None = None) -> dict[str, Any]:
    """Return a `usage`; `num_cached_tokens` None: not known yet."""
    counts: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
    }
    if num_cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": num_cached_tokens}
    return counts


def finish_reason(output: Output) -> str:
    """Return why an output has ended."""
    assert output.finish_reason is not None, "it has ended"
    return FINISH_REASONS[output.finish_reason]


def stop_reason(output: Output, stop_token_ids: Sequence[int] | None) -> str | int | None:
    """Return vLLM's `stop_reason`: the stop string or the token of the request that ended an output, if one did."""
    token_id = output.stop_token_id
    return output.stop_string or (token_id if token_id in (stop_token_ids or ()) else None)


def _of_prompt(error: InvalidFieldError, place: int) -> InvalidFieldError:
    """Return an error that says which of several prompts is wrong, if it is about a prompt."""
    name = f"prompt[{place}]"
    if isinstance(error, PromptTooLongError):
        return PromptTooLongError(name, error.size, error.limits, name)
    return InvalidFieldError(name, error.value, error.limit) if error.field in PROMPT_FIELDS else error


_FINGERPRINT_DIGITS = 12


def fingerprint(model: TextModel) -> str | None:
    """Return OpenAI's `system_fingerprint`; None: it is unknown.

    It stands for the executors' arithmetic and weights: where it is equal, equal seeds give equal outputs.
    """
    known = model.reproducibility
    if known.why_not or not known.numerics_ids:
        return None
    name = "\n".join([known.weights_digest, *known.numerics_ids])
    return f"fp_{hashlib.sha256(name.encode()).hexdigest()[:_FINGERPRINT_DIGITS]}"
