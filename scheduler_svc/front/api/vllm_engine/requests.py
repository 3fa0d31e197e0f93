"""Requests in: `vllm.grpc.engine.GenerateRequest` to `octavo.generation.v1.GenerateRequest`.

Every field is carried, or refused with a sentence (unknown ones before, by `message_scan.py`); none is ignored but
what is said here to mean nothing for tokens. GenerationService checks the ranges: its fields have the same names.
docs/openai.md has the table.
"""

from collections.abc import Iterable

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from octavo.generation.v1 import generation_pb2, generation_service_pb2
from scheduler_svc.front.api.message_scan import CountLimit
from scheduler_svc.front.api.request_counts import generate_request_limits
from scheduler_svc.front.api.request_limits import RequestLimits, require, require_param
from shared.errors import InvalidFieldError
from shared.sampling_parameters import INT32_MAX, SAMPLING_PARAMETERS

# What OpenAI's API allows for `n`.
MAX_EQUAL_OUTPUTS = 128

# -1 in the unsigned field: off, as in vLLM's own API.
TOP_K_OFF = 2**32 - 1

UINT64_MASK = 2**64 - 1

UNSUPPORTED = "unset: this release does not support it"

# Fields of a request that stand for what the scheduler cannot do. `data_parallel_rank` is checked by itself.
UNSUPPORTED_FIELDS = (
    "kv_transfer_params",
    "kv_transfer_params_json",
    "mm_inputs",
    "media_refs",
)


def generation_request(request: pb.GenerateRequest, tenant: str) -> generation_service_pb2.GenerateRequest:
    """Return the request for GenerationService, of `tenant`; a greedy one has one output, see `num_equal_outputs`.

    `tokenized.original_text` is not read: it is the text of the same tokens.

    Raises: InvalidFieldError: a field is set that the scheduler cannot honour.
    """
    for field in UNSUPPORTED_FIELDS:
        require(not request.HasField(field), field, "set", UNSUPPORTED)
    require(not request.extra_mm_inputs, "extra_mm_inputs", "set", UNSUPPORTED)
    require(request.data_parallel_rank == 0, "data_parallel_rank", request.data_parallel_rank, "0 or unset")
    octavo_request = generation_service_pb2.GenerateRequest(
        request_id=request.request_id, sampling_params=_sampling_params(request.sampling_params), tenant=tenant
    )
    if request.WhichOneof("input") == "text":
        rule = "unset with text: send tokenized, since their positions are those of its tokens"
        has_prompt_logprobs = request.sampling_params.HasField("prompt_logprobs")
        require_param(not has_prompt_logprobs, "prompt_logprobs", request.sampling_params.prompt_logprobs, rule)
        octavo_request.text = request.text
    else:
        octavo_request.token_ids.ids.extend(_int32s("tokenized.input_ids", request.tokenized.input_ids))
    return octavo_request


def engine_request_limits(limits: RequestLimits) -> dict[str, CountLimit]:
    """Return how many elements the repeated fields may have, by path; GenerationService has the same limits."""
    octavo_limits = generate_request_limits(limits)
    return {
        "tokenized.input_ids": octavo_limits["token_ids.ids"],
        **{
            f"sampling_params.{name}": octavo_limits[f"sampling_params.{name}"]
            for name in ("stop", "stop_token_ids", "logit_bias")
        },
    }


def num_equal_outputs(params: pb.SamplingParams) -> int:
    """Return how often the one output of GenerationService is the answer: `n` of a greedy request, else 1.

    A greedy request has n equal outputs. GenerationService refuses to compute them n times.

    Raises: InvalidFieldError: a greedy request wants too many.
    """
    if not _is_greedy(params) or params.n <= 1:
        return 1
    require_param(params.n <= MAX_EQUAL_OUTPUTS, "n", params.n, f"from 1 to {MAX_EQUAL_OUTPUTS} with temperature 0")
    return params.n


def _sampling_params(params: pb.SamplingParams) -> generation_pb2.SamplingParams:
    """Return the parameters for GenerationService.

    Fields without presence say with 0 that they are unset. `spaces_between_special_tokens` is not read: it
    says how tokens become text, which is the gateway's business.
    """
    _refuse_unsupported(params)
    octavo_params = generation_pb2.SamplingParams(
        top_k=0 if params.top_k == TOP_K_OFF else params.top_k,
        top_p=params.top_p or 1.0,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty or 1.0,
        min_tokens=params.min_tokens,
        stop=params.stop,
        stop_token_ids=_int32s("sampling_params.stop_token_ids", params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        n=1 if num_equal_outputs(params) > 1 else params.n or 1,
        logit_bias=[
            generation_pb2.LogitBias(token_id=token_id, bias=bias)
            for token_id, bias in sorted(params.logit_bias.items())
        ],
    )
    if params.HasField("temperature"):
        octavo_params.temperature = params.temperature
    for parameter in SAMPLING_PARAMETERS:
        # OpenAI's defaults, not the model's: of most fields this protocol cannot say that they are unset.
        if parameter.may_model_set and not octavo_params.HasField(parameter.name):  # type: ignore[arg-type]
            setattr(octavo_params, parameter.name, parameter.default)
    if params.HasField("max_tokens"):
        octavo_params.max_tokens = params.max_tokens
    if params.HasField("seed"):
        octavo_params.seed = params.seed & UINT64_MASK  # a negative seed is as good as any
    for field in ("logprobs", "prompt_logprobs"):
        if params.HasField(field):
            number = getattr(params, field)
            require_param(number >= 0, field, number, "0 or more: log-probabilities of all tokens are not returned")
            setattr(octavo_params, field, number)
    return octavo_params


def _refuse_unsupported(params: pb.SamplingParams) -> None:
    constraint = params.WhichOneof("constraint")
    if constraint is not None:
        raise InvalidFieldError(
            f"sampling_params.{constraint}", "set", "unset: this release does not constrain what the model writes"
        )
    rule = "unset: there is no constraint"
    require_param(not params.grammar_from_first_token, "grammar_from_first_token", "true", rule)
    rule = "unset: a prompt that is too long is refused, never cut"
    is_set = params.HasField("truncate_prompt_tokens")
    require_param(not is_set, "truncate_prompt_tokens", params.truncate_prompt_tokens, rule)


def _is_greedy(params: pb.SamplingParams) -> bool:
    return params.HasField("temperature") and params.temperature == 0


def _int32s(field: str, values: Iterable[int]) -> list[int]:
    """Return unsigned ids as a list that fits the field of GenerationService, whose range is smaller."""
    ids = list(values)
    largest = max(ids, default=0)
    require(largest <= INT32_MAX, field, f"a list with token id {largest}", "ids of the vocabulary")
    return ids
