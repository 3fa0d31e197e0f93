"""Every damage to a model directory gives one sentence that names the file."""

import json
import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_svc.checkpoint.model_directory import ModelDirectory
from executor_svc.checkpoint.weight_map import WeightMap
from executor_svc.checkpoint.weights import Checkpoint
from executor_svc.config import ExecutorConfig
from executor_svc.models.families import parse_config
from executor_svc.worker.loading import load_worker
from octavo_shared.errors import ModelLoadError, UnsupportedModelError
from tests.numerics.tiny_models import LLAMA3_ROPE, save_tiny_model

K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pristine")
    save_tiny_model(directory)
    return directory


@pytest.fixture
def directory(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "model"))


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def shard(directory: Path) -> dict[str, str]:
    """Split the weights into two files with an index; return its weight_map."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file_name, part in files.items():
        save_file({name: tensors[name] for name in part}, directory / file_name)
    weight_map = {name: file_name for file_name, part in files.items() for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "model.safetensors").unlink()
    return weight_map


def load_error(directory: Path | str) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_worker(ExecutorConfig(model=str(directory), num_device_blocks=1))
    message = str(caught.value)
    assert "\n" not in message
    return message


def load_all(directory: Path, shapes: dict[str, tuple[int, ...]] | None = None) -> dict[str, torch.Tensor]:
    """Load through Checkpoint into fresh float32 tensors, of the shapes of model.safetensors by default."""
    if shapes is None:
        shapes = {name: tuple(t.shape) for name, t in load_file(directory / "model.safetensors").items()}
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    weights = WeightMap()
    for name, shape in shapes.items():
        weights.add(name, shape, tensors[name])
    Checkpoint(directory).load_into(weights.targets, lambda name: False)
    return tensors


def test_targets_get_the_stored_values(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    targets = load_all(directory)

    for name, tensor in load_file(directory / "model.safetensors").items():
        assert torch.equal(targets[name], tensor)
    assert f"bytes={sum(t.nbytes for t in targets.values())} duration_s=" in caplog.text


def test_values_are_converted_to_the_dtype_of_their_target(directory: Path) -> None:
    expected = load_file(directory / "model.safetensors")
    edit_tensors(directory, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}))

    targets = load_all(directory)

    assert all(torch.equal(targets[name], tensor.bfloat16().float()) for name, tensor in expected.items())


def test_shards_load_like_one_file(directory: Path) -> None:
    expected = load_file(directory / "model.safetensors")
    shard(directory)

    targets = load_all(directory, {name: tuple(tensor.shape) for name, tensor in expected.items()})

    assert all(torch.equal(targets[name], tensor) for name, tensor in expected.items())


BRACKETS = "[" * 200_000


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "\xff", BRACKETS, f'{{"layer_types": {"[" * 200 + "]" * 200}}}', '{"a":' * 200_000]
)
def test_damaged_config(content: str, directory: Path) -> None:
    (directory / "config.json").write_bytes(content.encode("latin-1"))

    assert load_error(directory).startswith(f"{directory / 'config.json'} ")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": None}, "has no architecture"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"hidden_size": "big"}, "has hidden_size 'big'; it must be a whole number of at least 1"),
        ({"rms_norm_eps": -1.0}, "has rms_norm_eps -1.0; it must be a number above 0"),
        ({"mlp_bias": "yes"}, "has mlp_bias 'yes'; it must be true or false"),
        ({"num_key_value_heads": 3}, "has 4 attention heads, not a multiple of 3 KV heads"),
        ({"head_dim": 7}, "has head_dim 7; rotary embedding requires an even one"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "has no factor"),
        ({"rope_parameters": 3}, "has rope parameters 3; they must be an object"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 0}}, "has factor 0; it must be a number above 0"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": math.nan}},
            "has factor nan; it must be a number above 0",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": math.inf}}, "has factor inf; it must be a number"),
        ({"rope_parameters": {"rope_type": "yarn", "beta_slow": -1}}, "has beta_slow -1; it must be a number above 0"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1}},
            "has rope_theta 1.0; for yarn it must be a number ab",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}},
            "has rotary factors (short_factor) that",
        ),
        *(
            ({"partial_rotary_factor": factor}, f"has partial_rotary_factor {factor}; of a head_dim of 8 it must leave")
            for factor in (1.25, 0.4, 0.1, 1e308)
        ),
        ({"num_hidden_layers": 10**9}, "has num_hidden_layers 1000000000; at most 10000 are supported"),
        ({"num_attention_heads": 10**9}, "has num_attention_heads 1000000000; at most 10000 are supported"),
        (
            {"max_position_embeddings": 10**12},
            "has max_position_embeddings 1000000000000; at most 100000000 are supported",
        ),
        ({"text_config": {"num_hidden_layers": 10**9}}, "has text_config.num_hidden_layers 1000000000; at most 10000"),
    ],
)
def test_config_that_cannot_run(changes: dict[str, object], reason: str, directory: Path) -> None:
    edit_config(directory, **changes)

    message = load_error(directory)

    assert message.startswith(f"{directory / 'config.json'} ")
    assert reason in message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture GPT2LMHeadModel, which Octavo's own decoder does not have",
        ),
        ({"hidden_act": "mish"}, "has hidden_act 'mish'; supported are silu, swish, gelu"),
        ({"sliding_window": 4096}, "has sliding_window 4096, which is not supported"),
        (
            {"rope_parameters": {"rope_type": "axial"}},
            "rotary embedding of type axial; supported are default, linear, dynamic, llama3, yarn and longrope",
        ),
    ],
)
def test_what_our_own_code_does_not_have_may_be_in_that_of_transformers(
    changes: dict[str, object], reason: str, directory: Path
) -> None:
    edit_config(directory, **changes)

    with pytest.raises(UnsupportedModelError) as caught:
        parse_config(ModelDirectory(directory).config(), directory / "config.json")
    assert reason in str(caught.value)


@pytest.mark.parametrize("cpu_kernels", ["auto", "torch"])
def test_a_model_for_which_no_machine_has_the_memory_is_a_sentence(
    cpu_kernels: Literal["auto", "torch"], directory: Path
) -> None:
    edit_config(directory, hidden_size=10_000_000, intermediate_size=10_000_000)  # 400 TB a matrix

    with pytest.raises(ModelLoadError) as caught:
        load_worker(ExecutorConfig(model=str(directory), num_device_blocks=1, cpu_kernels=cpu_kernels))
    assert str(caught.value) == f"out of memory: the model in {directory}/config.json does not fit"


def test_damaged_generation_config(directory: Path) -> None:
    path = directory / "generation_config.json"
    path.write_text('{"eos_token_id": "end"}')

    assert load_error(directory) == f"{path} has eos_token_id 'end'; it must be an id or a list of ids"


@pytest.mark.parametrize("rope_type_key", ["rope_type", "type"])
def test_old_style_rope_settings_mean_the_same(rope_type_key: str, directory: Path) -> None:
    scaling = {name: value for name, value in LLAMA3_ROPE.items() if name not in ("rope_type", "rope_theta")}
    config = ModelDirectory(directory).config()
    del config["rope_parameters"]
    new_style = {**config, "rope_parameters": LLAMA3_ROPE}
    old_style = {**config, "rope_theta": 10_000.0, "rope_scaling": {**scaling, rope_type_key: "llama3"}}

    assert parse_config(old_style, directory) == parse_config(new_style, directory)
    assert parse_config(old_style, directory) != parse_config(config, directory)


@pytest.mark.parametrize("num_bytes", [0, 5, 1_000, 20_000])
def test_truncated_weights(num_bytes: int, directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])

    assert load_error(directory).startswith(f"{path} is corrupt: ")


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda tensors: tensors.pop(K_PROJ), f"the tensor {K_PROJ} is missing from FILE"),
        (
            lambda tensors: tensors.update({"model.extra.weight": torch.zeros(2)}),
            "FILE contains the tensor model.extra.weight, which the model does not have",
        ),
        (
            lambda tensors: tensors.update({K_PROJ: torch.zeros(16, 31)}),
            f"FILE contains the tensor {K_PROJ} with shape [16, 31]; config.json requires [16, 32]",
        ),
    ],
    ids=["missing", "extra", "of another shape"],
)
def test_tensors_that_do_not_fit(
    edit: Callable[[dict[str, torch.Tensor]], object], sentence: str, directory: Path
) -> None:
    edit_tensors(directory, edit)

    assert load_error(directory) == sentence.replace("FILE", str(directory / "model.safetensors"))


def test_tensors_that_the_model_computes_itself_may_be_stored(directory: Path) -> None:
    """Old Llama checkpoints carry rotary frequencies, and some tied ones their head."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {name: torch.zeros(4), "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}

    edit_tensors(directory, add)
    edit_config(directory, tie_word_embeddings=True)

    assert load_worker(ExecutorConfig(model=str(directory), num_device_blocks=1)).info.vocab_size == 97


