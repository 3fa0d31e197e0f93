"""A GGUF file that is damaged, or says what cannot be, is refused in one sentence before a weight is loaded."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as FileType

from executor_svc.checkpoint.gguf.model import GGUFModel
from executor_svc.checkpoint.weight_map import Piece
from executor_svc.config import ExecutorConfig
from executor_svc.models.selection import choose_model
from octavo_shared.errors import ModelLoadError
from tests.numerics.architectures import save_tiny_architecture
from tests.support.each_row import each_row
from tests.support.gguf_files import TypeOf, of_type, write_gguf_of

Q8_0 = of_type(FileType.Q8_0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny"
    save_tiny_architecture(path, "LlamaForCausalLM", {"intermediate_size": 64})
    return path


def refused(path: Path, **settings: object) -> str:
    """Return the sentence that refuses a file; nothing of it has been put anywhere."""
    config = ExecutorConfig.model_validate({"model": str(path), "dtype": "float32", **settings})
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ModelLoadError) as caught:
        patch.setattr(Piece, "copy_from", lambda *_: pytest.fail("a weight is loaded"))
        model = GGUFModel(path)
        model.tokenizer_files()
        model.pooling()
        chosen = choose_model(model, config, torch.device("cpu"))
        chosen.load(model.checkpoint())
    return str(caught.value).replace(str(path.parent) + "/", "")


def spoiled(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def replaced(old: bytes, new: bytes) -> Callable[[Path], object]:
    return spoiled(lambda content: content.replace(old, new, 1))


def at(place: int, new: bytes) -> Callable[[Path], object]:
    return spoiled(lambda content: content[:place] + new + content[place + len(new) :])


def tensor_info(name: str, skipped: int, new: bytes) -> Callable[[Path], object]:
    """Change what stands so many bytes behind a tensor's name."""

    def change(content: bytes) -> bytes:
        place = content.index(name.encode()) + len(name) + skipped
        return content[:place] + new + content[place + len(new) :]

    return spoiled(change)


HUGE = (2**62).to_bytes(8, "little")
Q = "blk.0.attn_q.weight"  # two dimensions: their number, the sizes, the type, the offset


