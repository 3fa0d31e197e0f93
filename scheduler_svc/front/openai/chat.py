"""/v1/chat/completions: a conversation, and the assistant's next turn."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web
from pydantic_core import to_json

from scheduler_svc.front.openai.answering import (
    Answering,
    answer_head,
    answer_id,
    in_openai_words,
    stop_reason,
    usage_of,
)
from scheduler_svc.front.openai.call import Call
from scheduler_svc.front.openai.chat_outputs import FEW_PARSED_TOKENS, ChatFormats, ChatOutputs, OutputDeltas
from scheduler_svc.front.openai.field_reader import name_ignored
from scheduler_svc.front.openai.fields import ChatFields
from scheduler_svc.front.openai.logprobs import FEW_LOGPROBS, TokenLogprobs, num_logprobs
from scheduler_svc.front.openai.messages import unread_by_template
from scheduler_svc.front.openai.requests import Asked, asked_chat
from scheduler_svc.front.openai.sse import ChunkStream
from scheduler_svc.front.openai.streaming import NULL, Pieces, stream_answer
from scheduler_svc.front.output import Delta, Output
from scheduler_svc.front.response import Response
from scheduler_svc.front.text.text_model import TextModel


class Chat:
    """Answers conversations.

    Args:
        formats: How the model writes tool calls and reasoning.
    """

    def __init__(self, answering: Answering, formats: ChatFormats) -> None:
        self._answering = answering
        self._formats = formats

    async def answer(self, call: Call) -> web.StreamResponse:
        """Answer one request."""
        fields, asked, model = await self._answering.read(call, ChatFields, asked_chat)
        name_ignored(call.headers, unread_by_template(fields, model))
        return await in_openai_words(asked, self._answer(call, fields, asked, model))

    async def _answer(self, call: Call, fields: ChatFields, asked: Asked, model: TextModel) -> web.StreamResponse:
        outputs = self._formats.outputs(fields, asked, model)
        asked = replace(asked, make_grammar=outputs.make_grammar)
        identifier = answer_id("chatcmpl", call, fields)
        shows_ids = bool(fields.return_tokens_as_token_ids)
        tokens = TokenLogprobs(self._answering.token_texts(model), shows_ids=shows_ids)
        async with self._answering.running(call, identifier, asked) as [response]:
            if fields.stream:
                head = answer_head(identifier, "chat.completion.chunk", model, response)
                stream = ChunkStream(call, partial(self._answering.waits_for, asked, response), head)
                pieces = _ChatPieces(stream, response, asked, fields, tokens, outputs)
                return await stream_answer(stream, [pieces], asked.names)
            await response.wait_until_ended()
        head = answer_head(identifier, "chat.completion", model, response)

        def write() -> bytes:
            return to_json({**head, **_answer_body(response, asked, fields, tokens, outputs)})

        num_parsed = 0 if outputs.are_plain else sum(len(output.token_ids) for output in response.outputs)
        is_quick = num_logprobs(response) <= FEW_LOGPROBS and num_parsed <= FEW_PARSED_TOKENS
        body = write() if is_quick else await asyncio.to_thread(write)
        return call.answer_bytes(body)


def _answer_body(
    response: Response, asked: Asked, fields: ChatFields, tokens: TokenLogprobs, outputs: ChatOutputs
) -> dict[str, Any]:
    """Return what follows the head of a complete answer."""
    body: dict[str, Any] = {
        "choices": [
            {"index": output.output_index * asked.num_copies + copy, **choice}
            for output in response.outputs
            for choice in [_choice(output, asked, fields, tokens, outputs, response)]
            for copy in range(asked.num_copies)
        ],
        "usage": usage_of([response], asked.num_copies, num_reasoning_tokens=outputs.num_reasoning_tokens(response)),
    }
    prompt_token_ids = response.request.prompt_token_ids.tolist()
    if fields.prompt_logprobs is not None:
        body["prompt_logprobs"] = tokens.prompt(
            prompt_token_ids, response.prompt_logprobs, response.prompt_alternatives, fields.prompt_logprobs
        )
    if fields.return_token_ids:
        body["prompt_token_ids"] = response.request.read_token_ids.tolist()
    return body


def _choice(
    output: Output,
    asked: Asked,
    fields: ChatFields,
    tokens: TokenLogprobs,
    outputs: ChatOutputs,
    response: Response,
) -> dict[str, Any]:
    message, ended_by = outputs.message(response, output)
    logprobs = None
    if asked.num_alternatives is not None:
        told = output.token_ids[: outputs.num_content_tokens(output)]
        content = tokens.chat(told, output.logprobs, output.alternatives, asked.num_alternatives)
        logprobs = {"content": content, "refusal": None}
    choice: dict[str, Any] = {
        "message": message,
        "logprobs": logprobs,
        "finish_reason": ended_by,
    }
    reason = stop_reason(output, fields.stop_token_ids)
    if reason is not None:
        choice["stop_reason"] = reason
    if fields.return_token_ids:
        choice["token_ids"] = output.token_ids
    return choice


class _ChatPieces(Pieces):
    """The events of a conversation."""

    def __init__(
        self,
        stream: ChunkStream,
        response: Response,
        asked: Asked,
        fields: ChatFields,
        tokens: TokenLogprobs,
        outputs: ChatOutputs,
    ) -> None:
        super().__init__(stream, response, 0, asked, fields)
        self._tokens = tokens
        self._tells_ids = bool(fields.return_token_ids)
        self._outputs = outputs
        self._deltas: dict[int, OutputDeltas] = {}  # by output index
        self._last: tuple[object, list[dict[str, Any]]] = (None, [])  # copies of a choice have the same deltas

    def begin(self) -> bytes:
        """Return the events that name the role; the first one has the prompt's tokens."""
        events: list[bytes] = []
        for index in self.indices:
            rest = self.prompt_token_ids() if self._tells_ids and not events else b""
            events.append(self._event(index, b'{"role":"assistant","content":""}', NULL, NULL, of_all=rest))
        return b"".join(events)

    def piece(self, delta: Delta, index: int) -> bytes:
        """Return the events of a delta; log-probabilities and token ids are in the first one."""
        if self._last[0] is not delta:
            self._last = delta, self._deltas_of(delta.output_index).feed(delta.text)
        deltas, number = self._last[1], self.num_alternatives
        if not deltas:
            if number is None and not self._tells_ids:
                return b""
            deltas = [{"content": ""}]
        logprobs = NULL
        if number is not None:
            content = self._tokens.chat(self._told_tokens(delta), delta.logprobs, delta.alternatives, number)
            logprobs = to_json({"content": content, "refusal": None})
        rest = b',"token_ids":' + to_json(delta.token_ids) if self._tells_ids else b""
        first = self._event(index, to_json(deltas[0]), logprobs, NULL, rest)
        return first + b"".join(self._event(index, to_json(later), NULL, NULL) for later in deltas[1:])

    def last_piece(self, output: Output, index: int) -> bytes:
        """Return the events that end a choice."""
        deltas = self._deltas_of(output.output_index)
        if self._last[0] is not output:
            self._last = output, deltas.finish(output)
        _, stop_reason = self.endings(output)
        events = [self._event(index, to_json(delta), NULL, NULL) for delta in self._last[1]]
        return b"".join((*events, self._event(index, b"{}", NULL, to_json(deltas.end_of(output)), stop_reason)))

    def num_reasoning_tokens(self) -> int | None:
        """Return the number of reasoning tokens in all outputs; None: the model's format is unknown."""
        return self._outputs.num_reasoning_tokens(self.response)

    def _told_tokens(self, delta: Delta) -> Sequence[int]:
        """Return the tokens of a delta whose log-probabilities the answer has."""
        output = self.response.outputs[delta.output_index]
        is_last = output.num_taken_tokens == len(output.token_ids)
        num_untold = len(output.token_ids) - self._outputs.num_content_tokens(output) if is_last else 0
        return delta.token_ids[: len(delta.token_ids) - num_untold]

    def _deltas_of(self, output_index: int) -> OutputDeltas:
        """Return what makes the deltas of an output."""
        if output_index not in self._deltas:
            parser = None if self._outputs.are_plain else self._outputs.parser(self.response, output_index)
            self._deltas[output_index] = OutputDeltas(parser, tells_reasoning=self._outputs.tells_reasoning)
        return self._deltas[output_index]

    def _event(
        self, index: int, delta: bytes, logprobs: bytes, reason: bytes, rest: bytes = b"", of_all: bytes = b""
    ) -> bytes:
        begin = b'{"index":%d,"delta":' % index
        return self.event(
            begin, delta, b',"logprobs":', logprobs, b',"finish_reason":', reason, rest, b"}", rest=of_all
        )
