"""A model in a GGUF file is the model: its logits are those of the same weights in safetensors, bit for bit."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType as FileType
from gguf.quants import dequantize
from safetensors.numpy import load_file

from executor_svc.checkpoint.gguf.model import GGUFModel
from executor_svc.checkpoint.gguf.weights import GGUFCheckpoint
from executor_svc.checkpoint.weight_map import BlockRows
from executor_svc.config import ExecutorConfig
from executor_svc.models import selection
from executor_svc.models.config import RopeConfig
from executor_svc.models.fields import ConfigFields
from executor_svc.models.memory_needs import summarize_model
from executor_svc.models.rotary_embedding import inverse_frequencies, read_rope
from executor_svc.models.selection import choose_model
from executor_svc.native.build import NativeUnavailableError
from executor_svc.native.library import NativeLibrary
from executor_svc.native.structs import FILE_FORMATS, NumberFormat
from executor_svc.numerics.identity import find_numerics
from executor_svc.numerics.probe import probe_file_format
from executor_svc.worker.loading import load_worker
from octavo_shared.errors import ModelLoadError
from tests.numerics.driver import RecordingSampler
from tests.numerics.gguf_models import FAMILIES, LATENT_BLOCKS, save
from tests.numerics.native import library_path
from tests.numerics.reference import logits_of
from tests.numerics.tiny_models import LLAMA3_ROPE, VOCAB_SIZE
from tests.support.each_row import each_row
from tests.support.gguf_files import HALVES_OF_K, TypeOf, of_type, write_gguf_of

CPU = torch.device("cpu")

Q8_0 = of_type(FileType.Q8_0)


SLOW = ("DeepseekV2ForCausalLM",)  # a file of it is compared in float32 below


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in FAMILIES])
def test_every_family_has_the_bits_of_safetensors(name: str, tmp_path: Path, recorder: RecordingSampler) -> None:
    in_bfloat16 = {"compute_dtype": "bfloat16"}
    for kind, of_both, settings in (
        (FileType.F32, {}, {}),
        (FileType.F32, in_bfloat16, {}),
        (FileType.BF16, in_bfloat16, {}),
        (FileType.Q8_0, {}, {"quantization": "int8-a8"}),
        (FileType.Q8_0, in_bfloat16, {"quantization": "int8-a8"}),
    ):
        directory = save(tmp_path / kind.name, name, FAMILIES[name], kind)
        file = write_gguf_of(directory, tmp_path / f"{kind.name}.gguf", of_type(kind))

        expected = logits_of(directory, recorder, **of_both, **settings)
        assert torch.equal(logits_of(file, recorder, **of_both), expected), f"{kind.name} {of_both}"


@each_row(("LlamaForCausalLM", FileType.Q4_1), ("MixtralForCausalLM", FileType.Q8_0))
def test_codes_are_restored_where_no_kernels_have_them(
    name: str, kind: FileType, *, tmp_path: Path, recorder: RecordingSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the model is that of the numbers which the codes stand for."""
    monkeypatch.setattr(selection, "has_kernels_for_codes", lambda device: False)
    directory = save(tmp_path / name, name, FAMILIES[name], kind)
    file = write_gguf_of(directory, tmp_path / f"{name}.gguf", of_type(kind))

    assert torch.equal(logits_of(file, recorder), logits_of(directory, recorder))
    with pytest.raises(ModelLoadError, match=r"quantized already; remove --quantization$"):
        logits_of(file, recorder, quantization="int8")


VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 24},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_llama_of_another_shape_has_the_bits_of_safetensors(
    variant: str, tmp_path: Path, recorder: RecordingSampler
) -> None:
    directory = save(tmp_path / "model", "LlamaForCausalLM", VARIANTS[variant], FileType.F32)
    rope = {"llama.rope.scaling.factor": 2.0} if "rope" in variant else {}  # linear, as no type is said
    file = write_gguf_of(directory, tmp_path / "m.gguf", of_type(FileType.F32), changes=rope)

    assert torch.equal(logits_of(file, recorder), logits_of(directory, recorder))


