"""The numerics id differs wherever outputs may, and is equal wherever they are."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_svc.attention.cache_format import CACHE_DTYPES
from executor_svc.config import ExecutorConfig
from executor_svc.models.kernels import ChosenModel
from executor_svc.models.weight_format import ComputeDtype, Quantization
from executor_svc.native import build
from executor_svc.native.build import LEVELS, build_library
from executor_svc.native.library import NativeLibrary
from executor_svc.numerics import identity, probe
from executor_svc.numerics.identity import Numerics, find_numerics, probe_native
from executor_svc.numerics.probe import MAX_POSITION_EMBEDDINGS
from executor_svc.sampler import torch_backend
from executor_svc.sampler.filters import SamplingRows, filtered_scores
from executor_svc.sampler.sampler import Sampler
from executor_svc.worker.loading import load_worker
from octavo.values.sampling_params_table import Stage, of_stage
from octavo_shared.errors import ModelLoadError
from octavo_shared.step_wire.step import SAMPLING_ROW, SamplingRow
from tests.numerics import record_numerics
from tests.numerics.architectures import ARCHITECTURES, save_tiny_architecture
from tests.numerics.conftest import TinyModel
from tests.numerics.native import SETTINGS, library_path, native_library
from tests.numerics.reference import choose

CPU = torch.device("cpu")
HAS_WIDER_THAN_AVX2 = native_library("widest").instructions != native_library("avx2").instructions


def numerics(
    chosen: ChosenModel,
    quantization: Quantization = "none",
    num_ranks: int = 1,
    compute_dtype: ComputeDtype = "float32",
) -> Numerics:
    return find_numerics(replace(chosen, quantization=quantization, compute_dtype=compute_dtype), num_ranks, CPU)


@pytest.fixture
def chosen(tiny_models: dict[str, TinyModel]) -> ChosenModel:
    return choose(tiny_models["gqa"].directory)


@pytest.mark.skipif(not HAS_WIDER_THAN_AVX2, reason="this processor has AVX2 only")
def test_avx2_and_avx512_are_two_kinds_by_their_code_and_by_their_bits(chosen: ChosenModel) -> None:
    wide, narrow = (numerics(replace(chosen, library=native_library(lanes))) for lanes in ("widest", "avx2"))

    assert wide.numerics_id != narrow.numerics_id
    assert wide.parts["code"] != narrow.parts["code"]
    assert wide.parts["probe"] != narrow.parts["probe"]


def test_number_formats_of_weights_and_cache_and_ranks_are_kinds(chosen: ChosenModel) -> None:
    kinds = [numerics(chosen), numerics(chosen, "int8"), numerics(chosen, num_ranks=2), numerics(chosen, num_ranks=3)]
    kinds += [numerics(chosen, each, compute_dtype="bfloat16") for each in ("none", "bfloat16", "int8")]
    of_caches = [numerics(replace(chosen, kv_cache_dtype=dtype)) for dtype in CACHE_DTYPES.values()]

    assert of_caches[0] == kinds[0]
    assert len({kind.parts["probe"] for kind in of_caches}) == len(CACHE_DTYPES)
    kinds += of_caches[1:]
    assert len({kind.numerics_id for kind in kinds}) == len(kinds)


def test_what_torch_is_counts_only_where_it_computes(
    tiny_models: dict[str, TinyModel], chosen: ChosenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_torch = choose(tiny_models["gqa"].directory, cpu_kernels="torch")
    before = [numerics(model).numerics_id for model in (chosen, in_torch)]
    monkeypatch.setattr(torch, "__version__", "99.1")

    after = [numerics(model).numerics_id for model in (chosen, in_torch)]

    assert (after[0] == before[0], after[1] == before[1]) == (True, False)


def test_a_path_that_is_not_invariant_has_no_probe(tiny_models: dict[str, TinyModel]) -> None:
    assert "probe" not in numerics(choose(tiny_models["gqa"].directory, cpu_kernels="torch")).parts


def test_weights_are_no_kind_and_have_a_digest(tiny_models: dict[str, TinyModel]) -> None:
    infos = [load_worker(ExecutorConfig(model=str(tiny_models[name].directory), num_device_blocks=4)).info
             for name in ("gqa", "mha")]  # fmt: skip

    assert infos[0].numerics_id == infos[1].numerics_id != ""
    assert "" != infos[0].weights_digest != infos[1].weights_digest != ""
    assert all(info.is_invariant for info in infos)


def test_a_worker_that_is_not_invariant_says_why(tiny_models: dict[str, TinyModel]) -> None:
    config = ExecutorConfig(model=str(tiny_models["gqa"].directory), num_device_blocks=4, cpu_kernels="torch")

    info = load_worker(config).info

    reason = "torch computes the dense work, because cpu_kernels is torch"
    assert (info.is_invariant, info.why_not_invariant, info.warning) == (False, reason, "")


def test_a_worker_whose_kernels_cannot_be_built_warns(
    tiny_models: dict[str, TinyModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(build, "PREBUILT_DIRECTORY", tmp_path)  # none are there

    info = load_worker(ExecutorConfig(model=str(tiny_models["gqa"].directory), num_device_blocks=4)).info

    reason = f"{tmp_path}/file/native cannot be written: Not a directory; set OCTAVO_CACHE_DIR"
    assert info.warning.startswith(f"the kernels in C cannot be used: {reason}")
    assert f"torch computes the dense work, because {reason}" in info.why_not_invariant
    assert f"octavo executor notice: {info.warning}\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", SETTINGS)
def test_threads_blocks_and_what_ran_before_are_no_kind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bits = [
        probe_native(library_path("widest"), num_threads=num_threads, **SETTINGS[name]) for num_threads in (1, 2, 3)
    ]
    for block_size in (8, 32):
        monkeypatch.setattr(probe, "_BLOCK_SIZE", block_size)
        monkeypatch.setattr(probe, "_NUM_BLOCKS", MAX_POSITION_EMBEDDINGS // block_size)
        bits.append(probe_native(library_path("widest"), **SETTINGS[name]))

    assert len(set(bits)) == 1


def test_another_order_of_filters_is_another_kind(chosen: ChosenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    before = numerics(chosen)
    monkeypatch.setattr(identity, "of_stage", lambda stage: of_stage(stage)[::-1])

    after = numerics(chosen)

    assert after.numerics_id != before.numerics_id
    assert after.parts["probe"] == before.parts["probe"]  # only the table was changed


def test_the_probe_sees_another_order_of_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two filters change places at a time, in the sampler itself; the shortcut for likely tokens is off."""
    monkeypatch.setattr(torch_backend, "WIDTHS", ())
    order = [parameter.name for parameter in of_stage(Stage.FILTER) if parameter.name != "temperature"]
    found = {sampled_in_order(order, monkeypatch)}
    for place in range(len(order) - 1):
        swapped = [*order[:place], order[place + 1], order[place], *order[place + 2 :]]
        found.add(sampled_in_order(swapped, monkeypatch))

    assert len(found) == len(order)


