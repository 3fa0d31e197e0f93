"""Weights that are replaced in place have the bits of weights that are loaded; what is refused changes nothing."""

import json
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_svc.checkpoint.weights import Checkpoint
from executor_svc.config import ExecutorConfig
from executor_svc.device.returnable_memory import ReturnableMemory
from executor_svc.worker.interface import Worker
from executor_svc.worker.loading import load_worker
from executor_svc.worker.torch_worker import TorchWorker
from octavo_shared.errors import DeviceLostError, ModelLoadError
from octavo_shared.step_wire.executor_info import ExecutorInfo
from octavo_shared.step_wire.step import EncoderInput, SamplingRow, TableDelta, pairs
from tests.numerics.architectures import save_tiny_architecture
from tests.numerics.driver import PoisonedCacheEngine, StepDriver
from tests.numerics.encoder_decoders import FAMILIES
from tests.numerics.family_architectures import FAMILY_ARCHITECTURES
from tests.numerics.native import SETTINGS
from tests.numerics.reference import random_prompt
from tests.numerics.scaled_codes import write_codes
from tests.numerics.threaded_group import ThreadedRanks
from tests.numerics.tiny_models import save_tiny_model
from tests.support.joined_ranks import joined

PROMPTS = [random_prompt(length, seed=length) for length in (1, 17, 30)]
SAMPLING = SamplingRow(temperature=0.8, seed=7, num_logprobs=5)
UP = "model.layers.1.mlp.up_proj.weight"

Edit = Callable[[Path], object]


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def load(directory: Path, cleanup: ExitStack, tp: int = 1, **settings: Any) -> Worker:
    """Load a model whose weights can be replaced, with several ranks as processes have it: joined by sockets."""
    sizes = {"num_device_blocks": 60, "block_size_tokens": 4, "num_host_blocks": 8, "max_num_seqs": 4}
    settings = {"model": str(directory), "weights_dir": (str(directory.parent),), "num_threads": 1, **sizes, **settings}
    config = ExecutorConfig.model_validate(settings)
    if tp == 1:
        return load_worker(config)
    ranks = ThreadedRanks(config, tp)
    cleanup.callback(ranks.close)
    return cleanup.enter_context(joined(ranks.workers))


def bits_of(worker: Worker) -> list[bytes]:
    """Return the tokens and log-probabilities of some prompts."""
    worker.reset(uses_groups=worker.info.has_encoder)
    driver = StepDriver(worker)
    admissions = tuple(driver.admission(slot, prompt, 6, SAMPLING) for slot, prompt in enumerate(PROMPTS))
    if (encoder := worker.table.encoder) is not None:
        for admission in admissions:
            admission.encoder_input = EncoderInput(
                2, np.array([encoder.first_id + admission.slot], np.int32), np.array([5, 7 + admission.slot], np.int32)
            )
    chunks = pairs(*[(slot, len(prompt)) for slot, prompt in enumerate(PROMPTS)])
    deltas = [TableDelta(admissions=admissions, prefill_chunks=chunks), *[TableDelta()] * 5]
    found: list[bytes] = []
    for delta in deltas:
        result = driver.execute(delta)
        parts = (result.sampled_token_ids, result.logprobs, result.alternative_token_ids, result.alternative_logprobs)
        assert result.row_flags is None
        found += [part.tobytes() for part in parts if part is not None]
    return found


def said_of(worker: Worker) -> ExecutorInfo:
    return replace(worker.info, instance_id="")


