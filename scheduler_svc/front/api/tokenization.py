"""Text to token ids and back: for the prompts of `Generate`, and for the calls of `Tokenize` and `Detokenize`.

The functions may take long, so they run in a thread. `Tokenization` answers the two calls.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import CallerError, InvalidFieldError, QueueFullError
from octavo_shared.step_wire.step import Int32Array
from scheduler_svc.front.api.message_scan import CountLimit
from scheduler_svc.front.api.request_body import RequestBody
from scheduler_svc.front.api.request_limits import PromptTooLongError, RequestLimits
from scheduler_svc.front.api.request_validation import MAX_CHAT_MESSAGES, check_known_ids, check_prompt_length
from scheduler_svc.front.api.text_validation import check_known
from scheduler_svc.front.text.conversation import Conversation, num_characters
from scheduler_svc.front.text.text_model import TOKENIZER_FIX, TextModel, check_model
from scheduler_svc.front.text.text_threads import TextThreads
from scheduler_svc.front.text.tokenizer import TooManyTokensError

Request = TypeVar("Request", pb.TokenizeRequest, pb.DetokenizeRequest)
Result = TypeVar("Result")

# Concurrent calls of Tokenize and Detokenize: each keeps its request in memory.
MAX_CALLS = 64
RETRY_AFTER_S = 1.0


class Tokenization:
    """Answers `Tokenize` and `Detokenize`.

    Args:
        served: Returns the model and the limits of its requests; raises NoExecutorError: there is none yet.
    """

    def __init__(self, served: Callable[[], tuple[TextModel, RequestLimits]], threads: TextThreads) -> None:
        self._served = served
        self._threads = threads
        self._num_calls = 0
        self._large_ones = asyncio.Lock()  # one at a time: each thread that runs Python delays the event loop

    async def tokenize(self, body: RequestBody[pb.TokenizeRequest]) -> pb.TokenizeResponse:
        """Return the tokens of a prompt. Raises OctavoServiceError: as the proto says."""
        return await self._answer(body, tokenize)

    async def detokenize(self, body: RequestBody[pb.DetokenizeRequest]) -> pb.DetokenizeResponse:
        """Return the text of tokens. Raises OctavoServiceError: as the proto says."""
        return await self._answer(body, detokenize)

    async def run(self, work: Callable[[TextModel, RequestLimits], Result], *, is_small: bool) -> Result:
        """Return the result of `work`, which may take long unless `is_small`, from a thread.

        Raises:
            NoExecutorError: there is no model yet.
            QueueFullError: there are too many of these calls.
            TokenizerFailedError, UnavailableError: see `TextThreads.run`.
        """
        model, limits = self._served()
        with self._counted():
            if is_small:
                return await self._threads.run(work, model, limits)
            async with self._large_ones:
                return await self._threads.run(work, model, limits)

    async def _answer(
        self, body: RequestBody[Request], answer: Callable[[Request, TextModel, RequestLimits], Result]
    ) -> Result:
        def read_and_answer(model: TextModel, limits: RequestLimits) -> Result:
            request = body.decode(count_limits(model))
            if request.model:
                check_model(request.model, model)
            return answer(request, model, limits)

        return await self.run(read_and_answer, is_small=body.is_small)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a call while it runs. Raises QueueFullError: too many run."""
        if self._num_calls >= MAX_CALLS:
            raise QueueFullError(self._num_calls, RETRY_AFTER_S, queue="the queue of Tokenize and Detokenize")
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1


def count_limits(model: TextModel) -> dict[str, CountLimit]:
    """Return how many elements the repeated fields of both calls may have, by path."""
    return {
        "messages.messages": CountLimit(MAX_CHAT_MESSAGES, "messages long", "messages"),
        "token_ids": CountLimit(model.max_model_len, "tokens long", cause="max_model_len"),
    }