@each_row(
    (at(0, b"GGML"), "m.gguf is not a GGUF file: it does not begin with GGUF"),
    (spoiled(lambda content: b""), "m.gguf is not a GGUF file: it does not begin with GGUF"),
    (spoiled(lambda content: content[:6]), "m.gguf: its header goes on behind the end of the file"),
    (at(4, b"\0\0\0\3"), "m.gguf is a big-endian file; supported are the versions 2 and 3, little-endian"),
    (at(4, b"\1"), "m.gguf is GGUF version 1; supported are the versions 2 and 3"),
    (at(8, HUGE), "m.gguf: its header has 4611686018427387904 tensors, more than the file holds"),
    (at(16, HUGE), "m.gguf: its header has 4611686018427387904 values, more than the file holds"),
    (at(24, HUGE), "bytes of text, more than the file holds: it is truncated, or damaged"),
    (spoiled(lambda content: content[:200]), "it is truncated, or damaged"),
    (spoiled(lambda content: content[:-40]), ", but the file has "),
    (replaced(b"llama.block_count", b"llama.block_other"), "m.gguf has no llama.block_count"),
    (tensor_info(Q, 0, b"\5"), f"m.gguf: the tensor {Q} has 5 dimensions; 1 to 4 are possible"),
    (tensor_info(Q, 4, HUGE), f"m.gguf: the tensor {Q} ends at byte "),
    (tensor_info(Q, 4, b"\x21"), f"m.gguf: the tensor {Q} has the shape [32, 33]; rows of Q8_0 are multiples of 32"),
    (tensor_info(Q, 12, b"\0" * 8), f"m.gguf: the tensor {Q} has the shape [0, 32]"),
    (tensor_info(Q, 12, b"\x10"), f"m.gguf: the tensor {Q} has the shape [16, 32]; its metadata require [32, 32]"),
    (tensor_info(Q, 20, b"\x63"), f"m.gguf: the tensor {Q} has the type 99, which GGUF does not have"),
    (tensor_info(Q, 24, b"\x01"), f"m.gguf: the tensor {Q} begins at "),
    (tensor_info(Q, 24, b"\0" * 8), "lies over the tensor"),
    (tensor_info(Q, 24, HUGE), f"m.gguf: the tensor {Q} ends at byte "),
    (replaced(b"blk.1.attn_q.weight", b"blk.0.attn_q.weight"), f"m.gguf: the tensor {Q} stands there twice"),
    (replaced(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"), "the tensor blk.1.attn_q.weight is missing from m.gguf"),
)
def test_a_damaged_file_is_refused(
    spoil: Callable[[Path], object], sentence: str, *, directory: Path, tmp_path: Path
) -> None:
    path = write_gguf_of(directory, tmp_path / "m.gguf", Q8_0)
    spoil(path)

    assert sentence in refused(path)


def only(name: str, kind: FileType) -> TypeOf:
    return lambda tensor, values: kind if tensor == name else Q8_0(tensor, values)


CONTRADICTIONS: list[tuple[Mapping[str, Any], str]] = [
    (
        {"llama.embedding_length": 64, "llama.attention.key_length": 8},
        "the shape [97, 32]; its metadata require [97, 64]",
    ),
    ({"llama.embedding_length": "a"}, "m.gguf has llama.embedding_length 'a'; it must be a whole number"),
    ({"llama.attention.head_count": [4, 2]}, "m.gguf has llama.attention.head_count [4, 2]; it must be a whole number"),
    ({"llama.block_count": 3}, "the tensor blk.2.attn_q.weight is missing from m.gguf"),
    ({"llama.block_count": 1}, "m.gguf: the tensor blk.1."),
    ({"llama.block_count": 2**31}, "m.gguf has num_hidden_layers 2147483648; at most 10000 are supported"),
    ({"llama.vocab_size": 96}, "m.gguf has llama.vocab_size for 96 tokens, but token_embd.weight has 97 rows"),
    (
        {"llama.attention.value_length": 16},
        "m.gguf has llama.attention.value_length 16; it must be the length of a key, 8",
    ),
    ({"llama.attention.head_count": 0, "llama.attention.key_length": None}, "m.gguf has "),
    ({"llama.attention.layer_norm_rms_epsilon": None}, "m.gguf has no llama.attention.layer_norm_rms_epsilon"),
    ({"llama.rope.scaling.type": "yarn"}, "m.gguf has no llama.rope.scaling.factor"),
    (
        {"llama.rope.scaling.type": "longrope"},
        "has llama.rope.scaling.type 'longrope'; it must be none, linear or yarn, or",
    ),
    ({"llama.rope.scaling.yarn_log_multiplier": 0.5}, "yarn_log_multiplier 0.5, which is not supported"),
    ({"llama.rope.dimension_count": 3}, "dimension_count 3; it must be an even number up to the length of a key, 8"),
    ({"llama.rope.dimension_count": 4}, "for 4 of the 8 dimensions of a head; LlamaForCausalLM rotates all of them"),
    ({"llama.logit_scale": 0.5}, "m.gguf has llama.logit_scale 0.5, which is not supported"),
    ({"llama.attention.clamp_kqv": 3.0}, "m.gguf has llama.attention.clamp_kqv 3.0, which is not supported"),
    ({"llama.attention.causal": False}, "m.gguf has llama.attention.causal False, which is not supported"),
    ({"llama.router_logit_softcapping": 4.0}, "m.gguf has llama.router_logit_softcapping 4.0, which is not supported"),
    ({"llama.leading_dense_block_count": [0, 1]}, "llama.leading_dense_block_count [0, 1], which is not supported"),
    ({"llama.pooling_type": 4}, "m.gguf has llama.pooling_type 4; it must be 0, 1, 2 or 3 (none, mean, first or last"),
    ({"split.count": 2, "split.no": 0}, "m.gguf is one of 2 files; it must be named NAME-00001-of-00002.gguf"),
    ({"split.tensors.count": 7}, "m.gguf has split.tensors.count 7; its files have "),
    ({"general.alignment": 48}, "m.gguf: its value general.alignment is 48; it must be a power of two"),
    (
        {"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["a"] * 97},
        "m.gguf has tokenizer.ggml.model rwkv; supported",
    ),
    (
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"] * 97, "tokenizer.ggml.pre": "viking"},
        "m.gguf has tokenizer.ggml.pre viking, which is not supported; supported are ",
    ),
    (
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"] * 97, "tokenizer.ggml.suppress_tokens": [3]},
        "m.gguf has tokenizer.ggml.suppress_tokens, which is not supported",
    ),
    (
        {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a"] * 97, "tokenizer.ggml.scores": [1.0]},
        "m.gguf has tokenizer.ggml.scores for 1 of 97 tokens",
    ),
    (
        {"tokenizer.ggml.tokens": ["a"] * 96},
        "m.gguf has tokenizer.ggml.tokens for 96 tokens, but token_embd.weight has 97",
    ),
]


@each_row(*CONTRADICTIONS)
def test_metadata_that_cannot_be_are_refused(
    changes: Mapping[str, Any], sentence: str, *, directory: Path, tmp_path: Path
) -> None:
    path = write_gguf_of(directory, tmp_path / "m.gguf", Q8_0, changes=changes)

    assert sentence in refused(path)


def test_keys_that_llama_cpp_does_not_know_are_named_and_the_file_loads(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = [f"<{byte}>" for byte in range(97)]
    changes = {
        "llama.made_with.tool": "by hand",
        "llama.leading_dense_block_count": [0, 0],
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 97,
        "tokenizer.ggml.add_unknown_token": False,
    }
    model = GGUFModel(write_gguf_of(directory, tmp_path / "m.gguf", Q8_0, changes=changes))

    assert model.config()["architectures"] == ["LlamaForCausalLM"]
    assert model.tokenizer_files()
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 2
    assert "llama.made_with.tool" in told[0]
    assert "tokenizer.ggml.add_unknown_token" in told[1]


MORE = {"blk.0.odd.weight": np.zeros((2, 32), np.float32)}


@each_row(
    (
        only("blk.0.attn_v.weight", FileType.F16),
        {},
        "attn_q.weight and its companions are Q8_0, Q8_0, F16; they cannot",
    ),
    (
        only("blk.0.ffn_up.weight", FileType.F16),
        {},
        "blk.0.ffn_gate.weight is Q8_0, but blk.0.ffn_up.weight is F16: both must be quantized, or neither",
    ),
    (
        only("blk.0.ffn_down.weight", FileType.NVFP4),
        {},
        "ffn_down.weight is NVFP4, which is not held exactly; set --allow-requantization to round it to int8-a8",
    ),
    (
        only("blk.0.ffn_down.weight", FileType.Q8_1),
        {"allow_requantization": True},
        "m.gguf: the tensor blk.0.ffn_down.weight is Q8_1, which is not supported; use a file in another quantization",
    ),
    (
        only("blk.0.attn_norm.weight", FileType.Q8_0),
        {},
        "blk.0.attn_norm.weight is Q8_0; a vector must be F32, F16 or BF16",
    ),
    (
        only("blk.0.ffn_up.weight", FileType.Q4_1),
        {"quantization": "int8"},
        "blk.0.ffn_up.weight is Q4_1, whose products",
    ),
    (Q8_0, {"quantization": "int4"}, "are quantized already; remove --quantization, or set it to int8"),
    (
        only("blk.0.ffn_up.weight", FileType.Q4_1),
        {"quantization": "int4"},
        "are quantized already; remove --quantization$",
    ),
)
def test_types_that_are_not_held_are_refused_by_name(
    type_of: TypeOf, settings: Mapping[str, object], sentence: str, *, directory: Path, tmp_path: Path
) -> None:
    path = write_gguf_of(directory, tmp_path / "m.gguf", type_of)

    assert sentence in f"{refused(path, **settings)}$"  # the end of the sentence


def test_other_architectures_and_tensors_are_refused_by_name(directory: Path, tmp_path: Path) -> None:
    path = write_gguf_of(directory, tmp_path / "m.gguf", Q8_0, changes={"general.architecture": "falcon"})
    assert refused(path).startswith("m.gguf has the architecture falcon; supported in GGUF files are arcee, deepseek2,")

    path = write_gguf_of(directory, tmp_path / "m.gguf", Q8_0, more_tensors=MORE)
    assert refused(path) == "m.gguf: the tensor blk.0.odd.weight, which the model does not have"


def test_a_missing_part_of_several_files_is_named(directory: Path, tmp_path: Path) -> None:
    first = write_gguf_of(directory, tmp_path / "m.gguf", Q8_0, split_after=5)
    second = first.with_name("m-00002-of-00002.gguf")
    content = second.read_bytes()
    second.unlink()
    assert refused(first) == "m-00002-of-00002.gguf is missing: the model has 2 files"

    second.write_bytes(first.read_bytes())
    assert refused(first) == "m-00002-of-00002.gguf has split.no 0; it must be 1"

    second.write_bytes(content)
    GGUFModel(second)
