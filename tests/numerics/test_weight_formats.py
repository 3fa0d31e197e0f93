"""Which number format the weights of a model get, from the setting and from what a checkpoint has."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from executor_svc.checkpoint.model_directory import ModelDirectory
from executor_svc.checkpoint.weights import Checkpoint
from executor_svc.config import ExecutorConfig
from executor_svc.models.dense import MatrixRole
from executor_svc.models.kernels import check_compute_dtype, make_model
from executor_svc.models.selection import read_model_config
from executor_svc.models.weight_format import Quantization, matrix_formats, number_format_of
from executor_svc.native.build import NativeUnavailableError
from executor_svc.native.structs import NumberFormat
from executor_svc.numerics.identity import find_numerics
from executor_svc.worker.loading import load_worker
from octavo_shared.errors import ModelLoadError
from tests.numerics.architectures import ARCHITECTURES, save_tiny_architecture
from tests.numerics.driver import RecordingSampler
from tests.numerics.family_architectures import FAMILY_ARCHITECTURES
from tests.numerics.native import QUANTIZATIONS, SETTINGS, packed_matrix
from tests.numerics.reference import choose, logits_of, random_prompt
from tests.numerics.tiny_models import save_tiny_model
from tests.support.each_row import each_row

CPU = torch.device("cpu")
FAMILY = "Qwen3MoeForCausalLM"  # it has all: routers, experts, norms of heads


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a model in float32."""
    directory = tmp_path_factory.mktemp("weight_formats") / "float32"
    save_tiny_architecture(directory, FAMILY, FAMILY_ARCHITECTURES[FAMILY])
    return directory


def converted(saved: Path, directory: Path, dtype_of: Callable[[str, torch.Tensor], torch.dtype]) -> Path:
    """Save the model with other number formats; all values are those that bfloat16 has."""
    shutil.copytree(saved, directory)
    tensors = load_file(saved / "model.safetensors")
    rounded = {name: tensor.bfloat16().to(dtype_of(name, tensor)) for name, tensor in tensors.items()}
    save_file(rounded, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def is_router(name: str) -> bool:
    return name.endswith("mlp.gate.weight")


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
STORED: dict[str, tuple[Callable[[str, torch.Tensor], torch.dtype], dict[str, str], Quantization]] = {
    "all in bfloat16": (lambda name, tensor: BF16, {}, "bfloat16"),
    "norms in float32": (lambda name, tensor: BF16 if tensor.ndim > 1 else F32, {}, "bfloat16"),
    "routers in float32": (lambda name, tensor: F32 if is_router(name) else BF16, {}, "bfloat16"),
    "the head in float32": (lambda name, tensor: F32 if name == "lm_head.weight" else BF16, {}, "none"),
    "a matrix in float16": (lambda name, tensor: F16 if "1.self_attn.k_proj" in name else BF16, {}, "none"),
    "all in float32": (lambda name, tensor: F32, {}, "none"),
    "in int8, as asked for": (lambda name, tensor: BF16, {"quantization": "int8"}, "int8"),
    "computed by torch": (lambda name, tensor: BF16, {"cpu_kernels": "torch"}, "none"),
    "computed in bfloat16": (lambda name, tensor: BF16, {"dtype": "bfloat16"}, "none"),
}


@pytest.mark.parametrize(("dtype_of", "settings", "expected"), STORED.values(), ids=STORED)
def test_matrices_stay_in_bfloat16_if_all_are_stored_so(
    dtype_of: Callable[[str, torch.Tensor], torch.dtype],
    settings: dict[str, str],
    expected: Quantization,
    saved: Path,
    tmp_path: Path,
) -> None:
    chosen = choose(converted(saved, tmp_path / "model", dtype_of), **settings)

    assert chosen.quantization == expected
    if not settings:
        weights = find_numerics(chosen, num_ranks=1, device=CPU).parts["weights"]
        assert weights == ("bfloat16" if expected == "bfloat16" else "float32")


def test_weights_that_stay_in_bfloat16_give_the_bits_of_float32(
    saved: Path, tmp_path: Path, recorder: RecordingSampler
) -> None:
    short, long = (
        converted(saved, tmp_path / str(dtype), lambda name, tensor, dtype=dtype: dtype)  # type: ignore[misc]
        for dtype in (BF16, F32)
    )

    assert torch.equal(logits_of(short, recorder), logits_of(long, recorder))


# What the logits may be off, as a part of their length.
# From float32, at least and at most; and of torch from C: in bfloat16 they round the weights of a softmax behind other
# maxima.
ERRORS: dict[str, tuple[float, float, float]] = {
    "bfloat16": (1e-4, 0.02, 1e-4),
    "compute bfloat16": (1e-3, 0.05, 0.02),
    "int8": (1e-3, 0.05, 1e-3),
    "int8-a8": (1e-3, 0.05, 1e-3),
    "int4": (1e-2, 0.5, 1e-2),
}


@pytest.mark.parametrize("name", ERRORS)
def test_every_format_is_near_float32_and_the_same_in_torch(
    name: str, tmp_path: Path, recorder: RecordingSampler
) -> None:
    save_tiny_architecture(tmp_path, "LlamaForCausalLM", {})
    exact, *same = (
        logits_of(tmp_path, recorder, **settings)[:1]  # behind the prompt each may have another token
        for settings in (
            {},
            SETTINGS[name],
            {**SETTINGS[name], "attention_backend": "torch"},
            {**SETTINGS[name], "cpu_kernels": "torch"},
        )
    )
    ours = same[0]

    least, most, apart = ERRORS[name]
    assert least < float((ours - exact).norm() / exact.norm()) < most
    for other in same[1:]:
        assert float((ours - other).norm() / exact.norm()) < apart


@torch.inference_mode()
def test_products_in_bfloat16_are_within_the_rounding_of_transformers_in_bfloat16(
    tmp_path: Path, recorder: RecordingSampler
) -> None:
    save_tiny_model(tmp_path)
    prompt = torch.tensor([random_prompt(30)])
    models = [AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16).to(dtype) for dtype in (F32, BF16)]
    exact, theirs = (model(prompt).logits[0, -1].float() for model in models)

    ours = logits_of(tmp_path, recorder, compute_dtype="bfloat16")[0]

    assert 0 < float((ours - exact).norm()) < float((theirs - exact).norm())


