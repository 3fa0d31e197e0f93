"""An encoder of BERT's kind in the C library: BERT, and RoBERTa with XLM-R, whose layers are the same.

Every token attends to all tokens of its text. A layer norms what the residual stream is, not what goes into a part of
it ("post-norm"):

    stream = norm(stream + attention(stream))
    stream = norm(stream + mlp(stream))

So the segments of `dense.py` hold here too, with norms that write the stream (`is_post_norm` of layers.h). No sum
depends on the other texts of a step.

Sources: Devlin et al. 2019, "BERT"; Liu et al. 2019, "RoBERTa"; Conneau et al. 2020, "XLM-R".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

import numpy as np
import torch

from executor_svc.attention.interface import AttentionLayer
from executor_svc.attention.native_backend import NativeAttentionPlan
from executor_svc.checkpoint.model_files import refuse_quantized
from executor_svc.checkpoint.weight_map import WeightMap, WeightSource
from executor_svc.models.config import Activation
from executor_svc.models.dense import LayerEnd, Mlp, Norm
from executor_svc.models.families.common import read_activation
from executor_svc.models.fields import ConfigFields, refuse_absurd_numbers
from executor_svc.models.native_dense import NativeDense, NativeLastSegment, NativeSegment
from executor_svc.models.pooling import ScratchCache, positions_of, text_rows
from executor_svc.native.library import NativeLibrary
from executor_svc.native.matrix import PackedMatrix
from executor_svc.native.structs import NumberFormat
from octavo_shared.errors import ModelLoadError
from octavo_shared.step_wire.step import Float32Array, Int32Array, PoolingInput

# "model": hidden states alone; "masked": a head for words, which is not used; "scores": a head with scores.
Purpose = Literal["model", "masked", "scores"]
_SUFFIXES: Final[Mapping[str, Purpose]] = MappingProxyType(
    {"ForSequenceClassification": "scores", "ForMaskedLM": "masked", "Model": "model"}
)
# Families with code of our own, and families that transformers runs.
OWN_FAMILIES = ("Bert", "Roberta", "XLMRoberta")
OTHER_FAMILIES = ("DistilBert", "MPNet", "ModernBert")


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
    activation = read_activation(fields, "gelu")
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
        activation=activation,
        prefix="bert." if is_bert else "roberta.",
        num_scores=num_labels(fields) if kind.purpose == "scores" else 0,
        has_pooler=is_bert,
    )


def num_labels(fields: ConfigFields) -> int:
    """Return how many scores a classification head has, as transformers counts them."""
    labels = fields.values.get("id2label")
    return len(labels) if isinstance(labels, dict) and labels else fields.integer("num_labels", 2)


# A multiple of the lanes of every processor: keys are read in place.
_BLOCK_SIZE = 16

_HEADS = ("pooler.", "cls.", "lm_head.", "classifier.")


class Encoder:
    """An encoder with uninitialised weights; `load` fills them. Embeddings stay in float32 in every number format."""

    def __init__(
        self, config: EncoderConfig, library: NativeLibrary, number_format: NumberFormat, *, in_bfloat16: bool
    ) -> None:
        self.config = config
        self._library = library
        self._map = WeightMap()
        kernels = NativeDense(library, number_format=number_format)
        size, inner, prefix = config.hidden_size, config.intermediate_size, config.prefix
        self._tokens = self._embedding("word_embeddings", config.vocab_size)
        self._positions = self._embedding("position_embeddings", config.num_positions)
        self._types = self._embedding("token_type_embeddings", config.num_token_types)
        norm = self._norm(f"{prefix}embeddings.LayerNorm")
        self._segments: list[NativeSegment] = []
        end: LayerEnd[PackedMatrix] | None = None
        for index in range(config.num_layers):
            layer = f"{prefix}encoder.layer.{index}."
            qkv = kernels.matrix(size, [size] * 3, has_bias=True, role="qkv")
            self._matrix([f"{layer}attention.self.{part}" for part in ("query", "key", "value")], qkv, size)
            self._segments.append(NativeSegment(library, end, norm, qkv, is_post_norm=True))
            output = self._dense(f"{layer}attention.output.dense", kernels, size, size)
            mlp_norm = self._norm(f"{layer}attention.output.LayerNorm")
            up = self._dense(f"{layer}intermediate.dense", kernels, size, inner)
            down = self._dense(f"{layer}output.dense", kernels, inner, size)
            mlp = Mlp(None, up, down, config.activation)
            end = LayerEnd(output, None, mlp_norm, mlp, None)
            norm = self._norm(f"{layer}output.LayerNorm")
        assert end is not None, "a model has layers"
        self._last_segment = NativeLastSegment(library, end, norm)
        self.head: tuple[PackedMatrix, PackedMatrix] | None = None  # a layer under tanh, and what makes scores of it
        if config.num_scores:
            of_roberta = "classifier.dense", "classifier.out_proj"
            first, second = (f"{prefix}pooler.dense", "classifier") if config.has_pooler else of_roberta
            self.head = self._dense(first, kernels, size, size), self._dense(second, kernels, size, config.num_scores)
        self._layer = AttentionLayer(scale=config.head_dim**-0.5)
        self._in_bfloat16 = in_bfloat16
        dtype = torch.bfloat16 if in_bfloat16 else torch.float32
        self._cache = ScratchCache(
            _BLOCK_SIZE, config.num_heads, config.head_dim, dtype=dtype, device=torch.device("cpu")
        )

    def load(self, checkpoint: WeightSource) -> None:
        """Fill the weights. Raises: ModelLoadError: see `Checkpoint.load_into`."""
        checkpoint.load_into(self._map.targets, self._is_redundant, self.config.prefix)

    @torch.inference_mode()
    def encode(self, texts: Sequence[PoolingInput]) -> Float32Array:
        """Return the hidden states of the tokens of some texts, one text after the other, [num_tokens, hidden_size]."""
        rows = text_rows([len(text.token_ids) for text in texts], _BLOCK_SIZE, torch.device("cpu"))
        cache = self._cache.of_size(rows)
        plan = NativeAttentionPlan(self._library, rows, in_bfloat16=self._in_bfloat16, is_full=True)
        residual = self._embed(texts, rows.lengths)
        attended: torch.Tensor | None = None
        for segment in self._segments:
            qkv = segment(attended, residual).view(len(residual), -1, self.config.head_dim)
            attended = plan.attend(qkv, None, cache, self._layer)
        assert attended is not None, "a model has layers"
        self._last_segment(attended, residual)
        hidden: Float32Array = residual.numpy()
        return hidden

    def _embed(self, texts: Sequence[PoolingInput], lengths: Int32Array) -> torch.Tensor:
        """Return the sum of the embeddings of tokens, types and positions, as transformers adds them."""
        token_ids = np.concatenate([text.token_ids for text in texts])
        types = np.frombuffer(b"".join(text.token_type_ids or bytes(len(text.token_ids)) for text in texts), np.uint8)
        positions = positions_of(lengths) + self.config.position_offset
        if self.config.padding_id is not None and (token_ids == self.config.padding_id).any():
            positions = np.concatenate([_positions_without(text.token_ids, self.config.padding_id) for text in texts])
        embedded = self._tokens[_index(token_ids)]
        embedded += self._types[_index(types)]
        embedded += self._positions[_index(positions)]
        return embedded

    def _is_redundant(self, name: str) -> bool:
        """Whether a checkpoint may hold the tensor `name` although nothing uses it."""
        name = name.removeprefix(self.config.prefix)
        return name.startswith(_HEADS) or name.endswith("embeddings.position_ids")

    def _embedding(self, name: str, num_rows: int) -> torch.Tensor:
        table = torch.empty(num_rows, self.config.hidden_size)
        self._map.add(f"{self.config.prefix}embeddings.{name}.weight", tuple(table.shape), table)
        return table

    def _norm(self, name: str) -> Norm:
        weight, bias = torch.empty(self.config.hidden_size), torch.empty(self.config.hidden_size)
        self._map.add(f"{name}.weight", tuple(weight.shape), weight)
        self._map.add(f"{name}.bias", tuple(bias.shape), bias)
        return Norm(weight, bias, self.config.epsilon, is_layer_norm=True)

    def _dense(self, name: str, kernels: NativeDense, num_inputs: int, num_outputs: int) -> PackedMatrix:
        matrix = kernels.matrix(num_inputs, [num_outputs], has_bias=True)
        self._matrix([name], matrix, num_outputs)
        return matrix

    def _matrix(self, names: Sequence[str], matrix: PackedMatrix, num_outputs: int) -> None:
        """Say which tensors of a checkpoint are the parts of a matrix."""
        for name, weight, bias in zip(names, matrix.weights, matrix.biases, strict=True):
            self._map.add(f"{name}.weight", (num_outputs, matrix.num_inputs), weight)
            self._map.add(f"{name}.bias", (num_outputs,), bias)


def _positions_without(token_ids: Int32Array, padding_id: int) -> Int32Array:
    """Return the rows of position embeddings of a text with padding in it, as RoBERTa counts them."""
    is_counted = token_ids != padding_id
    positions: Int32Array = (np.cumsum(is_counted) * is_counted + padding_id).astype(np.int32)
    return positions


def _index(numbers: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(numbers.astype(np.int64))