def test_the_factors_of_llama_3_stretch_its_frequencies(tmp_path: Path, recorder: RecordingSampler) -> None:
    directory = save(tmp_path / "model", "LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE}, FileType.F32)
    rope = read_rope(ConfigFields({"rope_parameters": LLAMA3_ROPE}, directory), 8, 128)
    plain = inverse_frequencies(RopeConfig(rope.theta), 8)
    factors = {"rope_freqs.weight": (plain / inverse_frequencies(rope, 8)).numpy()}  # as llama.cpp's converter
    file, unscaled = (
        write_gguf_of(directory, tmp_path / name, of_type(FileType.F32), more_tensors=more)
        for name, more in (("m.gguf", factors), ("unscaled.gguf", {}))
    )

    expected = logits_of(directory, recorder)

    assert torch.allclose(logits_of(file, recorder), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits_of(unscaled, recorder), expected, rtol=1e-3, atol=1e-3)


SCALED = "rope.scaling"
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "attention_factor": 1.25}
LONG |= {"short_factor": [1.0, 1.5, 2.5], "long_factor": [4.0, 8.0, 16.0], "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, "beta_slow": 0.5}
# rope_parameters of config.json, and what a file has in their place.
ROPES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "qwen3",
        YARN,
        {
            f"{SCALED}.type": "yarn",
            f"{SCALED}.factor": 4.0,
            f"{SCALED}.original_context_length": 32,
            f"{SCALED}.yarn_beta_slow": 0.5,
        },
    ),
    ("phi3", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, {"rope.dimension_count": 4}),
    (
        "phi3",
        LONG,
        {"rope.dimension_count": 6, f"{SCALED}.attn_factor": 1.25, f"{SCALED}.original_context_length": 64},
    ),
]


@each_row(*ROPES)
def test_rotary_embeddings_of_other_kinds_have_the_bits_of_safetensors(
    architecture: str, rope: dict[str, Any], keys: dict[str, Any], *, tmp_path: Path, recorder: RecordingSampler
) -> None:
    settings: dict[str, Any] = {"rope_parameters": rope}
    if rope == LONG:
        settings["original_max_position_embeddings"] = 64
    directory = save(tmp_path / "model", f"{architecture.title()}ForCausalLM", settings, FileType.F32)
    factors = {f"rope_factors_{name}.weight": rope.get(f"{name}_factor") for name in ("short", "long")}
    file = write_gguf_of(
        directory,
        tmp_path / "m.gguf",
        of_type(FileType.F32),
        changes={f"{architecture}.{key}": value for key, value in keys.items()},
        more_tensors={name: np.array(values, np.float32) for name, values in factors.items() if values},
    )

    expected = logits_of(directory, recorder, max_model_len=64)

    assert torch.equal(logits_of(file, recorder, max_model_len=64), expected)


def test_a_file_with_one_map_to_keys_and_values_has_the_bits_of_safetensors(
    tmp_path: Path, recorder: RecordingSampler
) -> None:
    """As llama.cpp's converter wrote them before its attention read a latent cache."""
    settings = FAMILIES["DeepseekV2ForCausalLM"]
    directory = save(tmp_path / "model", "DeepseekV2ForCausalLM", settings, FileType.F32)
    weights, more = load_file(directory / "model.safetensors"), dict[str, Any]()
    for layer in range(2):
        more[f"blk.{layer}.attn_kv_b.weight"] = weights[f"model.layers.{layer}.self_attn.kv_b_proj.weight"]
        more |= {f"blk.{layer}.attn_{part}_b.weight": None for part in "kv"}
    sizes = {"key_length_mla": None, "value_length_mla": None, "key_length": 38, "value_length": 32, "head_count_kv": 4}
    changes = {f"deepseek2.attention.{name}": size for name, size in sizes.items()}
    file, in_codes = (
        write_gguf_of(directory, tmp_path / f"{kind}.gguf", of_type(kind), changes=changes, more_tensors=more)
        for kind in (FileType.F32, FileType.Q8_0)
    )

    assert torch.equal(logits_of(file, recorder), logits_of(directory, recorder))
    assert_like_torch(in_codes, recorder)


