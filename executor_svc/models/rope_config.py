"""The rotary embedding in config.json: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`."""

from executor_svc.models.config import LinearScaling, Llama3Scaling, RopeConfig
from executor_svc.models.fields import ConfigFields
from shared.errors import ModelLoadError, UnsupportedModelError


def read_rope(fields: ConfigFields, max_position_embeddings: int, *, layer_type: str = "") -> RopeConfig:
    """Read the rotary embedding.

    Args:
        fields: config.json.
        max_position_embeddings: Of the model.
        layer_type: Which one, in a model with several.

    Raises: UnsupportedModelError: its type is not one of default, linear and llama3, or it leaves out dimensions.
    """
    parameters = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    if isinstance(parameters, dict) and layer_type in parameters:
        parameters = parameters[layer_type]
    if not isinstance(parameters, dict):
        raise ModelLoadError(f"{fields.source} has rope parameters {parameters!r}; they must be an object")
    fields.refuse({"partial_rotary_factor": 1.0})
    rope = ConfigFields({"rope_theta": fields.values.get("rope_theta"), **parameters}, fields.source)
    theta = rope.number("rope_theta", 10_000.0)
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    part = "" if parameters.get("partial_rotary_factor", 1.0) == 1.0 else ", of a part of the head"
    if part or rope_type not in ("default", "linear", "llama3"):
        raise UnsupportedModelError(
            f"{fields.source} has a rotary embedding of type {rope_type}{part}; supported are default, linear and "
            "llama3, of the whole head"
        )
    if rope_type == "default":
        return RopeConfig(theta)
    if rope_type == "linear":
        return RopeConfig(theta, LinearScaling(rope.number("factor")))
    scaling = Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings", max_position_embeddings),
    )
    return RopeConfig(theta, scaling)