def trained(directory: Path, destination: Path, edit: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Path:
    """Write the weights of a model with every number changed, and nothing else."""
    generator = torch.Generator().manual_seed(11)
    destination.mkdir()
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            changed = tensor + 0.1 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
            tensors[name] = changed if edit is None else edit(changed)
        save_file(tensors, destination / path.name)
    return destination


def loaded_from(directory: Path, weights: Path, cleanup: ExitStack, **settings: Any) -> Worker:
    """Load a model with other weights, as an executor that is started with them."""
    whole = Path(shutil.copytree(directory, weights.with_name("whole")))
    for path in weights.glob("*.safetensors"):
        shutil.copy(path, whole / path.name)
    return load(whole, cleanup, **settings)


def check_update(directory: Path, weights: Path, cleanup: ExitStack, **settings: Any) -> Worker:
    """Update, sleep, wake, and update back: the bits are those of executors that were started so."""
    worker, expected = load(directory, cleanup, **settings), loaded_from(directory, weights, cleanup, **settings)
    before, first = said_of(worker), bits_of(worker)

    worker.update_weights(weights, expected.info.weights_digest)

    found = bits_of(worker)
    assert found == bits_of(expected)
    assert found != first
    assert said_of(worker) == replace(said_of(expected), model_id=worker.info.model_id)
    assert worker.info.numerics_id == expected.info.numerics_id

    for level in (1, 2):
        worker.sleep(level)
        if level == 2:
            with pytest.raises(ModelLoadError, match="there are no weights: update them first"):
                worker.wake()
            worker.update_weights(weights, "")
        worker.wake()
        assert bits_of(worker) == found

    worker.update_weights(directory, "")
    assert bits_of(worker) == first
    assert said_of(worker) == before
    return worker


ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    **FAMILY_ARCHITECTURES,
    **{name: FAMILIES[name] for name in ("BartForConditionalGeneration", "T5ForConditionalGeneration")},
}


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_new_weights_have_the_bits_of_an_executor_started_with_them(
    family: str, quantization: str, tmp_path: Path, cleanup: ExitStack
) -> None:
    directory = tmp_path / "old"
    save_tiny_architecture(directory, family, ARCHITECTURES[family])
    check_update(directory, trained(directory, tmp_path / "new"), cleanup, quantization=quantization)


FORMATS: Mapping[str, Mapping[str, Any]] = {
    **{name: settings for name, settings in SETTINGS.items() if name not in ("none", "int4")},
    "torch": {"cpu_kernels": "torch"},
    "int4 in torch": {"cpu_kernels": "torch", "quantization": "int4"},
    "bfloat16 in torch": {"dtype": "bfloat16"},
    "cache in FP8": {"kv_cache_dtype": "fp8_e4m3"},
    "2 ranks": {"tp": 2},
    "2 ranks, int4": {"tp": 2, "quantization": "int4"},
    "2 ranks in torch": {"tp": 2, "cpu_kernels": "torch"},
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_tied", [False, True])
def test_so_have_those_in_other_formats(name: str, is_tied: bool, tmp_path: Path, cleanup: ExitStack) -> None:
    save_tiny_model(tmp_path / "old", tie_word_embeddings=is_tied)
    check_update(tmp_path / "old", trained(tmp_path / "old", tmp_path / "new"), cleanup, **FORMATS[name])


def test_bfloat16_stays_as_it_is_stored(tmp_path: Path, cleanup: ExitStack) -> None:
    plain, directory = tmp_path / "plain", tmp_path / "old"
    save_tiny_model(plain)
    shutil.copytree(plain, directory)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(plain / "model.safetensors").items()}
    save_file(tensors, directory / "model.safetensors")

    worker = check_update(directory, trained(directory, tmp_path / "new"), cleanup)

    with pytest.raises(ModelLoadError, match=r"model.safetensors: the tensor .* is F32, but the executor keeps"):
        worker.update_weights(plain, "")


def test_codes_are_replaced_by_codes(tmp_path: Path, cleanup: ExitStack) -> None:
    save_tiny_model(tmp_path / "plain")
    for name, edit in (("old", torch.neg), ("new", torch.relu)):
        scaled = trained(tmp_path / "plain", tmp_path / f"{name} in floats", edit)
        shutil.copy(tmp_path / "plain" / "config.json", scaled)
        write_codes(scaled, tmp_path / name, "blocks")

    worker = check_update(tmp_path / "old", tmp_path / "new", cleanup)

    with pytest.raises(ModelLoadError, match="are stored in other formats: unquantized and F8_E4M3"):
        worker.update_weights(tmp_path / "plain", "")


def test_scales_of_an_fp8_cache_stay(tmp_path: Path, cleanup: ExitStack) -> None:
    save_tiny_model(tmp_path / "old")
    worker = load(tmp_path / "old", cleanup, kv_cache_dtype="fp8_e4m3")
    weights = trained(tmp_path / "old", tmp_path / "new")
    edit_tensors(weights, **{"model.layers.1.self_attn.k_proj.k_scale": torch.tensor(0.5)})
    with pytest.raises(ModelLoadError, match="has other scales of an FP8 cache than the executor"):
        worker.update_weights(weights, "")


