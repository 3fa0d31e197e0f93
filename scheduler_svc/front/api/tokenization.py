"""Text to token ids and back: for the prompts of `Generate`, and for the calls of `Tokenize` and `Detokenize`.

The functions may take long, so they run in a thread. `Tokenization` answers the two calls.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import CallerError, InvalidFieldError, QueueFullError
from octavo_shared.step_wire.step import Int32Array
from scheduler_svc.front.api.message_scan import CountLimit
from scheduler_svc.front.api.request_body import RequestBody
from scheduler_svc.front.api.request_limits import PromptTooLongError, RequestLimits, check_known_ids, unreadable
from scheduler_svc.front.api.request_validation import MAX_CHAT_MESSAGES, check_prompt_length
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

    async def run(self, work: Callable[[TextModel, RequestLimits], Result], *, is_small: bool) -> Result:
        """Return the result of `work`, which may take long unless `is_small`, from a thread.

        Raises:
            NoExecutorError: there is no model yet.
            QueueFullError: there are too many of these calls.
            TokenizerFailedError, UnavailableError: see `TextThreads.run`.
        """
        model, limits = self._served()
        if self._num_calls >= MAX_CALLS:
            raise QueueFullError(self._num_calls, RETRY_AFTER_S, queue="the queue of Tokenize and Detokenize")
        self._num_calls += 1
        try:
            async with nullcontext() if is_small else self._large_ones:
                return await self._threads.run(work, model, limits)
        finally:
            self._num_calls -= 1

    async def answer(
        self, body: RequestBody[Request], answer: Callable[[Request, TextModel, RequestLimits], Result]
    ) -> Result:
        """Return what `answer`, which is `tokenize` or `detokenize`, makes of a request.

        Raises: OctavoServiceError: as the proto says.
        """

        def read_and_answer(model: TextModel, limits: RequestLimits) -> Result:
            request = body.decode(count_limits(model))
            if request.model:
                check_model(request.model, model)
            return answer(request, model, limits)

        return await self.run(read_and_answer, is_small=body.is_small)


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
    if request.WhichOneof("prompt") is None:
        raise InvalidFieldError("prompt", "absent", "one of text and messages")
    _require_tokenizer(model)
    tokens_of = tokenize_input if limits.max_encoder_tokens else tokenize_prompt
    return pb.TokenizeResponse(token_ids=tokens_of(request, model, limits), max_model_len=model.max_model_len)


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


def tokenize_prompt(
    request: pb.GenerateRequest | pb.TokenizeRequest, model: TextModel, limits: RequestLimits
) -> Sequence[int] | Int32Array:
    """Return the token ids of a request's prompt, whatever its form.

    Raises: InvalidFieldError: the chat template refuses it, it is too long, or the model does not know one of its
        tokens.
    """
    if request.WhichOneof("prompt") == "text":
        adds_special_tokens = not request.HasField("add_special_tokens") or request.add_special_tokens
        return tokenize_text(request.text, model, limits, add_special_tokens=adds_special_tokens)
    if isinstance(request, pb.TokenizeRequest) or request.WhichOneof("prompt") == "messages":
        if request.HasField("add_special_tokens"):
            rule = "unset with messages: the chat template adds the special tokens itself"
            raise InvalidFieldError("add_special_tokens", "set", rule)
        return tokenize_messages(request.messages, model, limits)
    if request.HasField("add_special_tokens"):
        raise InvalidFieldError("add_special_tokens", "set", "unset unless the prompt is a text")
    return np.array(request.token_ids.ids, np.int32)


def tokenize_input(
    request: pb.GenerateRequest | pb.TokenizeRequest, model: TextModel, limits: RequestLimits, field: str = ""
) -> Sequence[int] | Int32Array:
    """Return the token ids of a prompt that the model's encoder reads; `field` names it in errors, or its kind does.

    Raises: InvalidFieldError: see `tokenize_prompt`.
    """
    room = limits.max_encoder_tokens + 1  # no token of output follows
    try:
        return tokenize_prompt(request, model, replace(limits, max_model_len=room, max_cached_tokens=room))
    except PromptTooLongError as error:
        raise unreadable(field or error.field, error.size, limits) from error


def tokenize_text(text: str, model: TextModel, limits: RequestLimits, *, add_special_tokens: bool = True) -> list[int]:
    """Return the token ids of a text. Raises InvalidFieldError: see `tokenize_prompt`."""
    encode = partial(model.tokenizer.encode, text, add_special_tokens=add_special_tokens)
    return _encoded("text", len(text), encode, model, limits)


def tokenize_messages(chat: pb.ChatMessages, model: TextModel, limits: RequestLimits) -> list[int]:
    """Return the token ids of a conversation. Raises InvalidFieldError: see `tokenize_prompt`."""
    if not chat.messages:
        raise InvalidFieldError("messages", "empty", "at least 1 message long")

    def encode(max_tokens: int) -> list[int]:
        return model.tokenizer.render_chat(Conversation.of_message(chat), max_tokens)

    return _encoded("messages", num_characters(chat), encode, model, limits)


def _encoded(
    field: str, num_characters: int, encode: Callable[[int], list[int]], model: TextModel, limits: RequestLimits
) -> list[int]:
    """Return the tokens of a text that fits; `encode` makes at most so many of it."""
    limit = max(model.max_model_len, limits.max_len) * model.tokenizer.max_token_length
    if num_characters > limit:  # it cannot fit whatever its tokens are, and tokenizing it could cost gigabytes
        raise PromptTooLongError(field, f"{num_characters} characters, for at most {limit}", limits)
    try:
        token_ids = encode(limits.max_prompt_tokens)
    except TooManyTokensError as error:
        check_prompt_length(error.num_tokens, field, limits)
        raise
    return check_known(field, token_ids, model)


def _require_tokenizer(model: TextModel) -> None:
    if model.tokenizer.is_absent:
        raise CallerError(f"this model has no tokenizer, so it cannot handle text; {TOKENIZER_FIX}")


def refuse_text(request: pb.GenerateRequest) -> None:
    """Refuse text in a request for a model without a tokenizer; its outputs have token ids and no text.

    Raises: InvalidFieldError: the prompt is text or a conversation, or the request has stop strings or banned words.
    """
    params = request.sampling_params
    kind = request.WhichOneof("prompt")
    fields = {
        "text": kind == "text",
        "messages": kind == "messages",
        "encoder_prompt.text": request.encoder_prompt.WhichOneof("prompt") == "text",
        "sampling_params.stop": bool(params.stop),
        "sampling_params.banned_words": bool(params.banned_words),
    }
    instead = {"text": "token_ids", "messages": "token_ids", "encoder_prompt.text": "encoder_prompt.token_ids"}
    instead |= {"sampling_params.stop": "stop_token_ids"}
    for field, is_set in fields.items():
        if is_set:
            other = instead.get(field, "banned_token_ids")
            rule = f"unset: this model has no tokenizer; send {other}, or {TOKENIZER_FIX}"
            raise InvalidFieldError(field, "set", rule)


def check_known(field: str, token_ids: Sequence[int], model: TextModel) -> list[int]:
    """Return the tokens of a text. Raises InvalidFieldError: the model does not know one of them.

    A tokenizer with more tokens than the model is often no mistake: Gemma 3's for the model without images has a token
    behind the last id of the model. The model never generates such a token, and clients hardly ever send it.
    """
    vocab_size = model.info.vocab_size
    if model.tokenizer.largest_id >= vocab_size:
        for token_id in token_ids:
            if token_id >= vocab_size:
                shown = f"a text with the token {model.tokenizer.token_of(token_id)!r}, id {token_id}"
                rule = f"of token ids 0 to {vocab_size - 1}: the tokenizer has tokens that the model lacks"
                raise InvalidFieldError(field, shown, rule)
    return list(token_ids)
