"""Typed access to config.json, with errors that name the file and the field."""

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from octavo.values.wording import shown
from octavo_shared.errors import ModelLoadError, UnsupportedModelError

# More than any model has. Of the first ones something is made one by one as soon as config.json is read.
_LIMITS: Final = {
    10_000: (
        *("num_decoder_layers", "relative_attention_num_buckets", "relative_attention_max_distance"),
        *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "max_window_layers", "num_nextn_predict_layers"),
        *("num_attention_heads", "num_heads", "n_head", "n_heads", "num_key_value_heads", "num_global_key_value_heads"),
        *("linear_num_key_heads", "linear_num_value_heads", "n_group", "topk_group", "first_k_dense_replace"),
        *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "conv_L_cache", "conv_kernel"),
        *("mamba_n_heads", "mamba_n_groups", "mamba_d_head", "mamba_d_state", "mamba_d_conv", "mamba_expand"),
        *("mamba_num_heads", "n_groups", "mamba_head_dim", "ssm_state_size"),
        *(
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "num_experts_per_tok",
            "top_k_experts",
            "n_shared_experts",
        ),
    ),
    10_000_000: (
        *("hidden_size", "d_model", "n_embed", "head_dim", "global_head_dim", "rotary_dim", "intermediate_size"),
        *("d_ff", "d_kv"),
        *("moe_intermediate_size", "shared_intermediate_size", "shared_expert_intermediate_size", "ffn_dim"),
        *("moe_shared_expert_intermediate_size", "hidden_size_per_layer_input", "block_ff_dim", "block_multiple_of"),
        *("vocab_size", "type_vocab_size", "num_labels"),
    ),
    100_000_000: (
        "sliding_window",
        *("max_position_embeddings", "max_seq_len", "seq_length", "n_positions", "original_max_position_embeddings"),
    ),
}
MOST: Final[Mapping[str, int]] = MappingProxyType({name: most for most, names in _LIMITS.items() for name in names})


def refuse_absurd_numbers(values: Mapping[str, object], source: Path) -> None:
    """Refuse a model with impossibly large numbers, in any object of config.json, before memory is taken for them.

    Raises: ModelLoadError: it has.
    """
    unread: list[tuple[str, Mapping[str, object]]] = [("", values)]
    while unread:
        prefix, fields = unread.pop()
        for name, value in fields.items():
            if isinstance(value, int | float) and value > MOST.get(name, math.inf):
                raise ModelLoadError(f"{source} has {shown(prefix + name)} {value}; at most {MOST[name]} are supported")
            if isinstance(value, dict):
                unread.append((f"{prefix}{name}.", value))


class ConfigFields:
    """A JSON object; null means absent. Every getter raises ModelLoadError for a value of the wrong type.

    Args:
        values: The object.
        source: The file, for error messages.
        prefix: What stands before the names in error messages, for an object in an object.
    """

    def __init__(self, values: Mapping[str, object], source: Path, prefix: str = "") -> None:
        self.values = values
        self.source = source
        self._prefix = prefix

    @property
    def architecture(self) -> str:
        """The architecture that config.json names."""
        architectures = self.values.get("architectures")
        if not isinstance(architectures, list) or not architectures:
            raise ModelLoadError(f"{self.source} has no architecture")
        return str(architectures[0])

    def with_defaults(self, defaults: Mapping[str, object]) -> "ConfigFields":
        """Return the same with values where there are none, as transformers' configuration of the family has them."""
        known = {name: value for name, value in self.values.items() if value is not None}
        if known.keys() & {"rope_parameters", "rope_scaling", "rope_theta"}:
            defaults = {name: value for name, value in defaults.items() if name != "rope_parameters"}
        return ConfigFields({**self.values, **defaults, **known}, self.source, self._prefix)

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a whole number of at least `least`."""
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ModelLoadError(
                f"{self._describe(name)} {shown(repr(value))}; it must be a whole number of at least {least}"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number above 0."""
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise ModelLoadError(f"{self._describe(name)} {shown(repr(value))}; it must be a number above 0")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ModelLoadError(f"{self._describe(name)} {shown(repr(value))}; it must be true or false")
        return value

    def nested(self, name: str) -> "ConfigFields":
        """Return the fields of an object in this one; an absent one has none."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise ModelLoadError(f"{self._describe(name)} {shown(repr(value))}; it must be an object")
        return ConfigFields(value or {}, self.source, f"{self._prefix}{name}.")

    def optional_integer(self, name: str) -> int | None:
        """Return a whole number above 0, or None if it is absent."""
        return None if self.values.get(name) is None else self.integer(name)

    def optional_number(self, name: str) -> float | None:
        """Return a number above 0, or None if it is absent."""
        return None if self.values.get(name) is None else self.number(name)

    def refuse(self, names: Mapping[str, object]) -> None:
        """Refuse a model with other settings; transformers' code may run it.

        Args:
            names: Settings that are not read, each with the value that changes nothing; absent ones change nothing
                either.

        Raises: UnsupportedModelError: a setting has another value.
        """
        for name, harmless in names.items():
            value = self.values.get(name)
            if value is not None and value != harmless:
                raise UnsupportedModelError(f"{self._describe(name)} {value!r}, which is not supported")

    def _describe(self, name: str) -> str:
        return f"{self.source} has {self._prefix}{name}"

    def _get(self, name: str, default: float | None) -> object:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelLoadError(f"{self.source} has no {self._prefix}{name}")
        return value
