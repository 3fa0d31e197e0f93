"""From a config.json to what an encoder is: BERT, and RoBERTa with XLM-R, whose layers are the same.

Sources: Devlin et al. 2019, "BERT"; Liu et al. 2019, "RoBERTa"; Conneau et al. 2020, "XLM-R".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from executor_svc.checkpoint.quantized import refuse_quantized
from executor_svc.models.config import Activation
from executor_svc.models.fields import ConfigFields, refuse_absurd_numbers
from octavo_shared.errors import ModelLoadError, UnsupportedModelError

# "model": hidden states alone; "masked": a head for words, which is not used; "scores": a head with scores.
Purpose = Literal["model", "masked", "scores"]
_SUFFIXES: Final[Mapping[str, Purpose]] = MappingProxyType(
    {"ForSequenceClassification": "scores", "ForMaskedLM": "masked", "Model": "model"}
)
# Families with code of our own, and families that transformers runs.
OWN_FAMILIES = ("Bert", "Roberta", "XLMRoberta")
OTHER_FAMILIES = ("DistilBert", "MPNet", "ModernBert")

_ACTIVATIONS: Final[Mapping[str, Activation]] = MappingProxyType(
    {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "silu": "silu"}
)


@dataclass(frozen=True, slots=True)
class EncoderKind:
    """What config.json calls an encoder."""

    family: str
    purpose: Purpose

    @property
    def is_own(self) -> bool:
        """Whether there is code of our own for it."""
        return self.family in OWN_FAMILIES


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The sizes of an encoder of ours.

    Attributes:
        position_offset: Row of the position embeddings that belongs to the first token.
        padding_id: Token that has no position, and gets the row before the first; None: there is none.
        max_positions: Longest text in tokens.
        num_scores: Of the head; 0: there is none.
        has_pooler: Whether the head stands on BERT's pooler; RoBERTa's has its own layer.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    num_positions: int
    position_offset: int
    padding_id: int | None
    num_token_types: int
    epsilon: float
    activation: Activation
    prefix: str
    num_scores: int
    has_pooler: bool

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        return self.hidden_size // self.num_heads

    @property
    def max_positions(self) -> int:
        """Longest text in tokens."""
        return self.num_positions - self.position_offset


def encoder_kind(values: Mapping[str, object]) -> EncoderKind | None:
    """Return which encoder a config.json describes; None: it describes no encoder."""
    architectures = values.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    for suffix, purpose in _SUFFIXES.items():
        family = name.removesuffix(suffix)
        if family != name and family in (*OWN_FAMILIES, *OTHER_FAMILIES):
            return EncoderKind(family, purpose)
    return None


def read_encoder_config(values: Mapping[str, object], source: Path, kind: EncoderKind) -> EncoderConfig:
    """Read the contents of a config.json.

    Raises:
        UnsupportedModelError: a value asks for what our code does not have.
        ModelLoadError: a value is missing or has the wrong type, or the weights are quantized.
    """
    refuse_quantized(values, source)
    refuse_absurd_numbers(values, source)
    fields = ConfigFields(values, source)
    fields.refuse({"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False})
    activation = values.get("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        raise UnsupportedModelError(f"{source} has hidden_act {activation!r}, which is not supported")
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise ModelLoadError(f"{source} has hidden_size {hidden_size}, which {num_heads} heads do not divide")
    is_bert = kind.family == "Bert"
    padding_id = None if is_bert else fields.integer("pad_token_id", 1, least=0)
    return EncoderConfig(
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        num_positions=fields.integer("max_position_embeddings"),
        position_offset=0 if padding_id is None else padding_id + 1,
        padding_id=padding_id,
        num_token_types=fields.integer("type_vocab_size", 2),
        epsilon=fields.number("layer_norm_eps", 1e-12),
        activation=_ACTIVATIONS[str(activation)],
        prefix="bert." if is_bert else "roberta.",
        num_scores=num_labels(fields) if kind.purpose == "scores" else 0,
        has_pooler=is_bert,
    )


def num_labels(fields: ConfigFields) -> int:
    """Return how many scores a classification head has, as transformers counts them."""
    labels = fields.values.get("id2label")
    return len(labels) if isinstance(labels, dict) and labels else fields.integer("num_labels", 2)