def test_layers_that_predict_further_tokens_are_left_out_and_a_bias_says_that_experts_have_sigmoids(
    tmp_path: Path, recorder: RecordingSampler
) -> None:
    settings = {**LATENT_BLOCKS, "q_lora_rank": 32, "mlp_layer_types": ["dense", "sparse"]}
    directory = save(tmp_path / "model", "Glm4MoeLiteForCausalLM", settings, FileType.F32)
    changes = {"deepseek2.block_count": 3, "deepseek2.nextn_predict_layers": 1, "deepseek2.expert_gating_func": None}
    more = {"blk.2.nextn.eh_proj.weight": np.ones((64, 128), np.float32)}
    file = write_gguf_of(directory, tmp_path / "m.gguf", of_type(FileType.F32), changes=changes, more_tensors=more)

    assert [summarize_model(model).token_bytes for model in (directory, file)] == [2 * (64 + 6) * 4] * 2
    assert torch.equal(logits_of(file, recorder), logits_of(directory, recorder))


@each_row(4096, 131_072)
def test_gemma_3_from_ollamas_converter_has_the_bits_of_llama_cpps(
    length: int, *, tmp_path: Path, recorder: RecordingSampler
) -> None:
    settings = {**FAMILIES["Gemma3ForCausalLM"], "max_position_embeddings": length, "rms_norm_eps": 1e-6}
    directory = save(tmp_path / "model", "Gemma3ForCausalLM", settings, FileType.F32)
    stretched = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0} if length > 4096 else {}
    common = {"gemma3.rope.freq_base": 1e6, "gemma3.rope.freq_base_swa": 1e4, **stretched}
    others: list[dict[str, Any]] = [
        {"gemma3.rope.freq_base": None, "gemma3.rope.global.freq_base": 1e6, "gemma3.rope.local.freq_base": 1e4},
        {"gemma3.rope.freq_base": None, "tokenizer.ggml.tokens": [f"{number}" for number in range(VOCAB_SIZE + 1)]},
    ]
    vision = {f"{part}.weight": np.ones((32, 32), np.float32) for part in ("v.blk.0.attn_q", "mm.mm_input_projection")}
    ollamas = [
        write_gguf_of(
            directory,
            tmp_path / f"o{number}.gguf",
            of_type(FileType.F32),
            changes={**changes, "gemma3.attention.layer_norm_rms_epsilon": None},
            more_tensors=vision if number else {},
        )
        for number, changes in enumerate(others)
    ]

    expected = logits_of(write_gguf_of(directory, tmp_path / "m.gguf", of_type(FileType.F32), changes=common), recorder)

    for file in ollamas:
        assert torch.equal(logits_of(file, recorder), expected), file.name


def mixed(*kinds: FileType) -> TypeOf:
    """Return the rule of a file that has all of some types, also side by side in queries, keys and values."""
    return lambda name, values: (
        FileType.F32 if values.ndim == 1 or "gate_inp" in name else kinds[sum(name.encode()) % len(kinds)]
    )


def of_gates(name: str, values: npt.NDArray[Any]) -> FileType:
    """Return the rule of a file with codes in gates and what they gate, and floats in all else."""
    return of_type(FileType.Q8_0 if "ffn_gate" in name or "ffn_up" in name else FileType.F16)(name, values)


def of_values(name: str, values: npt.NDArray[Any]) -> FileType:
    """Return the rule of a file with more bits for values, as Q4_K_M has them, between queries and their gates."""
    return of_type(FileType.Q8_0 if "attn_v" in name else FileType.Q4_1)(name, values)


def of_rows(name: str, values: npt.NDArray[Any]) -> FileType:
    """Return the rule of a file with K formats where rows are whole blocks of them, as llama.cpp's quantizer has it."""
    k_format = FileType.Q6_K if "attn_v" in name else FileType.Q4_K
    return of_type(FileType.Q5_0 if values.shape[-1] % 256 else k_format)(name, values)


def assert_like_torch(file: Path, recorder: RecordingSampler) -> None:
    """Check that our kernels make of a file's codes what torch makes of its weights."""
    ours, theirs = (logits_of(file, recorder, cpu_kernels=kernels)[0] for kernels in ("native", "torch"))
    assert float((ours - theirs).norm() / theirs.norm()) < 2e-2
    assert ours.argmax() == theirs.argmax()


