"""Experts stacked as Qwen3.5's files have them: the same bits as with one tensor an expert, or a refusal by name."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from executor_svc.checkpoint.weights import Checkpoint
from octavo_shared.errors import ModelLoadError
from tests.numerics.architectures import ARCHITECTURES, save_tiny_architecture
from tests.numerics.driver import RecordingSampler
from tests.numerics.mxfp4 import Tensors
from tests.numerics.reference import choose, logits_of
from tests.support.each_row import each_row

NAME = "Qwen3_5MoeForCausalLM"
EXPERTS = "model.layers.1.mlp.experts."


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with one tensor an expert, as transformers saves it."""
    directory = tmp_path_factory.mktemp("apart")
    save_tiny_architecture(directory, NAME, ARCHITECTURES[NAME])
    return directory


def stacked(apart: Path) -> Tensors:
    """Return its tensors with experts stacked: gate in front of up, outputs before inputs."""
    tensors: Tensors = load_file(apart / "model.safetensors")
    modules = {name[: match.end() - 1] for name in tensors if (match := re.search(r"\.experts\.", name))}
    for module in modules:
        gate, up, down = (
            np.stack([tensors.pop(f"{module}.{expert}.{part}_proj.weight") for expert in range(4)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{module}.gate_up_proj": np.concatenate([gate, up], 1), f"{module}.down_proj": down}
    return tensors


def write(apart: Path, directory: Path, tensors: Tensors) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_bytes((apart / "config.json").read_bytes())
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@each_row({}, {"quantization": "int8-a8"})
def test_stacked_experts_have_the_bits_of_experts_apart(
    settings: dict[str, str], *, apart: Path, tmp_path: Path, recorder: RecordingSampler
) -> None:
    directory = write(apart, tmp_path / "stacked", stacked(apart))
    combined = write(
        apart,
        tmp_path / "combined",
        {name.replace("model.", "model.language_model.", 1): each for name, each in stacked(apart).items()},
    )
    text = json.loads((apart / "config.json").read_text())
    config = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text, "model_type": "qwen3_5_moe"}
    (combined / "config.json").write_text(json.dumps(config))

    expected = logits_of(apart, recorder, **settings)

    assert torch.equal(logits_of(directory, recorder, **settings), expected)
    assert torch.equal(logits_of(combined, recorder, **settings), expected)


@each_row(
    (
        lambda t: t.update({f"{EXPERTS}down_proj": t[f"{EXPERTS}down_proj"][1:]}),
        "{0}down_proj with shape [3, 32, 24]; config.json requires [4, 32, 24]",
    ),
    (
        lambda t: t.update({f"{EXPERTS}gate_up_proj": t[f"{EXPERTS}gate_up_proj"][:, 1:]}),
        "{0}gate_up_proj with shape [4, 47, 32]; config.json requires [4, 48, 32]",
    ),
    (lambda t: t.pop(f"{EXPERTS}down_proj"), "{0}down_proj is missing"),
)
def test_bad_stacks_are_refused_by_name(
    change: Callable[[Tensors], object], message: str, *, apart: Path, tmp_path: Path
) -> None:
    tensors = stacked(apart)
    change(tensors)
    write(apart, tmp_path, tensors)

    with pytest.raises(ModelLoadError) as refusal:
        choose(tmp_path).load(Checkpoint(tmp_path))

    assert message.format(EXPERTS) in str(refusal.value)
    assert str(tmp_path / "model.safetensors") in str(refusal.value)