@pytest.mark.parametrize("quantization", ["int8", "int8-a8", "int4"])
def test_integers_keep_their_products(quantization: Quantization, saved: Path, recorder: RecordingSampler) -> None:
    """Only attention is in bfloat16 then."""
    alone, both = (
        logits_of(saved, recorder, quantization=quantization, compute_dtype=one) for one in ("float32", "bfloat16")
    )

    assert 0 < float((alone - both)[0].norm() / alone[0].norm()) < 0.02
    assert number_format_of(quantization, "bfloat16") == number_format_of(quantization, "float32")


def no_compiler(*_: object) -> None:
    raise NativeUnavailableError("no C compiler was found")


@each_row(
    ({"dtype": "bfloat16"}, "is for dtype float32, but dtype is bfloat16; remove --dtype or --compute-dtype"),
    (
        {"cpu_kernels": "auto"},
        "needs the kernels in C on a CPU, but no C compiler was found; remove --compute-dtype, or",
    ),
    ({"numerics": "invariant", "cpu_kernels": "torch"}, "set --cpu-kernels native or auto"),
)
def test_what_is_not_computed_in_bfloat16_is_refused(
    settings: dict[str, str], words: str, *, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor_svc.models.kernels.load_library", no_compiler)
    with pytest.raises(ModelLoadError, match=re.escape(words)):
        load_worker(ExecutorConfig.model_validate({"model": str(saved), "compute_dtype": "bfloat16", **settings}))


def test_a_gpu_computes_in_its_dtype() -> None:
    with pytest.raises(ModelLoadError, match=r"compute_dtype is bfloat16, .* on a GPU use --dtype bfloat16$"):
        check_compute_dtype("bfloat16", F32, torch.device("cuda"))


def test_a_model_that_transformers_runs_is_not_computed_in_bfloat16(tmp_path: Path) -> None:
    save_tiny_architecture(tmp_path, "GPTNeoXForCausalLM", ARCHITECTURES["GPTNeoXForCausalLM"])
    with pytest.raises(ModelLoadError, match="compute_dtype is bfloat16, which needs Octavo's own decoder; but"):
        choose(tmp_path, compute_dtype="bfloat16")


@pytest.mark.parametrize("quantization", ["bfloat16", "int8-a8", "int4"])
def test_what_a_gpu_does_not_have_is_refused(quantization: Quantization, saved: Path) -> None:
    config = ExecutorConfig(model=str(saved))
    model_config = read_model_config(ModelDirectory(saved), config)

    with pytest.raises(ModelLoadError) as refused:
        make_model(model_config, torch.bfloat16, torch.device("cuda"), quantization=quantization)

    assert str(refused.value) == (
        f"quantization is {quantization}, which is for device cpu; on a GPU use --quantization int8 or --dtype bfloat16"
    )


def test_every_quantization_is_another_kind_and_another_model_to_a_fleet(saved: Path) -> None:
    chosen, checkpoint = choose(saved), Checkpoint(saved)
    kinds = [find_numerics(replace(chosen, quantization=quantization), 1, CPU) for quantization in QUANTIZATIONS]

    assert all(kind.is_invariant for kind in kinds)
    for values in ([kind.numerics_id for kind in kinds], [kind.parts["probe"] for kind in kinds]):
        assert len(set(values)) == len(QUANTIZATIONS)
    assert len({checkpoint.model_hash(quantization) for quantization in QUANTIZATIONS}) == len(QUANTIZATIONS)


ROLES: Final[tuple[MatrixRole, ...]] = get_args(MatrixRole)


@each_row(*ROLES)
def test_routers_stay_exact_and_what_loses_the_most_with_4_bits_keeps_8(role: MatrixRole) -> None:
    four, eight = NumberFormat.INT4, NumberFormat.INT8_A8
    of_four_bits = {
        "vocabulary": [(eight, [5, 3, 2])],
        "values": [(eight, [5, 3, 2])],
        "qkv": [(four, [5, 3]), (eight, [2])],
        "mamba2": [(four, [5, 3]), (eight, [2])],
        "delta_net": [(four, [5]), (eight, [3, 2])],
    }
    for number_format in NumberFormat:
        expected = [(NumberFormat.FLOAT32 if role == "router" else number_format, [5, 3, 2])]
        if number_format == four:
            expected = of_four_bits.get(role, expected)
        assert matrix_formats(number_format, role, [5, 3, 2]) == expected, number_format


def test_a_part_counts_what_it_takes() -> None:
    """The progress of loading and the log say how much memory the weights are."""
    matrix = packed_matrix("widest", 64, [96, 48], NumberFormat.INT4)

    assert [part.nbytes for part in matrix.weights] == [96 * 64 * 5 // 8, 48 * 64 * 5 // 8]
