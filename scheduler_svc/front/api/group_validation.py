"""Check how many outputs a request wants, how its beams are searched, and for which tenant it runs.

That is n, best_of and the fields of beam search; priority, tenant and cache salt. Contradictions are refused with the
rule. `request_validation.py` calls this and checks the rest.
"""

import hashlib

from octavo.generation.v1 import generation_pb2, generation_service_pb2
from octavo.values.sampling_params_table import INT32_MAX, Stage, of_stage
from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.api.params_validation import number
from scheduler_svc.front.api.request_limits import RequestLimits, require, require_param
from scheduler_svc.request.engine_request import MAX_TENANT_LENGTH
from scheduler_svc.request.parameters import BeamSearchParams, EarlyStopping

MAX_CACHE_SALT_LENGTH = 256
CACHE_SALT_BYTES = 8

EARLY_STOPPING = {
    generation_pb2.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.FALSE,
    generation_pb2.EARLY_STOPPING_TRUE: EarlyStopping.TRUE,
    generation_pb2.EARLY_STOPPING_FALSE: EarlyStopping.FALSE,
    generation_pb2.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}


# The words of clients: of octavo.Client, and of transformers' generate().
EARLY_STOPPING_WORDS = {
    generation_pb2.EARLY_STOPPING_TRUE: "True",
    generation_pb2.EARLY_STOPPING_FALSE: "False",
    generation_pb2.EARLY_STOPPING_NEVER: "'never'",
}


def output_counts(params: generation_pb2.SamplingParams, limits: RequestLimits) -> tuple[int, int]:
    """Return how many outputs a sampled request returns (n) and makes (best_of).

    Raises: InvalidFieldError: a number is out of range, or the outputs would all be equal.
    """
    num_returned = params.n if params.HasField("n") else 1
    num_sampled = params.best_of if params.HasField("best_of") else num_returned
    most = f"{limits.max_num_seqs} (max_num_seqs: the outputs run at once)"
    require_param(1 <= num_returned <= limits.max_num_seqs, "n", num_returned, f"from 1 to {most}")
    rule = f"from {num_returned} (n) to {most}"
    require_param(num_returned <= num_sampled <= limits.max_num_seqs, "best_of", num_sampled, rule)
    if number(params, "temperature", limits.sampling_defaults) == 0:
        whose = "" if params.HasField("temperature") else ", this model's default"
        rule = f"1 with temperature 0{whose}, because greedy outputs are all equal: use a temperature above 0"
        require_param(num_returned == 1, "n", num_returned, rule)
        require_param(num_sampled == 1, "best_of", num_sampled, rule)
    return num_returned, num_sampled


def beam_search_params(params: generation_pb2.SamplingParams, limits: RequestLimits) -> BeamSearchParams | None:
    """Return the parameters of the beam search; None: the request is sampled.

    Raises: InvalidFieldError: a number is out of range, or a field is for sampling only.
    """
    width = params.beam_width
    if not width:
        _refuse_beam_fields(params)
        return None
    _refuse_sampling_fields(params)
    widest = min(limits.max_beam_width, limits.max_num_seqs)
    cause = "max_beam_width" if limits.max_beam_width <= limits.max_num_seqs else "max_num_seqs"
    rule = f"from 2 to {widest} ({cause}), or 0" if widest >= 2 else f"0: {cause} is {widest} on this server"
    require_param(2 <= width <= widest, "beam_width", width, rule)
    num_returned = params.n if params.HasField("n") else 1
    require_param(1 <= num_returned <= width, "n", num_returned, f"from 1 to {width} (beam_width)")
    penalty = number(params, "length_penalty")
    assert penalty is not None, "it has a default"
    early_stopping = EARLY_STOPPING.get(params.early_stopping)
    if early_stopping is None:
        rule = "True, False or 'never'"
        raise InvalidFieldError("sampling_params.early_stopping", params.early_stopping, rule)
    return BeamSearchParams(width, num_returned, penalty, early_stopping)


def _refuse_beam_fields(params: generation_pb2.SamplingParams) -> None:
    rule = "unset without beam_width"
    require_param(not params.HasField("length_penalty"), "length_penalty", params.length_penalty, rule)
    value = params.early_stopping
    require_param(not value, "early_stopping", EARLY_STOPPING_WORDS.get(value, value), rule)


def _refuse_sampling_fields(params: generation_pb2.SamplingParams) -> None:
    """Refuse fields that a beam search does not use, unless they have their neutral values."""
    for parameter in of_stage(Stage.FILTER):
        # The protos' own names: HasField takes no others.
        value = getattr(params, parameter.name) if params.HasField(parameter.name) else parameter.row_value  # type: ignore[arg-type]
        rule = f"{parameter.row_value:g} or unset with beam_width: a beam search does not sample"
        require_param(value == parameter.row_value, parameter.name, value, rule)
    rule = "0 or unset with beam_width: beams have no alternatives"
    require_param(params.logprobs == 0, "logprobs", params.logprobs, rule)
    rule = "unset with beam_width"
    require_param(not params.HasField("prompt_logprobs"), "prompt_logprobs", params.prompt_logprobs, rule)
    rule = f"{rule}: n is the number of hypotheses to return"
    require_param(not params.HasField("best_of"), "best_of", params.best_of, rule)
    rule = "empty with beam_width: beams have no text until the search is finished"
    require_param(not params.stop, "stop", f"a list of {len(params.stop)}", rule)


def check_account(
    request: generation_service_pb2.GenerateRequest
    | generation_service_pb2.EmbedRequest
    | generation_service_pb2.ScoreRequest,
    limits: RequestLimits,
) -> None:
    """Check priority, tenant and cache_salt. Raises InvalidFieldError: there is no such tenant, or no priorities."""
    require(limits.has_priorities or request.priority == 0, "priority", request.priority, priority_rule(limits))
    for field, text, longest in (
        ("tenant", request.tenant, MAX_TENANT_LENGTH),
        ("cache_salt", getattr(request, "cache_salt", ""), MAX_CACHE_SALT_LENGTH),
    ):
        shown = f"{len(text)} characters long"
        require(len(text) <= longest, field, shown, f"at most {longest} characters long")
    if limits.tenants is not None:
        # Tenants may not learn each other's names.
        rule = f"one of the {len(limits.tenants)} tenants configured on this server"
        require(request.tenant in limits.tenants, "tenant", request.tenant or "empty", rule)


def priority_rule(limits: RequestLimits) -> str:
    """Return what a priority must be."""
    return f"from {-INT32_MAX - 1} to {INT32_MAX}" if limits.has_priorities else "0: this server uses --policy fcfs"


def hash_cache_salt(tenant: str, cache_salt: str) -> int:
    """Return the unsigned 64-bit salt of a group's block hashes; 0 if tenant and salt are empty.

    Different pairs have different salts, so tenants never share cached blocks.
    """
    if not tenant and not cache_salt:
        return 0
    name = tenant.encode()
    # The length keeps ("ab", "c") apart from ("a", "bc").
    digest = hashlib.blake2b(len(name).to_bytes(8, "little") + name + cache_salt.encode(), digest_size=CACHE_SALT_BYTES)
    return int.from_bytes(digest.digest(), "little")
