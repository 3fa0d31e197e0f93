"""The digest of the weights sees every byte that changes what is computed, and nothing else."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_svc.checkpoint import weights_digest
from executor_svc.checkpoint.weights import Checkpoint
from octavo_shared.errors import ModelLoadError

CONFIG = {"model_type": "none", "hidden_size": 8}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_digest, "PIECE_BYTES", 64)
    monkeypatch.setattr(weights_digest, "_READ_BYTES", 24)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tensors = {"a": torch.arange(60).float().view(3, 20), "b": torch.ones(5), "c": torch.zeros(0)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def digest_of(directory: Path) -> str:
    with Checkpoint(directory).digest() as digest:
        return digest.result()


def edit(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def last_bit(tensors: dict[str, torch.Tensor]) -> None:
    tensors["a"].view(torch.int32)[-1, -1] ^= 1


CHANGES: dict[str, Callable[[Path], object]] = {
    "the last bit of a later row": lambda directory: edit(directory, last_bit),
    "a name": lambda directory: edit(directory, lambda tensors: tensors.update(d=tensors.pop("b"))),
    "a shape": lambda directory: edit(directory, lambda tensors: tensors.update(a=tensors["a"].view(20, 3))),
    "a number format of the same bytes": lambda directory: edit(
        directory, lambda tensors: tensors.update(a=tensors["a"].view(torch.int32))
    ),
    "two tensors exchanged": lambda directory: edit(
        directory, lambda tensors: tensors.update(b=tensors["a"], a=tensors["b"])
    ),
    "config.json": lambda directory: (directory / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 1})),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_byte_counts(change: Callable[[Path], object], directory: Path) -> None:
    before = digest_of(directory)
    change(directory)

    assert digest_of(directory) != before


def test_how_files_are_cut_and_what_lies_beside_them_does_not_count(directory: Path) -> None:
    before = digest_of(directory)
    tensors = load_file(directory / "model.safetensors")
    parts = {"1.safetensors": ["b", "c"], "2.safetensors": ["a"]}
    for file_name, names in parts.items():
        save_file({name: tensors[name] for name in names}, directory / file_name, metadata={"format": file_name})
    weight_map = {name: file_name for file_name, names in parts.items() for name in names}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "model.safetensors").unlink()
    (directory / "generation_config.json").write_text('{"temperature": 0.5}')

    assert digest_of(directory) == before


def test_the_number_of_threads_does_not_count(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest_of(directory)
    monkeypatch.setattr(weights_digest, "NUM_THREADS", 1)

    assert digest_of(directory) == before


def test_a_file_that_vanishes_or_becomes_shorter_is_one_sentence(directory: Path) -> None:
    checkpoint, path = Checkpoint(directory), directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with checkpoint.digest() as digest, pytest.raises(ModelLoadError, match=f"{path} was truncated"):
        digest.result()

    path.unlink()
    with pytest.raises(ModelLoadError, match=f"{path} cannot be read"):
        checkpoint.digest()