def sampled_in_order(order: list[str], monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Return the ids that the sampler of the probe draws if filters are applied in an order."""

    def filtered(scores: torch.Tensor, sampling: SamplingRows) -> torch.Tensor:
        neutral = np.array([replace(SamplingRow(), temperature=1.0).as_tuple()], SAMPLING_ROW).repeat(len(sampling))
        for name in ("temperature", *order):
            alone = neutral.copy()
            alone[name] = sampling[name]
            scores = filtered_scores(scores, alone)
        return scores

    monkeypatch.setattr(torch_backend, "filtered_scores", filtered)
    token_ids = probe._sample(Sampler())[0]
    assert isinstance(token_ids, np.ndarray)
    return token_ids.tobytes()


def test_what_the_revision_stands_for_is_on_record() -> None:
    """See `executor_svc/numerics/identity.py`: raise REVISION if outputs change, then record anew."""
    record, current = record_numerics.recorded(), record_numerics.current()

    assert current["configurations"] == record["configurations"]
    assert current["revision"] == record["revision"]
    assert current["probe"].items() <= record["probe"].items()


@pytest.mark.slow  # it compiles for a minute
@pytest.mark.parametrize("name", LEVELS)
def test_what_is_built_ahead_for_processors_like_this_has_the_bits_on_record(name: str) -> None:
    level = LEVELS[name]
    if not level.needs <= build._processor_features():
        pytest.skip(f"this processor cannot run {name}")
    library = NativeLibrary(build_library(build.cache_directory(), flags=level.flags), 1)

    probe = record_numerics.probe_of(library)

    assert len(probe) > 10
    assert probe.items() <= record_numerics.recorded()["probe"].items()


WHY_NOT = {
    "cpu_kernels": (
        {"cpu_kernels": "torch"},
        "torch computes the dense work, because cpu_kernels is torch",
        "set --cpu-kernels native or auto",
    ),
    "dtype": (
        {"dtype": "bfloat16"},
        "torch computes in bfloat16, and on a CPU only float32 is invariant",
        "set --dtype float32",
    ),
    "attention": ({"attention_backend": "torch"}, "torch computes the attention", "set --attention-backend auto"),
    "two": (
        {"dtype": "bfloat16", "cpu_kernels": "torch"},
        "torch computes in bfloat16, and on a CPU only float32 is invariant",
        "set --dtype float32 and set --cpu-kernels native or auto",
    ),
}


@pytest.mark.parametrize(("settings", "reason", "change"), WHY_NOT.values(), ids=WHY_NOT)
def test_settings_that_are_not_invariant_are_refused_if_it_is_wanted(
    settings: dict[str, str], reason: str, change: str, tiny_models: dict[str, TinyModel]
) -> None:
    directory = tiny_models["gqa"].directory
    assert choose(directory, **settings).why_not_invariant == reason

    with pytest.raises(ModelLoadError) as refused:
        choose(directory, **settings, numerics="invariant")

    sentence = f"--numerics invariant is not possible: {reason}; {change}, or remove --numerics"
    assert str(refused.value) == sentence


def test_a_model_that_transformers_runs_is_not_invariant(tmp_path: Path) -> None:
    save_tiny_architecture(tmp_path, "GPTNeoXForCausalLM", ARCHITECTURES["GPTNeoXForCausalLM"])

    reason = "transformers runs the model, because Octavo's own decoder does not have this model"
    assert choose(tmp_path).why_not_invariant == reason
    with pytest.raises(ModelLoadError, match=r"does not have this model; remove --numerics$"):
        choose(tmp_path, numerics="invariant")


def test_our_own_kernels_are_invariant(chosen: ChosenModel, tiny_models: dict[str, TinyModel]) -> None:
    assert chosen.why_not_invariant is None
    assert choose(tiny_models["gqa"].directory, numerics="invariant").why_not_invariant is None