MIXTURES: Mapping[str, tuple[str, tuple[FileType, ...] | TypeOf]] = {
    "codes beside floats": ("MixtralForCausalLM", of_gates),
    "4 and 8 bits": ("Qwen3MoeForCausalLM", (FileType.Q4_0, FileType.Q8_0, FileType.Q5_0)),
    "minima": ("LlamaForCausalLM", (FileType.Q4_1,)),
    "numbers": ("LlamaForCausalLM", (FileType.F16, FileType.BF16, FileType.F32)),
    "three formats in one product": ("Qwen3_5ForCausalLM", of_values),
    "Q5_0": ("Gemma2ForCausalLM", (FileType.Q5_0,)),
    "Q5_1 and MXFP4": ("Qwen3MoeForCausalLM", (FileType.Q5_1, FileType.MXFP4)),
    "Q4_K_M": ("LlamaForCausalLM", (FileType.Q4_K, FileType.Q6_K)),
    "other K formats": ("MixtralForCausalLM", (FileType.Q2_K, FileType.Q3_K, FileType.Q5_K)),
    "K formats in maps of a latent cache": ("DeepseekV3ForCausalLM", of_rows),
    "K formats beside others": ("Gemma3ForCausalLM", (FileType.Q4_K, FileType.Q5_0, FileType.Q8_0)),
}
# Rows of K blocks are multiples of 256.
K_SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_every_mixture_of_types_is_what_torch_makes_of_its_weights(
    mixture: str, tmp_path: Path, recorder: RecordingSampler
) -> None:
    name, kinds = MIXTURES[mixture]
    sizes = K_SIZES if isinstance(kinds, tuple) and set(kinds) & set(HALVES_OF_K) else {}
    if kinds is of_rows:
        sizes = {"hidden_size": 256, "kv_lora_rank": 256, "q_lora_rank": 256, "qk_nope_head_dim": 256}
    directory = save(tmp_path / "model", name, {**FAMILIES[name], **sizes}, FileType.F32)
    file = write_gguf_of(directory, tmp_path / "m.gguf", mixed(*kinds) if isinstance(kinds, tuple) else kinds)

    assert_like_torch(file, recorder)


ROUNDED = [
    *(FileType.IQ1_S, FileType.IQ1_M, FileType.IQ2_XXS, FileType.IQ2_XS, FileType.IQ2_S, FileType.IQ3_XXS),
    *(FileType.IQ3_S, FileType.IQ4_XS, FileType.TQ1_0, FileType.TQ2_0, FileType.NVFP4),
]


