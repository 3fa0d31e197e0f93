"""gpt-oss with its experts in MXFP4, as OpenAI stores them: the codes are kept, and give the logits of transformers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import GptOssForCausalLM

from executor_svc.checkpoint.weights import Checkpoint
from executor_svc.native.structs import NumberFormat
from octavo_shared.errors import ModelLoadError
from tests.numerics.architectures import PagedRun, load_architecture, save_tiny_architecture
from tests.numerics.driver import RecordingSampler
from tests.numerics.mxfp4 import Tensors, write_mxfp4
from tests.numerics.reference import choose, logits_of, random_prompt
from tests.support.each_row import each_row
from tests.support.gguf_files import write_mxfp4_gguf

SETTINGS = {"sliding_window": 9, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Tensors]:
    """Return a model in numbers, the same in MXFP4, and the tensors of that."""
    directory = tmp_path_factory.mktemp("gpt_oss")
    save_tiny_architecture(directory / "numbers", "GptOssForCausalLM", SETTINGS)
    coded, weights = write_mxfp4(directory / "numbers", directory / "codes")
    save_file(weights, directory / "numbers" / "model.safetensors", metadata={"format": "pt"})
    return directory / "numbers", directory / "codes", coded


def test_codes_are_kept(model: tuple[Path, Path, Tensors]) -> None:
    chosen = choose(model[1])

    chosen.load(Checkpoint(model[1]))

    assert chosen.stored is not None
    assert NumberFormat.MXFP4 in chosen.stored.used


def test_codes_give_the_logits_of_the_numbers_that_they_are(model: tuple[Path, Path, Tensors]) -> None:
    """Products take activations in 8 bits: logits differ by about 1 %, and where another expert is chosen by more."""
    numbers, codes, _ = model
    reference = GptOssForCausalLM.from_pretrained(numbers, attn_implementation="eager")
    prompt = random_prompt(45)
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]

    exact, actual = (PagedRun(*load_architecture(each)).prompt_logits(prompt, 16) for each in (numbers, codes))

    largest = expected.abs().max()
    assert (exact - expected).abs().max() < 1e-5 * largest
    assert (actual - expected).abs().amax(-1).median() < 0.03 * largest


def test_codes_are_restored_where_no_kernels_have_them(
    model: tuple[Path, Path, Tensors], recorder: RecordingSampler
) -> None:
    numbers, codes, _ = model

    settings = {"cpu_kernels": "torch"}
    assert torch.equal(logits_of(codes, recorder, **settings), logits_of(numbers, recorder, **settings))


def test_a_gguf_file_of_the_same_codes_has_the_same_bits(
    model: tuple[Path, Path, Tensors], recorder: RecordingSampler, tmp_path: Path
) -> None:
    file = write_mxfp4_gguf(model[1], tmp_path / "model.gguf")

    assert torch.equal(logits_of(file, recorder), logits_of(model[1], recorder))


LAYER = "model.layers.1.mlp.experts."
Change = Callable[[Tensors], object]


@each_row(
    ("scales are missing", lambda t: t.pop(f"{LAYER}down_proj_scales"), "its scales {0}down_proj_scales are missing"),
    (
        "a block is missing",
        lambda t: t.update({f"{LAYER}down_proj_blocks": t[f"{LAYER}down_proj_blocks"][:, :, :1]}),
        "{0}down_proj_blocks with shape [5, 32, 1, 16]; config.json requires [5, 32, 2, 16]",
    ),
    (
        "an expert lacks a row",
        lambda t: t.update({f"{LAYER}gate_up_proj_blocks": t[f"{LAYER}gate_up_proj_blocks"][:, 1:]}),
        "{0}gate_up_proj_blocks with shape [5, 127, 1, 16]; config.json requires [5, 128, 1, 16]",
    ),
    (
        "scales lack a row",
        lambda t: t.update({f"{LAYER}gate_up_proj_scales": t[f"{LAYER}gate_up_proj_scales"][:, 1:]}),
        "{0}gate_up_proj_scales in uint8 with shape [5, 127, 1]; they must be in uint8 with shape [5, 128, 1]",
    ),
    (
        "a scale is NaN",
        lambda t: t[f"{LAYER}down_proj_scales"].put(7, 255),
        "{0}down_proj_blocks has the scale 255, which is NaN; weights must be finite",
    ),
    (
        "a bias lacks an expert",
        lambda t: t.update({f"{LAYER}down_proj_bias": t[f"{LAYER}down_proj_bias"][1:]}),
        "{0}down_proj_bias with shape [4, 32]; config.json requires [5, 32]",
    ),
    (
        "sinks are missing",
        lambda t: t.pop("model.layers.0.self_attn.sinks"),
        "model.layers.0.self_attn.sinks is missing",
    ),
)
def test_bad_input_is_refused_by_name(
    what: str, change: Change, message: str, *, model: tuple[Path, Path, Tensors], tmp_path: Path
) -> None:
    tensors = {name: np.array(values) for name, values in model[2].items()}
    change(tensors)
    (tmp_path / "config.json").write_bytes((model[1] / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelLoadError) as refusal:
        choose(tmp_path).load(Checkpoint(tmp_path))

    assert message.format(LAYER) in str(refusal.value)
    assert str(tmp_path / "model.safetensors") in str(refusal.value)
