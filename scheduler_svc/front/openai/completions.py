"""/v1/completions: prompts as texts or token ids, the texts that follow them."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from aiohttp import web
from pydantic_core import to_json

from scheduler_svc.front.openai.answering import (
    Answering,
    answer_head,
    answer_id,
    finish_reason,
    in_openai_words,
    stop_reason,
    usage_of,
)
from scheduler_svc.front.openai.call import Call
from scheduler_svc.front.openai.fields import CompletionFields
from scheduler_svc.front.openai.logprobs import FEW_LOGPROBS, CompletionLogprobs, TokenLogprobs, num_logprobs
from scheduler_svc.front.openai.requests import Asked, asked_completion
from scheduler_svc.front.openai.sse import ChunkStream
from scheduler_svc.front.openai.streaming import NULL, Pieces, stream_answer
from scheduler_svc.front.output import Delta, Output
from scheduler_svc.front.response import Response
from scheduler_svc.front.text.text_model import TextModel


class Completions:
    """Answers completions."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    async def answer(self, call: Call) -> web.StreamResponse:
        """Answer one request."""
        fields, asked, model = await self._answering.read(call, CompletionFields, asked_completion)
        return await in_openai_words(asked, self._answer(call, fields, asked, model))

    async def _answer(self, call: Call, fields: CompletionFields, asked: Asked, model: TextModel) -> web.StreamResponse:
        identifier = answer_id("cmpl", call, fields)
        shows_ids = bool(fields.return_tokens_as_token_ids)
        tokens = TokenLogprobs(self._answering.token_texts(model), shows_ids=shows_ids)
        async with self._answering.running(call, identifier, asked) as responses:
            head = answer_head(identifier, "text_completion", model, responses[0])
            prompts = [_Prompt(fields, asked, place, response, tokens) for place, response in enumerate(responses)]
            if fields.stream:
                stream = ChunkStream(call, partial(self._answering.waits_for, asked, responses[0]), head)
                pieces = [_CompletionPieces(stream, prompt) for prompt in prompts]
                return await stream_answer(stream, pieces, asked.names, tells_outputs=not prompts[0].is_prompt_only)
            for response in responses:
                await response.wait_until_ended()
            counts = usage_of(responses, asked.num_copies, tells_outputs=not prompts[0].is_prompt_only)

        def write() -> bytes:
            choices = [choice for prompt in prompts for choice in prompt.choices()]
            return to_json({**head, "choices": choices, "usage": counts})

        is_quick = sum(map(num_logprobs, responses)) <= FEW_LOGPROBS
        body = write() if is_quick else await asyncio.to_thread(write)
        return call.answer_bytes(body)


class _Prompt:
    """One prompt and its outputs."""

    def __init__(
        self, fields: CompletionFields, asked: Asked, place: int, response: Response, tokens: TokenLogprobs
    ) -> None:
        self.fields = fields
        self.asked = asked
        self.place = place
        self.response = response
        self.tokens = tokens
        self.is_prompt_only = bool(fields.echo) and fields.max_tokens == 0

    @property
    def text(self) -> str:
        """The prompt's text."""
        request = self.asked.requests[self.place]
        if request.WhichOneof("prompt") == "text":
            return request.text
        return self.tokens.texts.tokenizer.decode(self.token_ids, False)

    @property
    def token_ids(self) -> list[int]:
        """The prompt's tokens."""
        ids: list[int] = self.response.request.read_token_ids.tolist()
        return ids

    def logprobs(self) -> CompletionLogprobs | None:
        """Return what writes the log-probabilities of one choice; None: none were asked for."""
        if self.fields.logprobs is None:
            return None
        skips = self.fields.skip_special_tokens is not False
        offset = 0 if self.fields.echo else len(self.text)  # as in OpenAI's API
        return CompletionLogprobs(self.tokens, self.fields.logprobs, skips_special_tokens=skips, offset=offset)

    def echoed_logprobs(self, logprobs: CompletionLogprobs) -> dict[str, Any]:
        """Return the prompt's log-probabilities, which are complete."""
        response = self.response
        return logprobs.prompt(self.token_ids, response.prompt_logprobs, response.prompt_alternatives)

    def choices(self) -> list[dict[str, Any]]:
        """Return the choices of a complete answer."""
        num_copies = self.asked.num_copies
        first = self.place * len(self.response.outputs) * num_copies
        return [
            {"index": first + output.output_index * num_copies + copy, **choice}
            for output in self.response.outputs
            for choice in [self._choice(output)]
            for copy in range(num_copies)
        ]

    def _choice(self, output: Output) -> dict[str, Any]:
        parts = []
        logprobs = self.logprobs()
        if logprobs is not None and self.fields.echo:
            parts.append(self.echoed_logprobs(logprobs))
        if logprobs is not None and not self.is_prompt_only:
            parts.append(logprobs.of(output.token_ids, output.logprobs, output.alternatives))
        choice: dict[str, Any] = {
            "text": (self.text if self.fields.echo else "") + ("" if self.is_prompt_only else output.text),
            "logprobs": _joined(parts),
            "finish_reason": "length" if self.is_prompt_only else finish_reason(output),
        }
        reason = stop_reason(output, self.fields.stop_token_ids)
        if reason is not None:
            choice["stop_reason"] = reason
        if self.fields.prompt_logprobs is not None:
            response = self.response
            of_decoder = response.request.prompt_token_ids.tolist()
            choice["prompt_logprobs"] = self.tokens.prompt(
                of_decoder, response.prompt_logprobs, response.prompt_alternatives, self.fields.prompt_logprobs
            )
        if self.fields.return_token_ids:
            choice["prompt_token_ids"] = self.token_ids
            choice["token_ids"] = [] if self.is_prompt_only else output.token_ids
        return choice