@each_row(*[(kind, kernels) for kind in ROUNDED for kernels in ("native", "torch")])
def test_types_that_are_not_held_are_rounded_where_that_is_allowed_and_the_error_is_told(
    kind: FileType, kernels: str, *, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = save(tmp_path / "model", "LlamaForCausalLM", K_SIZES, FileType.F32)
    down = "blk.1.ffn_down.weight"
    file = write_gguf_of(
        directory,
        tmp_path / "m.gguf",
        lambda name, values: kind if name in (down, "blk.0.attn_q.weight") else of_type(FileType.Q8_0)(name, values),
    )
    config = ExecutorConfig.model_validate(
        {"model": str(file), "num_device_blocks": 8, "allow_requantization": True, "cpu_kernels": kernels}
    )
    tensor = GGUFModel(file).checkpoint().tensors[down]
    blocks = np.fromfile(file, np.uint8, tensor.num_bytes, offset=tensor.begin).reshape(tensor.shape[0], -1)
    weight = torch.from_numpy(dequantize(blocks, kind).astype(np.float32))

    load_worker(config)

    told = re.search(
        rf"octavo executor notice: weights in {kind.name} were rounded to int8-a8: their relative RMS error is "
        r"([\d.]+)%, at most ([\d.]+)%, in .*m.gguf: the tensor (\S+)\n",
        capsys.readouterr().out,
    )
    assert told is not None
    groups = weight.view(-1, 32)
    scales = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
    rounded = (groups / scales.clamp(min=1e-30)).round().clamp(-127, 127) * scales
    of_down = float((rounded - groups).norm() / groups.norm())
    assert 0 < float(told[1]) <= float(told[2]) < 1
    assert of_down * 100 <= float(told[2]) + 0.01
    if told[3] == down:
        assert of_down * 100 == pytest.approx(float(told[2]), abs=0.01)


def test_mxfp4_with_a_scale_that_is_nan_is_refused_with_file_and_tensor(tmp_path: Path) -> None:
    directory = save(tmp_path / "model", "LlamaForCausalLM", {}, FileType.F32)
    file = write_gguf_of(directory, tmp_path / "m.gguf", of_type(FileType.MXFP4))
    content = bytearray(file.read_bytes())
    content[GGUFModel(file).checkpoint().tensors["blk.1.ffn_down.weight"].begin] = 255
    file.write_bytes(content)
    config = ExecutorConfig.model_validate({"model": str(file), "num_device_blocks": 8, "allow_requantization": True})

    with pytest.raises(ModelLoadError, match=r"m.gguf: the tensor blk.1.ffn_down.weight has a scale .* no number"):
        load_worker(config)


@each_row((FileType.Q8_0, 32), (FileType.Q4_K, 256))
def test_ranks_share_whole_blocks(kind: FileType, size: int, *, tmp_path: Path) -> None:
    directory = save(tmp_path / "model", "LlamaForCausalLM", K_SIZES, FileType.F32)
    checkpoint = GGUFModel(write_gguf_of(directory, tmp_path / "m.gguf", of_type(kind))).checkpoint()
    place = checkpoint._place("model.layers.0.mlp.down_proj.weight")
    source = checkpoint._source(place, place.shape)

    parts = [source[:, begin : begin + size] for begin in range(0, 512, size)]

    blocks = [part.blocks for part in parts if isinstance(part, BlockRows)]
    whole = source[:]
    assert isinstance(whole, BlockRows)
    assert torch.equal(torch.cat(blocks, 1), whole.blocks)
    with pytest.raises(
        ModelLoadError, match=f"one would have inputs 0 to {size // 2}, which are not whole blocks of {size};"
    ):
        source[:, 0 : size // 2]


def test_an_executor_refuses_what_memory_lacks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf_of(save(tmp_path / "model", "LlamaForCausalLM", {}, FileType.F32), tmp_path / "m.gguf", Q8_0)
    monkeypatch.setattr("executor_svc.models.memory_needs.available_memory_bytes", lambda: 10**8)
    monkeypatch.setattr(GGUFCheckpoint, "load_into", lambda *_: pytest.fail("weights are loaded"))

    with pytest.raises(ModelLoadError, match=r"m.gguf needs 0.4 GB of memory, .* and 0.1 GB are free; "):
        load_worker(ExecutorConfig.model_validate({"model": str(file), "num_device_blocks": 8}))


def test_several_files_are_one_model(tmp_path: Path, recorder: RecordingSampler) -> None:
    directory = save(tmp_path / "model", "MixtralForCausalLM", {}, FileType.F32)
    whole = write_gguf_of(directory, tmp_path / "m.gguf", of_type(FileType.Q4_0))
    first = write_gguf_of(directory, tmp_path / "m.gguf", of_type(FileType.Q4_0), split_after=7)
    second = first.with_name("m-00002-of-00002.gguf")

    digests = {path: digest_of(path) for path in (whole, first, second)}

    assert len(set(digests.values())) == 1
    assert torch.equal(logits_of(first, recorder), logits_of(whole, recorder))


def digest_of(path: Path) -> str:
    with GGUFModel(path).checkpoint().digest() as digest:
        return digest.result()


def test_the_digest_covers_every_tensor_and_what_the_header_says_of_the_model(tmp_path: Path) -> None:
    directory = save(tmp_path / "model", "LlamaForCausalLM", {}, FileType.F32)

    def written(**changes: Any) -> Path:
        return write_gguf_of(directory, tmp_path / "m.gguf", of_type(FileType.Q8_0), changes=changes or None)

    seen = [digest_of(written()), digest_of(written(**{"general.name": "another name"}))]
    assert seen[0] == seen[1]
    seen = [seen[0], digest_of(written(**{"llama.rope.freq_base": 5e5}))]
    path = written()
    for tensor in GGUFModel(path).checkpoint().tensors.values():
        content = bytearray(path.read_bytes())
        content[tensor.begin + tensor.num_bytes - 1] ^= 1
        path.write_bytes(content)
        seen.append(digest_of(path))
    assert len(set(seen)) == len(seen)


@each_row(*FILE_FORMATS)
def test_the_probe_sees_the_bits_of_each_format_of_files_and_not_the_threads(number_format: NumberFormat) -> None:
    def bits(instructions: str, num_threads: int, other: NumberFormat = number_format) -> str:
        return probe_file_format(NativeLibrary(library_path(instructions), num_threads), other)

    expected = bits("widest", 1)

    assert bits("widest", 3) == bits("avx2", 1) == expected
    assert all(bits("widest", 1, other) != expected for other in FILE_FORMATS if other != number_format)


def test_the_numerics_id_has_k_formats(tmp_path: Path) -> None:
    directory = save(tmp_path / "model", "LlamaForCausalLM", K_SIZES, FileType.F32)
    found = []
    for kinds in ((FileType.Q4_K,), (FileType.Q6_K,), (FileType.Q4_K, FileType.Q6_K)):
        file = write_gguf_of(directory, tmp_path / "m.gguf", mixed(*kinds))
        config = ExecutorConfig.model_validate({"model": str(file), "dtype": "float32"})
        found.append(find_numerics(choose_model(GGUFModel(file), config, CPU), num_ranks=1, device=CPU))

    assert [each.parts["weights"] for each in found] == ["q4_k", "q6_k", "q4_k, q6_k"]
    assert len({each.numerics_id for each in found}) == len({each.parts["probe"] for each in found}) == 3


@each_row(
    ({}, ["int4", "int8-a8"]),
    ({"quantization": "int8"}, ["int8"]),
    ({"cpu_kernels": "torch"}, ["int4", "int8-a8"]),
)
def test_the_numerics_id_has_the_formats(settings: Mapping[str, str], formats: list[str], *, tmp_path: Path) -> None:
    directory = save(tmp_path / "model", "LlamaForCausalLM", {}, FileType.F32)
    file = write_gguf_of(directory, tmp_path / "m.gguf", mixed(FileType.Q4_0, FileType.Q8_0))
    config = ExecutorConfig.model_validate({"model": str(file), "dtype": "float32", **settings})

    numerics = find_numerics(choose_model(GGUFModel(file), config, CPU), num_ranks=1, device=CPU)

    assert sorted(numerics.parts["weights"].split(", ")) == formats


def test_generation_defaults_and_ends_come_from_the_file(tmp_path: Path) -> None:
    directory = save(tmp_path / "model", "LlamaForCausalLM", {}, FileType.F32)
    tokens = ["<s>", "</s>", "<|im_end|>", *(f"t{number}" for number in range(94))]
    values = {
        "general.sampling.temp": 0.7,
        "general.sampling.top_k": 20,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, *[1] * 94],
    }
    model = GGUFModel(write_gguf_of(directory, tmp_path / "m.gguf", of_type(FileType.Q8_0), changes=values))

    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "top_p": 0.9}')

    assert model.sampling_defaults() == {"temperature": 0.7, "top_k": 20, "top_p": 0.9}
    assert model.eos_token_ids() == (1, 2)
    assert model.tokenizer_files() == ()


def test_without_a_compiler_torch_computes_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unavailable(num_threads: int) -> object:
        raise NativeUnavailableError("no C compiler was found; install gcc")

    monkeypatch.setattr("executor_svc.models.kernels.load_library", unavailable)
    directory = save(tmp_path / "model", "LlamaForCausalLM", {}, FileType.Q4_1)
    file = write_gguf_of(directory, tmp_path / "tiny.gguf", of_type(FileType.Q4_1))

    info = load_worker(ExecutorConfig.model_validate({"model": str(file), "num_device_blocks": 64})).info

    assert info.model_id == "tiny"
    assert "because no C compiler was found" in capsys.readouterr().out
