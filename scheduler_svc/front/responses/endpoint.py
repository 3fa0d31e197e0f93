"""POST /v1/responses: items in, and the items of the answer, whole or as a stream of events."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any

from aiohttp import web
from pydantic_core import to_json

from scheduler_svc.front.anthropic.blocks import BlockBegin, BlockEnd, Blocks
from scheduler_svc.front.anthropic.streaming import parsed_events
from scheduler_svc.front.openai.answering import Answering, answered_model, usage_of
from scheduler_svc.front.openai.call import Call
from scheduler_svc.front.openai.chat_outputs import FEW_PARSED_TOKENS, ChatFormats, ChatOutputs
from scheduler_svc.front.openai.errors import ApiError
from scheduler_svc.front.openai.field_reader import name_ignored
from scheduler_svc.front.openai.logprobs import TokenLogprobs
from scheduler_svc.front.openai.messages import unread_by_template
from scheduler_svc.front.openai.routing import ANY_METHOD, Route
from scheduler_svc.front.openai.sse import EventStream
from scheduler_svc.front.openai.streaming import stream_events
from scheduler_svc.front.output import Delta
from scheduler_svc.front.response import Response
from scheduler_svc.front.responses.conversation import PATHS, AskedChat, asked_response, echoed, in_own_words
from scheduler_svc.front.responses.fields import ENCRYPTED_REASONING, ResponseFields
from scheduler_svc.front.responses.items import EventWriter, Items
from scheduler_svc.front.text.text_model import TextModel
from scheduler_svc.request.outputs import FinishReason

Json = dict[str, Any]

PATH = "/v1/responses"

# The parameters that an answer has, sent or not.
_NUMBERS = ("temperature", "top_p", "frequency_penalty", "presence_penalty")

# Why the other endpoints of the API do not exist, by the end of their paths.
_NOT_STORED = "responses are not stored: keep the answer, and send the whole conversation as `input`"
_WHY_NOT = {
    "cancel": "a response runs while its connection is open: close it to cancel",
    "compact": "nothing is compacted: send the items that shall stay, or a message that sums them up",
    "input_tokens": "no tokens of items are counted: `usage` has them, and /tokenize counts those of chats",
}


class Responses:
    """Answers requests.

    Args:
        formats: How the model writes tool calls and reasoning.
    """

    def __init__(self, answering: Answering, formats: ChatFormats) -> None:
        self._answering = answering
        self._formats = formats

    def routes(self) -> Mapping[str, Route]:
        """Return the routes by path."""
        return {
            PATH: Route("POST", self._answer_call, "responses"),
            f"{PATH}/{{}}": Route(ANY_METHOD, self._say_why_not),
        }

    async def _say_why_not(self, call: Call) -> web.StreamResponse:
        why = _WHY_NOT.get(call.request.path.rpartition("/")[2], _NOT_STORED)
        raise ApiError(HTTPStatus.NOT_FOUND, f"{call.request.method} {call.request.path[:64]} is not here: {why}")

    async def _answer_call(self, call: Call) -> web.StreamResponse:
        """Answer one request."""
        fields, chat, model = await self._answering.read(call, ResponseFields, asked_response)
        unread = [PATHS[name] for name in unread_by_template(chat.fields, model)]
        name_ignored(call.headers, [*chat.left_out, *unread])
        return await in_own_words(chat, self._answer(call, fields, chat, model))

    async def _answer(
        self, call: Call, fields: ResponseFields, chat: AskedChat, model: TextModel
    ) -> web.StreamResponse:
        outputs = self._formats.outputs(chat.fields, chat.asked, model)
        asked = replace(chat.asked, make_grammar=outputs.make_grammar)
        tokens = TokenLogprobs(self._answering.token_texts(model), shows_ids=False)
        async with self._answering.running(call, f"resp_{fields.request_id or call.request_id}", asked) as [response]:
            answer = _Answer(fields, chat, model, response, outputs, tokens)
            if fields.stream:
                stream = _ResponseStream(call, partial(self._answering.waits_for, asked, response), answer, response)
                return await stream_events(stream, stream.send_all, asked.names, response.request_id)
            await response.wait_until_ended()
        is_quick = len(response.outputs[0].token_ids) <= FEW_PARSED_TOKENS
        return call.answer_bytes(answer.whole() if is_quick else await asyncio.to_thread(answer.whole))


class _Answer:
    """One answer, while it is made."""

    def __init__(
        self,
        fields: ResponseFields,
        chat: AskedChat,
        model: TextModel,
        response: Response,
        outputs: ChatOutputs,
        tokens: TokenLogprobs,
    ) -> None:
        self._response = response
        self._outputs = outputs
        self._tokens = tokens
        self._num_alternatives = chat.asked.num_alternatives
        self._pending: list[Json] = []  # log-probabilities of tokens whose text is not known to be content
        self._parser = None if outputs.are_plain else outputs.parser(response, 0)
        self._blocks = Blocks(tells_thinking=True)
        self._head: Json = {
            "id": response.request_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": answered_model(model, response),
            **echoed(fields, chat.tools),
            **{name: _number(fields, response, name) for name in _NUMBERS},
        }
        self._events = EventWriter()
        tells_summary = (fields.reasoning or {}).get("summary") not in (None, "none")
        encrypts = ENCRYPTED_REASONING in (fields.include or ())
        self._items = Items(
            response.request_id, self._events, chat.tools.names, tells_summary=tells_summary, encrypts=encrypts
        )

    def begin(self) -> bytes:
        """Return the first events of the answer."""
        content = self._content("in_progress")
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._events.event(kind, response=content) for kind in kinds)

    def add(self, delta: Delta) -> bytes:
        """Return the events of more text."""
        if self._num_alternatives is not None:
            told = delta.token_ids, delta.logprobs, delta.alternatives
            self._pending += self._tokens.chat(*told, self._num_alternatives)
        made = self._blocks.add(parsed_events(self._parser, delta.text))
        logprobs, self._pending = (self._pending, []) if made else ((), self._pending)
        return self._items.add(made, logprobs)

    def end(self) -> bytes:
        """Return the last events of the items: the output has ended."""
        [output] = self._response.outputs
        made = [*self._blocks.add(parsed_events(self._parser, "", output)), *self._blocks.end()]
        if not made and not self._items.done:  # clients expect a message
            made = [BlockBegin(0, "text"), BlockEnd(0, "text")]
        return self._items.add(made, self._pending, is_cut=output.finish_reason is FinishReason.LENGTH)

    def last(self) -> bytes:
        """Return the last event of the answer."""
        content = self._ended()
        return self._events.event(f"response.{content['status']}", response=content)

    def failed(self, error: ApiError) -> bytes:
        """Return the last event of an answer that fails."""
        code = "server_error" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_prompt"
        if error.status == HTTPStatus.TOO_MANY_REQUESTS:
            code = "rate_limit_exceeded"
        content = self._content("failed", error={"code": code, "message": error.message})
        return self._events.event("response.failed", response=content)

    def whole(self) -> bytes:
        """Return the complete answer."""
        [output] = self._response.outputs
        for delta in output.take_each():
            self.add(delta)
        self.end()
        return to_json(self._ended())

    def _ended(self) -> Json:
        is_cut = self._response.outputs[0].finish_reason is FinishReason.LENGTH
        num_reasoning = self._outputs.num_reasoning_tokens(self._response) or 0
        counts = usage_of([self._response], 1)
        usage = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": counts["total_tokens"],
        }
        if is_cut:
            return self._content("incomplete", usage=usage, incomplete_details={"reason": "max_output_tokens"})
        return self._content("completed", usage=usage, completed_at=int(time.time()))

    def _content(self, status: str, **more: Any) -> Json:
        empty = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        return {**self._head, "status": status, "output": self._items.done, **empty, **more}


class _ResponseStream(EventStream):
    """Sends one answer as it comes."""

    def __init__(self, call: Call, waits_for: Callable[[], str], answer: _Answer, response: Response) -> None:
        super().__init__(call, waits_for)
        self._answer = answer
        self._deltas = response.next_token_deltas

    async def send_all(self) -> None:
        """Send all events but the last one. Raises OctavoServiceError: the request failed."""
        await self.send(self._answer.begin())
        while (deltas := await self._deltas()) is not None:
            if events := b"".join(map(self._answer.add, deltas)):
                await self.send(events)
        await self.send(self._answer.end())

    def failed(self, error: ApiError) -> bytes:
        """See `EventStream`."""
        return self._answer.failed(error)

    def finished(self) -> bytes:
        """See `EventStream`."""
        return self._answer.last()


def _number(fields: ResponseFields, response: Response, name: str) -> float:
    """Return a sampling parameter as it was sent, or its default."""
    sent = getattr(fields, name)
    return round(float(getattr(response.request.sampling, name)), 6) if sent is None else float(sent)