def tokenize(request: pb.TokenizeRequest, model: TextModel, limits: RequestLimits) -> pb.TokenizeResponse:
    """Return the tokens that `Generate` would make of a prompt.

    Raises:
        CallerError: the model has no tokenizer.
        InvalidFieldError: there is no prompt, or `Generate` would refuse it; a text may be empty here.
    """
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidFieldError("prompt", "absent", "one of text and messages")
    _require_tokenizer(model)
    if kind == "text":
        adds_special_tokens = not request.HasField("add_special_tokens") or request.add_special_tokens
        token_ids = tokenize_text(request.text, model, limits, add_special_tokens=adds_special_tokens)
    else:
        if request.HasField("add_special_tokens"):
            rule = "unset with messages: the chat template adds the special tokens itself"
            raise InvalidFieldError("add_special_tokens", "set", rule)
        token_ids = tokenize_messages(request.messages, model, limits)
    return pb.TokenizeResponse(token_ids=token_ids, max_model_len=model.max_model_len)


def detokenize(request: pb.DetokenizeRequest, model: TextModel, limits: RequestLimits) -> pb.DetokenizeResponse:
    """Return the text of tokens.

    Raises:
        CallerError: the model has no tokenizer.
        InvalidFieldError: the model does not know a token.
    """
    _require_tokenizer(model)
    token_ids = check_known_ids(request.token_ids, "token_ids", limits.vocab_size)
    skips_special_tokens = not request.HasField("skip_special_tokens") or request.skip_special_tokens
    return pb.DetokenizeResponse(text=model.tokenizer.decode(token_ids.tolist(), skips_special_tokens))


def tokenize_prompt(request: pb.GenerateRequest, model: TextModel, limits: RequestLimits) -> Sequence[int] | Int32Array:
    """Return the token ids of a request's prompt, whatever its form.

    Raises: InvalidFieldError: the chat template refuses it, it is too long, or the model does not know one of its
        tokens.
    """
    kind = request.WhichOneof("prompt")
    if kind == "text":
        adds_special_tokens = not request.HasField("add_special_tokens") or request.add_special_tokens
        return tokenize_text(request.text, model, limits, add_special_tokens=adds_special_tokens)
    if request.HasField("add_special_tokens"):
        raise InvalidFieldError("add_special_tokens", "set", "unset unless the prompt is a text")
    if kind == "messages":
        return tokenize_messages(request.messages, model, limits)
    return np.array(request.token_ids.ids, np.int32)


def tokenize_text(text: str, model: TextModel, limits: RequestLimits, *, add_special_tokens: bool = True) -> list[int]:
    """Return the token ids of a text. Raises InvalidFieldError: see `tokenize_prompt`."""
    _check_text_length("text", len(text), model, limits)
    try:
        token_ids = model.tokenizer.encode(text, limits.max_prompt_tokens, add_special_tokens=add_special_tokens)
    except TooManyTokensError as error:
        check_prompt_length(error.num_tokens, "text", limits)
        raise
    return check_known("text", token_ids, model)


def tokenize_messages(chat: pb.ChatMessages, model: TextModel, limits: RequestLimits) -> list[int]:
    """Return the token ids of a conversation. Raises InvalidFieldError: see `tokenize_prompt`."""
    if not chat.messages:
        raise InvalidFieldError("messages", "empty", "at least 1 message long")
    _check_text_length("messages", num_characters(chat), model, limits)
    try:
        token_ids = model.tokenizer.render_chat(Conversation.of_message(chat), limits.max_prompt_tokens)
    except TooManyTokensError as error:
        check_prompt_length(error.num_tokens, "messages", limits)
        raise
    return check_known("messages", token_ids, model)


def _check_text_length(field: str, num_characters: int, model: TextModel, limits: RequestLimits) -> None:
    """Refuse a text that cannot fit whatever its tokens are: tokenizing it could cost gigabytes."""
    limit = model.max_model_len * model.tokenizer.max_token_length
    if num_characters > limit:
        raise PromptTooLongError(field, f"{num_characters} characters, for at most {limit}", limits)


def _require_tokenizer(model: TextModel) -> None:
    if model.tokenizer.is_absent:
        raise CallerError(f"this model has no tokenizer, so it cannot handle text; {TOKENIZER_FIX}")