class _CompletionPieces(Pieces):
    """The events of one prompt."""

    def __init__(self, stream: ChunkStream, prompt: _Prompt) -> None:
        super().__init__(stream, prompt.response, prompt.place, prompt.asked, prompt.fields)
        self._prompt = prompt
        self._logprobs = {}
        if prompt.fields.logprobs is not None:
            self._logprobs = {index: prompt.logprobs() for index in self.indices}
        self._echoes = set(self.indices) if prompt.fields.echo else set()
        self._tells_ids = bool(prompt.fields.return_token_ids)
        self._without_prompt = set(self.indices) if self._tells_ids else set()  # choices without an event with its ids

    def begin(self) -> bytes:
        """Return nothing: an echo waits for the log-probabilities of the prompt."""
        return b""

    def piece(self, delta: Delta, index: int) -> bytes:
        """Return the events of a delta."""
        echo = self._echo(index) if index in self._echoes else b""
        if self._prompt.is_prompt_only:
            return echo
        logprobs = self._logprobs.get(index)
        if not delta.text and logprobs is None and not self._tells_ids:
            return echo
        shown = NULL
        if logprobs is not None:
            shown = to_json(logprobs.of(delta.token_ids, delta.logprobs, delta.alternatives))
        return echo + self._event(index, to_json(delta.text), shown, NULL, self._ids(delta.token_ids))

    def last_piece(self, output: Output, index: int) -> bytes:
        """Return the events that end a choice."""
        echo = self._echo(index) if index in self._echoes else b""
        if self._prompt.is_prompt_only:
            return echo + self._event(index, b'""', NULL, b'"length"', b"")
        return echo + self._event(index, b'""', NULL, *self.endings(output))

    def _echo(self, index: int) -> bytes:
        self._echoes.discard(index)
        logprobs = self._logprobs.get(index)
        shown = NULL if logprobs is None else to_json(self._prompt.echoed_logprobs(logprobs))
        return self._event(index, to_json(self._prompt.text), shown, NULL, b"")

    def _event(self, index: int, text: bytes, logprobs: bytes, reason: bytes, rest: bytes) -> bytes:
        begin = b'{"index":%d,"text":' % index
        if index in self._without_prompt:
            self._without_prompt.discard(index)
            rest += self.prompt_token_ids()
        return self.event(begin, text, b',"logprobs":', logprobs, b',"finish_reason":', reason, rest, b"}")

    def _ids(self, token_ids: Sequence[int]) -> bytes:
        return b',"token_ids":' + to_json(token_ids) if self._tells_ids else b""


def _joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the log-probabilities of the prompt and of the output as those of one text."""
    if not parts:
        return None
    joined = dict(parts[0])
    for part in parts[1:]:
        for name, values in part.items():
            if values is not None:
                joined[name] = [*joined[name], *values]
    return joined
