"""Check what a client says it has of an answer that was interrupted.

What the request could not have produced is refused: the continued answer would differ from an uninterrupted one.
`request_validation.py` calls this.
"""

from collections.abc import Sequence

import numpy as np

from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import InvalidFieldError
from octavo_shared.step_wire.executor_info import MAX_MODEL_LEN
from octavo_shared.step_wire.step import ADAPTER_DIGEST_BYTES, INT32_MAX, MAX_SOURCE_BYTES, NO_LOGPROBS, Adapter
from scheduler_svc.front.api.request_limits import RequestLimits, check_known_ids, require
from scheduler_svc.front.output import AnswerOptions, ContinuedAnswer, ContinuedText
from scheduler_svc.front.text.output_text import OutputText, TextOptions
from scheduler_svc.front.text.tokenizer import Tokenizer
from scheduler_svc.request.continuation import Continuation, ContinuedOutput
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.outputs import Alternatives, FinishReason
from scheduler_svc.request.provenance import Numerics

_FIELD = "continuation"

# Longest numerics id or digest of weights; no executor has longer ones.
MAX_ID_CHARS = 256


def accepted_limits(request: pb.GenerateRequest, served: RequestLimits) -> RequestLimits:
    """Return the limits of a request; its longest sequence is the one that it was first accepted with.

    Raises: InvalidFieldError: it cannot have been accepted with that.
    """
    max_model_len = request.continuation.max_model_len
    # A plain prompt for a model with an encoder is not the decoder's.
    is_own = not served.max_encoder_tokens or request.HasField("encoder_prompt")
    shortest = 1 + (len(request.token_ids.ids) if is_own else 1)
    rule = f"from {shortest}, one token longer than the prompt, to {MAX_MODEL_LEN}: the value in `accepted`"
    is_possible = not max_model_len or shortest <= max_model_len <= MAX_MODEL_LEN
    require(is_possible, f"{_FIELD}.max_model_len", max_model_len, rule)
    return served.accepted_for(max_model_len)


def validate_continuation(
    request: pb.GenerateRequest,
    engine: EngineRequest,
    options: AnswerOptions,
    limits: RequestLimits,
    tokenizer: Tokenizer,
) -> tuple[Continuation, ContinuedAnswer]:
    """Return a continuation as the engine needs it and as the front needs it; may take long.

    Args:
        request: A request with a continuation; all else in it was checked.
        engine: The same request for the engine.
        options: What the answer consists of.
        limits: The limits of the request.
        tokenizer: The model's.

    Raises: InvalidFieldError: for the first impossible value.
    """
    message = request.continuation
    rule = "token_ids: the prompt token ids from `accepted` (include_prompt_token_ids)"
    require(request.WhichOneof("prompt") == "token_ids", "prompt", "a text with a continuation", rule)
    require(1 <= message.attempt <= INT32_MAX, f"{_FIELD}.attempt", message.attempt, f"from 1 to {INT32_MAX}")
    for name in ("numerics_id", "weights_digest"):
        length = len(getattr(message, name))
        require(length <= MAX_ID_CHARS, f"{_FIELD}.{name}", f"{length} characters long", f"at most {MAX_ID_CHARS}")
    is_drawn = engine.beam_search is None and engine.sampling.temperature > 0
    if is_drawn and not request.sampling_params.HasField("seed"):
        raise InvalidFieldError("sampling_params.seed", "unset", "the value in `accepted`, to continue an answer")
    if request.require_same_numerics and any(output.token_ids for output in message.outputs):
        rule = "the Provenance.numerics_id of its last tokens, with require_same_numerics"
        require(bool(message.numerics_id), f"{_FIELD}.numerics_id", "empty", rule)
    most = options.num_returned
    require(len(message.outputs) <= most, f"{_FIELD}.outputs", f"{len(message.outputs)} outputs", f"at most {most} (n)")
    num_ranked = len(message.outputs) if options.is_ranked else 0
    given = [] if options.is_ranked else [*message.outputs, *[pb.ContinuedOutput()] * (most - len(message.outputs))]
    texts = [
        _Check(f"{_FIELD}.outputs[{index}]", output, engine, options, limits).text(tokenizer)
        for index, output in enumerate(given)
    ]
    prompt_logprobs, prompt_alternatives = _prompt_logprobs(message, engine)
    continuation = Continuation(
        outputs=tuple(ContinuedOutput(np.array(text.token_ids, np.int32), text.finish_reason) for text in texts)
        or tuple(ContinuedOutput(np.empty(0, np.int32)) for _ in range(options.num_sampled)),
        num_prompt_logprobs=len(prompt_logprobs),
        numerics=Numerics(message.numerics_id, message.weights_digest),
        attempt=message.attempt,
        max_model_len=message.max_model_len or None,
        adapter=_adapter(message, engine),
    )
    return continuation, ContinuedAnswer(texts, num_ranked, prompt_logprobs, prompt_alternatives)


def _adapter(message: pb.Continuation, engine: EngineRequest) -> Adapter | None:
    """Return the adapter that made the answer."""
    source, digest = message.adapter_source, message.adapter_digest
    if not (source or digest):
        return None
    require(bool(engine.lora_adapter), "lora_adapter", "empty", "the name of the adapter that began the answer")
    num_bytes = len(source.encode())
    rule = f"the value in Provenance, 1 to {MAX_SOURCE_BYTES} bytes long"
    require(1 <= num_bytes <= MAX_SOURCE_BYTES, f"{_FIELD}.adapter_source", f"{num_bytes} bytes long", rule)
    rule = f"the value in Provenance, {2 * ADAPTER_DIGEST_BYTES} hexadecimal digits"
    is_digest = len(digest) == 2 * ADAPTER_DIGEST_BYTES and not set(digest) - set("0123456789abcdef")
    require(is_digest, f"{_FIELD}.adapter_digest", f"{len(digest)} characters long", rule)
    return Adapter(source, bytes.fromhex(digest))


