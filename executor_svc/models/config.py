"""config.json of a Llama-family model as a checked value.

Read by hand and not by transformers: importing that takes seconds, and every setting that would
change the numbers must be known here or refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from executor_svc.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `scaling` None: plain frequencies."""

    theta: float
    scaling: "Llama3Scaling | None" = None


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Stretches the slow rotary frequencies, as Llama 3.1 does for contexts beyond its training."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the model needs to know of config.json; names as there."""

    source: Path  # the file, for error messages
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool


def parse_config(values: Mapping[str, object], source: Path) -> ModelConfig:
    """Check the contents of config.json; defaults are those of transformers' LlamaConfig.

    Raises: ModelLoadError: a value is missing, has the wrong type, or asks for what is not supported.
    """
    fields = _Fields(values, source)
    architectures = values.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ModelLoadError(f"{source} names no architecture")
    _refuse_unsupported(values, source)
    hidden_size = fields.integer("hidden_size")
    num_attention_heads = fields.integer("num_attention_heads")
    num_key_value_heads = fields.integer("num_key_value_heads", num_attention_heads)
    if num_attention_heads % num_key_value_heads:
        raise ModelLoadError(
            f"{source} has {num_attention_heads} attention heads, not a multiple of {num_key_value_heads} KV heads"
        )
    head_dim = fields.integer("head_dim", hidden_size // num_attention_heads)
    if head_dim % 2:
        raise ModelLoadError(f"{source} has head_dim {head_dim}; rotary embedding needs an even one")
    max_position_embeddings = fields.integer("max_position_embeddings", 2048)
    return ModelConfig(
        source=source,
        architecture=str(architectures[0]),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=fields.integer("num_hidden_layers"),
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_parse_rope(values, source, max_position_embeddings),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
    )


class _Fields:
    """Typed access to a JSON object, with errors that name file and field. null means absent."""

    def __init__(self, values: Mapping[str, object], source: Path) -> None:
        self._values = values
        self._source = source

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelLoadError(f"{self._source} has {name} {value!r}; it must be a whole number above 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ModelLoadError(f"{self._source} has {name} {value!r}; it must be a number above 0")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._get(name, False)
        if not isinstance(value, bool):
            raise ModelLoadError(f"{self._source} has {name} {value!r}; it must be true or false")
        return value

    def _get(self, name: str, default: float | None) -> object:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelLoadError(f"{self._source} has no {name}")
        return value


def _refuse_unsupported(values: Mapping[str, object], source: Path) -> None:
    if values.get("hidden_act", "silu") != "silu":
        raise ModelLoadError(f"{source} has hidden_act {values['hidden_act']!r}; only 'silu' is supported")
    for name in ("quantization_config", "sliding_window"):
        if values.get(name) is not None:
            raise ModelLoadError(f"{source} has a {name}, which is not supported")


def _parse_rope(values: Mapping[str, object], source: Path, max_position_embeddings: int) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ModelLoadError(f"{source} has rope parameters {parameters!r}; they must be an object")
    fields = _Fields({"rope_theta": values.get("rope_theta"), **parameters}, source)
    theta = fields.number("rope_theta", 10_000.0)
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if parameters.get("partial_rotary_factor", 1.0) != 1.0 or rope_type not in ("default", "llama3"):
        raise ModelLoadError(f"{source} has rope parameters {parameters!r}; supported types are default and llama3")
    if rope_type == "default":
        return RopeConfig(theta)
    scaling = Llama3Scaling(
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_max_position_embeddings=fields.integer("original_max_position_embeddings", max_position_embeddings),
    )
    return RopeConfig(theta, scaling)
