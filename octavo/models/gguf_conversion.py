"""Turns a GGUF file of the Llama family into an ordinary Hugging Face directory.

Owns the mapping of configuration fields and tensors; `gguf_tokenizer.py` writes the tokenizer files. The tensors are
de-quantized a few rows at a time, so that memory stays small whatever the size of the model. Only what the demo model
needs is understood; the rest is refused by name.

The libraries of the extra `octavo[demo]` are imported inside the functions: `octavo.cli` must start without them.
Sources: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and
https://huggingface.co/docs/safetensors/index#format.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from octavo.models.gguf_metadata import GGUFMetadata
from octavo.models.gguf_tokenizer import write_tokenizer_files
from octavo.models.progress import ModelPrepareError, ProgressCallback

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from gguf import GGUFReader, ReaderTensor

MODEL_FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""The files of a converted model."""

_GLOBAL_TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FLOAT32_BYTES = 4
_CHUNK_BYTES = 8 << 20  # of float32 output: small beside a model, large beside the cost of a call


def convert_gguf(
    gguf_file: Path,
    directory: Path,
    progress: ProgressCallback,
    generation: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Write `MODEL_FILES` made from `gguf_file` into the existing `directory`.

    The weights are the GGUF's own, quantized numbers written out as float32. `generation` goes into
    generation_config.json beside the special tokens: a GGUF file says nothing of sampling.

    Raises:
        ModelPrepareError: It is no GGUF file, or has an architecture or a layout that is not understood.
    """
    from gguf import GGUFReader

    progress("Reading the GGUF file", 0, None)
    try:
        reader = GGUFReader(gguf_file)
    except ValueError as error:
        raise ModelPrepareError(f"{gguf_file.name} is not a readable GGUF file: {error}") from error
    metadata = GGUFMetadata(reader)
    config = build_config(metadata, tie_word_embeddings=_is_tied(reader))
    # The weights go last: whatever is refused is refused before the long part.
    tensors = [_plan_tensor(tensor, metadata) for tensor in reader.tensors]
    write_tokenizer_files(metadata, directory)
    _write_json(directory / "config.json", config)
    token_ids = {key: value for key, value in config.items() if key.endswith("_token_id")}
    _write_json(directory / "generation_config.json", {**token_ids, **generation})
    _write_safetensors(directory / "model.safetensors", tensors, progress)


def build_config(metadata: GGUFMetadata, *, tie_word_embeddings: bool) -> Mapping[str, object]:
    """Build the content of config.json, as transformers 5 writes it.

    Raises:
        ModelPrepareError: The architecture is not Llama, the rotary embedding is scaled, or a field is missing.
    """
    architecture = metadata.text("general.architecture")
    if architecture != "llama":
        raise ModelPrepareError(f"the GGUF file has the architecture {architecture!r}; only 'llama' is supported")
    if metadata.has("llama.rope.scaling.type"):
        raise ModelPrepareError("the GGUF file scales its rotary embedding, which is not supported")
    hidden_size = metadata.integer("llama.embedding_length")
    num_heads = metadata.integer("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": metadata.integer("tokenizer.ggml.bos_token_id"),
        "dtype": "float32",
        "eos_token_id": metadata.integer("tokenizer.ggml.eos_token_id"),
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": metadata.integer("llama.feed_forward_length"),
        "max_position_embeddings": metadata.integer("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": num_heads,
        "num_hidden_layers": metadata.integer("llama.block_count"),
        "num_key_value_heads": metadata.integer("llama.attention.head_count_kv"),
        "pad_token_id": metadata.integer("tokenizer.ggml.padding_token_id"),
        "pretraining_tp": 1,
        "rms_norm_eps": metadata.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_theta": metadata.number("llama.rope.freq_base"), "rope_type": "default"},
        "tie_word_embeddings": tie_word_embeddings,
        "use_cache": True,
        "vocab_size": metadata.integer("llama.vocab_size"),
    }


@dataclass(frozen=True, slots=True)
class _TensorPlan:
    """One tensor on its way from GGUF to safetensors.

    Attributes:
        name: Name in the Hugging Face model.
        shape: Shape in the Hugging Face model, outermost dimension first.
        source: The tensor in the GGUF file.
        num_rotary_heads: Heads whose rows GGUF permuted for its rotary embedding; 0 for none.
    """

    name: str
    shape: tuple[int, ...]
    source: "ReaderTensor"
    num_rotary_heads: int

    @property
    def num_bytes(self) -> int:
        """Size in float32."""
        return math.prod(self.shape) * _FLOAT32_BYTES

    def float32_chunks(self) -> "Iterator[npt.NDArray[np.float32]]":
        """Yield the values in order, some rows at a time."""
        from gguf.quants import dequantize

        rows = self.source.data  # [num_rows, num_quantized_bytes], or the values of a vector
        if self.num_rotary_heads:
            rows = rows[rotary_row_order(len(rows), self.num_rotary_heads)]
        num_rows = max(1, _CHUNK_BYTES * len(rows) // self.num_bytes)
        for start in range(0, len(rows), num_rows):
            yield dequantize(rows[start : start + num_rows], self.source.tensor_type)


def rotary_row_order(num_rows: int, num_heads: int) -> "npt.NDArray[np.intp]":
    """Return which row of a GGUF query or key projection each row of the Hugging Face one is.

    GGUF's `llama` rotates neighbours (0, 1), (2, 3) ... of a head; Hugging Face rotates (0, d/2), (1, d/2 + 1) ...
    The rows of a quantized matrix are independent of each other, so that whole rows can move before de-quantizing.
    """
    import numpy as np

    # [head, pair, member of the pair] -> [head, member of the pair, pair]
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _is_tied(reader: "GGUFReader") -> bool:
    """Say whether the head is the embedding: GGUF then stores no head."""
    return all(tensor.name != "output.weight" for tensor in reader.tensors)


def _plan_tensor(tensor: "ReaderTensor", metadata: GGUFMetadata) -> _TensorPlan:
    shape = tuple(int(size) for size in reversed(tensor.shape))
    if tensor.name in _GLOBAL_TENSOR_NAMES:
        return _TensorPlan(_GLOBAL_TENSOR_NAMES[tensor.name], shape, tensor, num_rotary_heads=0)
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
    if match is None or match[2] not in _LAYER_TENSOR_NAMES:
        raise ModelPrepareError(f"the GGUF file has a tensor {tensor.name!r}, which is not supported")
    name = f"model.layers.{match[1]}.{_LAYER_TENSOR_NAMES[match[2]]}.weight"
    head_counts = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    num_rotary_heads = metadata.integer(head_counts[match[2]]) if match[2] in head_counts else 0
    return _TensorPlan(name, shape, tensor, num_rotary_heads)


def _write_safetensors(path: Path, tensors: list[_TensorPlan], progress: ProgressCallback) -> None:
    """Write the tensors one after the other; the library's own writer would want all of them in memory at once."""
    from safetensors import safe_open

    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without a format
    num_bytes = 0
    for tensor in tensors:
        offsets = [num_bytes, num_bytes + tensor.num_bytes]
        header[tensor.name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": offsets}
        num_bytes += tensor.num_bytes
    encoded_header = json.dumps(header, separators=(",", ":")).encode()
    encoded_header += b" " * (-len(encoded_header) % 8)  # the data is to start at a multiple of eight bytes
    with path.open("wb") as file:
        file.write(len(encoded_header).to_bytes(8, "little"))
        file.write(encoded_header)
        num_written_bytes = 0
        for tensor in tensors:
            for chunk in tensor.float32_chunks():
                progress("Converting the weights", num_written_bytes, num_bytes)
                num_written_bytes += file.write(chunk.astype("<f4", copy=False).data)
        progress("Converting the weights", num_written_bytes, num_bytes)
    # The library that every reader uses checks the header against the size of the file.
    with safe_open(path, framework="numpy") as weights:
        assert set(weights.keys()) == {tensor.name for tensor in tensors}


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