# Refusals ----------------------------------------------------------------------------------------


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def write_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder.parent / "old" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def cut(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1])


def move_out(folder: Path) -> None:
    outside = folder.parent.with_suffix(".safetensors")
    shutil.move(folder / "model.safetensors", outside)
    (folder / "model.safetensors").symlink_to(outside)


REFUSED: dict[str, tuple[Edit, str]] = {
    "no files": (lambda folder: (folder / "model.safetensors").unlink(), "has no tensors in safetensors files"),
    "a file that is cut": (cut, "model.safetensors is corrupt"),
    "a tensor that is missing": (lambda folder: edit_tensors(folder, **{UP: None}), f"{UP} is missing from .*new"),
    "a tensor too many": (
        lambda folder: edit_tensors(folder, other=torch.zeros(3)),
        "model.safetensors contains the tensor other, which the model does not have",
    ),
    "a tensor of another shape": (
        lambda folder: edit_tensors(folder, **{UP: torch.zeros(48, 31)}),
        rf"model.safetensors contains the tensor {UP} with shape \[48, 31\]; config.json requires \[48, 32\]",
    ),
    "a tensor of codes": (
        lambda folder: edit_tensors(folder, **{UP: torch.zeros(48, 32, dtype=torch.int8)}),
        f"model.safetensors: the tensor {UP} is I8",
    ),
    "a head of its own": (
        lambda folder: edit_tensors(folder, **{"lm_head.weight": torch.ones(97, 32)}),
        "contains the tensor lm_head.weight, which differs from the embedding",
    ),
    "a link out": (move_out, "model.safetensors is a link out of --weights-dir; put the file itself there"),
    "another model": (
        lambda folder: write_config(folder, rms_norm_eps=1e-3, hidden_act="gelu"),
        "config.json is of another model: it has other layers, norm",
    ),
    "a model that is not known": (lambda folder: write_config(folder, architectures=["XForCausalLM"]), "XForCausalLM"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_refused_changes_nothing(name: str, tp: int, tmp_path: Path, cleanup: ExitStack) -> None:
    save_tiny_model(tmp_path / "old", tie_word_embeddings=True)
    weights = trained(tmp_path / "old", tmp_path / "new")
    good = trained(tmp_path / "old", tmp_path / "good")
    worker = load(tmp_path / "old", cleanup, tp=tp)
    before, said = bits_of(worker), worker.info
    assert worker.weights_bytes == (tmp_path / "old" / "model.safetensors").stat().st_size
    edit, reason = REFUSED[name]
    edit(weights)

    with pytest.raises(ModelLoadError, match=reason):
        worker.update_weights(weights, "")

    assert bits_of(worker) == before
    assert worker.info == said
    worker.update_weights(good, "")
    assert bits_of(worker) != before


def test_a_config_of_the_same_model_counts_in_the_digest(tmp_path: Path, cleanup: ExitStack) -> None:
    save_tiny_model(tmp_path / "old")
    worker = load(tmp_path / "old", cleanup)
    plain = worker.info.weights_digest
    weights = trained(tmp_path / "old", tmp_path / "new", lambda tensor: tensor)
    write_config(weights, comment="trained")
    worker.update_weights(weights, load(weights, cleanup).info.weights_digest)
    with_config = worker.info.weights_digest
    (weights / "config.json").unlink()
    worker.update_weights(weights, "")
    assert len({plain, with_config, worker.info.weights_digest}) == 3


def test_pieces_without_an_index_are_one_model(tmp_path: Path, cleanup: ExitStack) -> None:
    save_tiny_model(tmp_path / "old")
    weights = trained(tmp_path / "old", tmp_path / "new")
    expected = loaded_from(tmp_path / "old", weights, cleanup)
    tensors = load_file(weights / "model.safetensors")
    (weights / "model.safetensors").unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        save_file({name: tensors[name] for name in part}, weights / f"{number:05}.safetensors")
    worker = load(tmp_path / "old", cleanup)

    worker.update_weights(weights, expected.info.weights_digest)

    assert bits_of(worker) == bits_of(expected)
    save_file({names[0]: tensors[names[0]]}, weights / "00003.safetensors")
    with pytest.raises(ModelLoadError, match=r"which is in 0000[12]\.safetensors too"):
        worker.update_weights(weights, "")


def test_another_digest_changes_nothing_and_what_fails_half_way_loses_the_device(
    tmp_path: Path, cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path / "old")
    worker = load(tmp_path / "old", cleanup)
    before = bits_of(worker)
    with pytest.raises(ModelLoadError, match=r"new has the digest .{64}, not 0{64} as was asked for"):
        worker.update_weights(trained(tmp_path / "old", tmp_path / "new"), "0" * 64)
    assert bits_of(worker) == before

    def fail(*_: object) -> None:
        raise ModelLoadError("model.safetensors is corrupt")

    monkeypatch.setattr(Checkpoint, "_copy_tensor", fail)
    with pytest.raises(DeviceLostError, match=r"loading new weights failed half way: model.safetensors is corrupt"):
        worker.update_weights(tmp_path / "old", "")


@pytest.mark.parametrize(
    ("name", "reason"), [("GPTNeoXForCausalLM", "transformers' code runs this model"), ("BertModel", "is an encoder")]
)
def test_an_executor_that_cannot_replace_weights_says_so_at_its_start(
    name: str, reason: str, tmp_path: Path, cleanup: ExitStack
) -> None:
    save_tiny_architecture(tmp_path / "old", name, {})
    with pytest.raises(ModelLoadError, match=f"--weights-dir is set, but .*{reason}.*: remove it"):
        load(tmp_path / "old", cleanup)
    assert not load(tmp_path / "old", cleanup, weights_dir=()).info.updates_weights


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("cpu_kernels", ["native", "torch"])
def test_sleep_gives_memory_back(
    cpu_kernels: str, tmp_path: Path, cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor_svc.worker.assembly.CacheEngine", PoisonedCacheEngine)  # all of it is written
    save_tiny_model(tmp_path / "old", hidden_size=512, intermediate_size=4096)
    assert bytearray(30 * 2**20)  # what is freed stays with glibc from now on
    # Weights of 63 MB, and a cache of 82 MB.
    worker = load(tmp_path / "old", cleanup, num_device_blocks=5000, cpu_kernels=cpu_kernels)
    first, behind, before = bits_of(worker), [bytearray(100_000) for _ in range(40)], resident_bytes()
    worker.sleep(1)
    without_cache = resident_bytes()
    worker.sleep(2)
    without_weights = resident_bytes()
    assert before - without_cache > 60e6
    assert without_cache - without_weights > 45e6
    del behind
    worker.update_weights(tmp_path / "old", "")
    worker.wake()
    assert bits_of(worker) == first


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "MixtralForCausalLM", "Qwen3_5ForCausalLM"])
def test_weights_that_leave_their_memory_come_back(
    family: str, tmp_path: Path, cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the storages of all weights shrink to nothing."""
    monkeypatch.setattr(ReturnableMemory, "_is_on_gpu", True)
    save_tiny_architecture(tmp_path / "old", family, FAMILY_ARCHITECTURES[family])
    new = trained(tmp_path / "old", tmp_path / "new")
    worker = check_update(tmp_path / "old", new, cleanup, cpu_kernels="torch")
    first = bits_of(worker)
    worker.sleep(1)
    assert isinstance(worker, TorchWorker)
    assert worker._weights is not None
    assert not any(storage.nbytes() for storage in worker._weights.memory._storages)
    worker.sleep(2)
    worker.update_weights(tmp_path / "old", "")
    worker.wake()
    assert bits_of(worker) == first


@pytest.mark.slow
def test_a_hundred_updates_and_sleeps_take_no_memory(tmp_path: Path, cleanup: ExitStack) -> None:
    save_tiny_model(tmp_path / "old", hidden_size=256, intermediate_size=1024)  # 8 MB
    weights = [tmp_path / "old", trained(tmp_path / "old", tmp_path / "new")]
    worker = load(tmp_path / "old", cleanup, num_device_blocks=10_000)

    def play(num_updates: int) -> int:
        for number in range(num_updates):
            worker.update_weights(weights[number % 2], "")
            worker.sleep(1)
            worker.wake()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    play(10)
    assert play(100) - play(0) < 8 * 1024  # KiB
