"""/v1/messages: a conversation, and the assistant's next turn; /v1/messages/count_tokens: how long its prompt is."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from aiohttp import web
from pydantic_core import to_json

from octavo_shared.errors import OctavoServiceError
from scheduler_svc.front.anthropic.blocks import Blocks, content_json
from scheduler_svc.front.anthropic.conversation import chat_conversation
from scheduler_svc.front.anthropic.errors import PATH, messages_error
from scheduler_svc.front.anthropic.fields import ConversationFields, CountTokensFields, MessagesFields
from scheduler_svc.front.anthropic.streaming import MessageStream, ended_by, message_head, parsed_events, usage
from scheduler_svc.front.anthropic.tools import chat_format, chat_thinking, chat_tools
from scheduler_svc.front.api import tokenization
from scheduler_svc.front.api.request_limits import RequestLimits
from scheduler_svc.front.openai.answering import Answering, answered_model
from scheduler_svc.front.openai.call import Call
from scheduler_svc.front.openai.chat_outputs import FEW_PARSED_TOKENS, ChatFormats, ChatOutputs
from scheduler_svc.front.openai.field_reader import name_ignored
from scheduler_svc.front.openai.fields import ChatFields
from scheduler_svc.front.openai.messages import unread_by_template
from scheduler_svc.front.openai.requests import Asked, asked_chat
from scheduler_svc.front.openai.routing import Route
from scheduler_svc.front.openai.streaming import stream_events
from scheduler_svc.front.response import Response
from scheduler_svc.front.text.text_model import TextModel

_T = TypeVar("_T")

_SAME_NAMES = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "speculate")


@dataclass(frozen=True, slots=True)
class AskedChat:
    """The chat that a request asks for.

    Attributes:
        fields: In OpenAI's words.
        places: The path of each of its messages in the request.
        asked: The same as native requests.
    """

    fields: ChatFields
    places: Sequence[str]
    asked: Asked


class Messages:
    """Answers both endpoints.

    Args:
        formats: How the model writes tool calls and reasoning.
    """

    def __init__(self, answering: Answering, formats: ChatFormats) -> None:
        self._answering = answering
        self._formats = formats

    def routes(self) -> Mapping[str, Route]:
        """Return the routes by path."""
        return {
            PATH: Route("POST", self._answer, "messages"),
            f"{PATH}/count_tokens": Route("POST", self._count_tokens, "count_tokens"),
        }

    async def _answer(self, call: Call) -> web.StreamResponse:
        """Answer one request."""
        call.headers["request-id"] = call.request_id
        _, chat, model = await _in_own_words(self._answering.read(call, MessagesFields, _asked_chat))
        name_ignored(call.headers, ["output_config.effort"] if unread_by_template(chat.fields, model) else [])
        answering = self._answer_chat(call, chat, model)
        return await _in_own_words(answering, chat.places, chat.asked.numbers)

    async def _answer_chat(self, call: Call, chat: AskedChat, model: TextModel) -> web.StreamResponse:
        outputs = self._formats.outputs(chat.fields, chat.asked, model)
        asked = replace(chat.asked, make_grammar=outputs.make_grammar)
        async with self._answering.running(call, f"msg_{call.request_id}", asked) as [response]:
            if chat.fields.stream:
                waits_for = partial(self._answering.waits_for, asked, response)
                stream = MessageStream(call, waits_for, answered_model(model, response), response, outputs)
                return await stream_events(stream, stream.send_all, asked.names, response.request_id)
            await response.wait_until_ended()

        def write() -> bytes:
            return _message(answered_model(model, response), response, outputs)

        is_quick = outputs.are_plain or len(response.outputs[0].token_ids) <= FEW_PARSED_TOKENS
        return call.answer_bytes(write() if is_quick else await asyncio.to_thread(write))

    async def _count_tokens(self, call: Call) -> web.StreamResponse:
        """Return how many tokens the prompt of a conversation has."""
        call.headers["request-id"] = call.request_id
        _, chat, model = await _in_own_words(self._answering.read(call, CountTokensFields, _asked_chat))
        name_ignored(call.headers, ["output_config.effort"] if unread_by_template(chat.fields, model) else [])

        def count(model: TextModel, limits: RequestLimits) -> int:
            self._formats.outputs(chat.fields, chat.asked, model)  # refuses the tools, or leaves them out
            [request] = chat.asked.requests
            return len(tokenization.tokenize_messages(request.messages, model, limits))

        counting = self._answering.models.choose(model.name).tokenization.run(count, is_small=call.is_small)
        return call.answer({"input_tokens": await _in_own_words(counting, chat.places)})


def _asked_chat(fields: ConversationFields, limits: RequestLimits) -> AskedChat:
    """Return the chat that a request asks for. Raises InvalidFieldError: a field is wrong."""
    conversation = chat_conversation(fields)
    values: dict[str, Any] = {name: getattr(fields, name) for name in _SAME_NAMES if hasattr(fields, name)}
    values |= {**chat_tools(fields), **chat_thinking(fields), **chat_format(fields)}
    chat = ChatFields(**values, messages=conversation.messages, stop=getattr(fields, "stop_sequences", None))
    return AskedChat(chat, conversation.places, asked_chat(chat, limits))


def _message(model_name: str, response: Response, outputs: ChatOutputs) -> bytes:
    """Return the body of a complete answer."""
    [output] = response.outputs
    blocks = Blocks(tells_thinking=outputs.tells_reasoning)
    parser = None if outputs.are_plain else outputs.parser(response, 0)
    events = [*blocks.add(parsed_events(parser, output.text, output)), *blocks.end()]
    head = message_head(response, model_name)
    rest = {**ended_by(output, blocks), "usage": usage(response)}
    return b"".join((to_json(head)[:-1], b',"content":', content_json(events), b",", to_json(rest)[1:]))


async def _in_own_words(
    doing: Awaitable[_T], places: Sequence[str] = (), numbers: Mapping[str, float] | None = None
) -> _T:
    """Return the result of an awaitable; errors name fields as the Messages API does."""
    try:
        return await doing
    except OctavoServiceError as error:
        raise messages_error(error, places, numbers or {}) from error
