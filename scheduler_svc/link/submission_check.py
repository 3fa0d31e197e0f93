"""What the engine requires of a request that a front in another process has checked.

An executor refuses a whole step for one request that it cannot compute, and is lost. Here only that request is refused.
"""

from octavo_shared.errors import CallerError, InvalidStepError
from octavo_shared.grammar.grammar import MAX_GRAMMAR_BYTES
from octavo_shared.step_wire.request_check import (
    check_answerable,
    check_known_ids,
    check_number,
    check_rules,
    check_sampling,
)
from scheduler_svc.executors.client import MAX_SIZES
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.served_model import ServedModel


def check_size(num_sequences: int, beam_width: int) -> None:
    """Refuse more sequences than any executor has slots: for each one memory is set aside. Raises CallerError."""
    if max(num_sequences, beam_width) > MAX_SIZES["max_num_seqs"]:
        raise CallerError(f"front submitted {max(num_sequences, beam_width)} sequences; no executor has so many slots")


def check_submission(request: EngineRequest, model: ServedModel, max_model_len: int) -> None:
    """Refuse a request that was checked for a longest sequence, if an executor would refuse a step with it.

    Raises: CallerError: it would.
    """
    try:
        _check(request, model.info.vocab_size, max_model_len)
        if max(request.token_type_ids, default=0) >= model.info.num_token_types:
            raise InvalidStepError(
                f"request {request.request_id!r} has token type {max(request.token_type_ids)}; types are 0 to "
                f"{model.info.num_token_types - 1}"
            )
        _check_encoder_input(request, model)
    except InvalidStepError as error:
        raise CallerError(f"front submitted an invalid request: {error}") from error


def _check(request: EngineRequest, vocab_size: int, max_model_len: int) -> None:
    who, rules = f"request {request.request_id!r}", request.token_rules
    check_sampling(who, request.sampling)
    if request.sampling.num_candidates:  # the engine sets it, of beams
        raise InvalidStepError(f"{who} asks for candidates")
    check_number(who, "alternatives", request.sampling.num_logprobs, vocab_size)
    check_answerable(who, request.num_prompt_logprobs, rules)
    check_number(who, "alternatives", request.num_prompt_logprobs, vocab_size)
    if rules is not None:
        check_rules(who, rules, vocab_size)
    if request.grammar is not None:
        if request.beam_search is not None:
            raise InvalidStepError(f"{who} has a grammar and beams, which follow none")
        if (num_bytes := len(request.grammar.body)) > MAX_GRAMMAR_BYTES:
            raise InvalidStepError(f"{who} has a grammar of {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are taken")
    num_prompt_tokens = len(request.prompt_token_ids)
    if request.pooling is not None:
        _check_pooling(who, request, max_model_len)
    elif request.token_type_ids:
        raise InvalidStepError(f"{who} generates and has token types")
    if not num_prompt_tokens:
        raise InvalidStepError(f"{who} has no prompt")
    check_known_ids(who, request.prompt_token_ids, vocab_size)
    if request.pooling is not None:
        return
    longest = request.stop_conditions.length_limit(num_prompt_tokens, request.longest_sequence(max_model_len))
    lengths = [num_prompt_tokens]
    if request.continuation is not None and request.continuation.num_prompt_logprobs > num_prompt_tokens:
        raise InvalidStepError(f"{who} has more known prompt tokens than its prompt")
    for output in () if request.continuation is None else request.continuation.outputs:
        check_known_ids(who, output.token_ids, vocab_size)
        if output.finish_reason is None:
            lengths.append(num_prompt_tokens + len(output.token_ids))
    if max(lengths) >= longest:
        raise InvalidStepError(f"{who} has {max(lengths)} tokens, and one more is to come; it may have {longest}")


def _check_encoder_input(request: EngineRequest, model: ServedModel) -> None:
    """Refuse an input that the model's encoder cannot have, or none for it."""
    who, given, longest = f"request {request.request_id!r}", request.encoder_token_ids, model.info.max_encoder_tokens
    if (given is not None) != (longest > 0):
        raise InvalidStepError(f"{who} has {'an' if longest == 0 else 'no'} input for the encoder")
    if given is not None:
        if not 1 <= len(given) <= longest:
            raise InvalidStepError(f"{who} has {len(given)} encoder tokens; it may have 1 to {longest}")
        check_known_ids(who, given, model.info.vocab_size)


def _check_pooling(who: str, request: EngineRequest, max_model_len: int) -> None:
    """Refuse what a text that is computed whole cannot have."""
    if request.continuation is not None or request.grammar is not None or request.width != 1 or request.token_rules:
        raise InvalidStepError(f"{who} asks for a vector or scores, and for what only generated outputs have")
    num_tokens, num_types = len(request.prompt_token_ids), len(request.token_type_ids)
    if num_types not in (0, num_tokens):
        raise InvalidStepError(f"{who} has {num_types} token types for {num_tokens} tokens")
    if num_tokens > max_model_len:
        raise InvalidStepError(f"{who} has {num_tokens} tokens; it may have {max_model_len}")