class _Check:
    """The checks of one output."""

    def __init__(
        self,
        field: str,
        output: pb.ContinuedOutput,
        engine: EngineRequest,
        options: AnswerOptions,
        limits: RequestLimits,
    ) -> None:
        self._field = field
        self._output = output
        self._engine = engine
        self._options = options
        self._limits = limits

    def text(self, tokenizer: Tokenizer) -> ContinuedText:
        """Return the output, with its text decoded again."""
        output = self._output
        token_ids = list(output.token_ids)
        reason = self._end_by_tokens(token_ids)
        logprobs = self._logprobs(len(token_ids))
        decoder, text, stop_string, num_read = _decode_again(token_ids, tokenizer, self._options.text)
        if num_read < len(token_ids):
            self._refuse_tokens_behind(f"the stop string {stop_string!r}", num_read)
        if stop_string is not None:
            reason = FinishReason.STOP
        elif reason is not None:
            text += decoder.finish()
        rule = f"at most {len(text)}, the length of the text of its tokens"
        require(output.num_characters <= len(text), f"{self._field}.num_characters", output.num_characters, rule)
        alternatives = Alternatives(list(output.alternative_token_ids), list(output.alternative_logprobs))
        return ContinuedText(
            token_ids, logprobs, alternatives, decoder, text, output.num_characters, reason, stop_string
        )

    def _end_by_tokens(self, token_ids: Sequence[int]) -> FinishReason | None:
        """Return why an output ends with the last of its tokens; None: it goes on."""
        check_known_ids(token_ids, f"{self._field}.token_ids", self._limits.vocab_size)
        conditions = self._engine.stop_conditions
        ending = set(conditions.stop_token_ids)
        if not conditions.ignore_eos:
            ending.update(self._limits.eos_token_ids)
        for num_read, token_id in enumerate(token_ids[:-1], 1):
            if token_id in ending:
                self._refuse_tokens_behind(f"token {token_id}", num_read)
        most = self._options.max_output_tokens
        rule = f"at most {most} tokens long (max_tokens, or what the model's length leaves)"
        require(len(token_ids) <= most, f"{self._field}.token_ids", f"{len(token_ids)} tokens long", rule)
        if token_ids and token_ids[-1] in ending:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(token_ids) == most else None

    def _refuse_tokens_behind(self, end: str, num_tokens: int) -> None:
        shown = f"{len(self._output.token_ids)} tokens long"
        rule = f"at most {num_tokens} tokens long: the output ends with {end}"
        raise InvalidFieldError(f"{self._field}.token_ids", shown, rule)

    def _logprobs(self, num_tokens: int) -> list[float]:
        """Return the log-probabilities of the tokens, if they were asked for."""
        output = self._output
        num_logprobs = self._engine.sampling.num_logprobs if self._options.returns_logprobs else NO_LOGPROBS
        wanted = {
            "logprobs": num_tokens if num_logprobs != NO_LOGPROBS else 0,
            "alternative_token_ids": num_tokens * max(0, num_logprobs),
            "alternative_logprobs": num_tokens * max(0, num_logprobs),
        }
        for name, num in wanted.items():
            num_given = len(getattr(output, name))
            rule = f"{num} elements long, for {num_tokens} tokens (sampling_params.logprobs)"
            require(num_given == num, f"{self._field}.{name}", f"{num_given} elements long", rule)
        return list(output.logprobs)


def _decode_again(
    token_ids: Sequence[int], tokenizer: Tokenizer, options: TextOptions
) -> tuple[OutputText, str, str | None, int]:
    """Make the text of tokens as it was made the first time, token by token.

    Returns: the decoder of further tokens, the text, the stop string that ended it if one did, and how many tokens
    were read until then.
    """
    decoder = OutputText(tokenizer, options)
    pieces: list[str] = []
    for num_read, token_id in enumerate(token_ids, 1):
        piece, stop_string = decoder.push(token_id)
        pieces.append(piece)
        if stop_string is not None:
            return decoder, "".join(pieces), stop_string, num_read
    return decoder, "".join(pieces), None, len(token_ids)


def _prompt_logprobs(message: pb.Continuation, engine: EngineRequest) -> tuple[list[float], Alternatives]:
    """Return the log-probabilities of the prompt that the client has."""
    given = message.prompt_logprobs
    width = engine.num_prompt_logprobs
    most = 0 if width == NO_LOGPROBS else len(engine.prompt_token_ids) - 1
    num = len(given.logprobs)
    field = f"{_FIELD}.prompt_logprobs"
    require(num <= most, f"{field}.logprobs", f"{num} elements long", f"at most {most} elements long")
    for name in ("alternative_token_ids", "alternative_logprobs"):
        num_given, wanted = len(getattr(given, name)), num * max(0, width)
        rule = f"{wanted} elements long, for {num} tokens (sampling_params.prompt_logprobs)"
        require(num_given == wanted, f"{field}.{name}", f"{num_given} elements long", rule)
    return list(given.logprobs), Alternatives(list(given.alternative_token_ids), list(given.alternative_logprobs))
