"""Check the numbers of `SamplingParams` against their table, and make the row that the sampler gets.

`request_validation.py` calls this.
"""

import secrets
from collections.abc import Mapping
from types import MappingProxyType

from octavo.generation.v1 import generation_pb2
from octavo.values.sampling_params_table import BEAMLESS_STAGES, BY_NAME, ROW_PARAMS
from octavo_shared.step_wire.sampling_row import SamplingRow
from scheduler_svc.front.api.request_limits import require_param

NO_DEFAULTS: Mapping[str, float] = MappingProxyType({})


def number(
    params: generation_pb2.SamplingParams, name: str, model_defaults: Mapping[str, float] = NO_DEFAULTS
) -> float | None:
    """Return a field's value; if it is unset, the model's default, else the table's.

    Raises: InvalidFieldError: it is out of the table's range.
    """
    parameter = BY_NAME[name]
    if not params.HasField(name):  # type: ignore[arg-type]
        return model_defaults.get(name, parameter.default)
    value: float = getattr(params, name)
    require_param(parameter.allows(value), name, value, parameter.limit)
    return value


def sampling_row(
    params: generation_pb2.SamplingParams,
    num_logprobs: int,
    model_defaults: Mapping[str, float] = NO_DEFAULTS,
    *,
    is_beam: bool = False,
) -> SamplingRow:
    """Return the numbers that the executor's sampler needs for output 0.

    Args:
        params: What the client asks for.
        num_logprobs: The row's.
        model_defaults: The model's defaults of unset fields, by name.
        is_beam: Whether the row is for beams, which sample nothing; their fields were checked.

    Raises: InvalidFieldError: the first number that is out of range.
    """
    values: dict[str, float] = {"num_logprobs": num_logprobs}
    for parameter in ROW_PARAMS:
        if parameter.is_public and not (is_beam and parameter.stage in BEAMLESS_STAGES):
            value = number(params, parameter.name, model_defaults)
            if value is not None:
                values[parameter.name] = value
    if not is_beam and "seed" not in values:
        values["seed"] = secrets.randbits(64)
    _check_min_tokens(params)
    return SamplingRow(**values)  # type: ignore[arg-type]


def _check_min_tokens(params: generation_pb2.SamplingParams) -> None:
    """Require that max_tokens leaves room for min_tokens."""
    if params.HasField("max_tokens"):
        rule = f"from 0 to {params.max_tokens} (max_tokens)"
        require_param(params.min_tokens <= params.max_tokens, "min_tokens", params.min_tokens, rule)