def test_a_shard_may_hold_what_the_index_does_not_name_and_it_is_not_read(directory: Path) -> None:
    expected = load_file(directory / "model.safetensors")
    weight_map = shard(directory)
    with Checkpoint(directory).digest() as digest:
        before = digest.result()
    [other] = {"a.safetensors", "b.safetensors"} - {weight_map[K_PROJ]}
    stale = {K_PROJ: torch.zeros(3, 3), "model.extra.weight": torch.zeros(2)}
    save_file(load_file(directory / other) | stale, directory / other)

    targets = load_all(directory, {name: tuple(tensor.shape) for name, tensor in expected.items()})

    assert all(torch.equal(targets[name], tensor) for name, tensor in expected.items())
    with Checkpoint(directory).digest() as digest:
        assert digest.result() == before


def test_missing_shard(directory: Path) -> None:
    shard(directory)
    (directory / "b.safetensors").unlink()

    assert load_error(directory) == f"{directory / 'b.safetensors'} is missing"


@pytest.mark.parametrize("index", ["{", "{}", '{"weight_map": {"a": 3}}'])
def test_damaged_index(index: str, directory: Path) -> None:
    shard(directory)
    (directory / "model.safetensors.index.json").write_text(index)

    assert load_error(directory).startswith(f"{directory / 'model.safetensors.index.json'} ")


def test_missing_tensor_of_shards_names_the_index(directory: Path) -> None:
    weight_map = shard(directory)
    path = directory / weight_map.pop(K_PROJ)
    tensors = load_file(path)
    del tensors[K_PROJ]
    save_file(tensors, path)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))

    assert load_error(directory) == f"the tensor {K_PROJ} is missing from {index}"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda weight_map: {**weight_map, "model.extra.weight": "a.safetensors"},
            "DIRECTORY/a.safetensors does not contain the tensor model.extra.weight that the index lists there",
        ),
        (
            lambda weight_map: {name: file.replace("b.", "../b.") for name, file in weight_map.items()},
            "DIRECTORY/model.safetensors.index.json has no weight_map of tensor names to file names",
        ),
    ],
    ids=["a tensor that is not there", "a shard outside the directory"],
)
def test_an_index_that_does_not_fit(
    change: Callable[[dict[str, str]], dict[str, str]], sentence: str, directory: Path
) -> None:
    changed = change(shard(directory))
    (directory.parent / "b.safetensors").write_bytes((directory / "b.safetensors").read_bytes())
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": changed}))

    assert load_error(directory) == sentence.replace("DIRECTORY", str(directory))
