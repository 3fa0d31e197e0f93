"""`octavo list`: what of two caches and of a hub's model can be served, in columns and as JSON."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as FileType
from safetensors.numpy import save

from octavo.commands.command_line import run
from octavo.models.hub_transfer import pull_hub_model
from octavo.models.progress import ignore_progress
from tests.support.gguf_files import pull_into_ollama, write_small_gguf
from tests.support.hub import Hub, Repo, running_hub, use_hub
from tests.unit.octavo.stand_in import StandIn

CONFIG = b'{"architectures": ["LlamaForCausalLM"]}'
WEIGHTS = save({"w": np.zeros(1_500_000, np.float16)})


def in_codes(number_format: str, num_bytes: int, shape: list[int], **settings: object) -> Repo:
    """Return a model whose one matrix is codes."""
    tensor = {"dtype": number_format, "shape": shape, "data_offsets": [0, num_bytes]}
    header = json.dumps({"layer.weight_packed" if number_format == "I32" else "layer.weight": tensor}).encode()
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": settings}
    weights = len(header).to_bytes(8, "little") + header + bytes(num_bytes)
    return Repo({"config.json": json.dumps(config).encode(), "model.safetensors": weights})


INT8 = {"type": "int", "num_bits": 8, "strategy": "channel"}
IN_FP8 = in_codes("F8_E4M3", 8_000_000, [4000, 2000], quant_method="fp8")
IN_INT8 = in_codes(
    "I32",
    8_000_000,
    [4000, 500],
    quant_method="compressed-tensors",
    format="pack-quantized",
    config_groups={"group_0": {"weights": INT8}},
)
TINY = Repo({"config.json": CONFIG, "model.safetensors": WEIGHTS}, revisions=("main", "v1"))
NOBODY = ["--address", "127.0.0.1:1"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    quantized = b'{"quantization_config": {"quant_method": "awq"}}'
    repos = {
        "tiny": TINY,
        "half": Repo({"config.json": CONFIG, "model.safetensors": WEIGHTS}),
        "fp8": IN_FP8,
        "w8a16": IN_INT8,
        "awq": Repo({"config.json": quantized, "model.safetensors": b"weights"}),
    }
    with running_hub(**repos) as hub:
        use_hub(hub, tmp_path / "hub", monkeypatch)
        monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "octavo"))
        monkeypatch.setenv("HOME", str(tmp_path))
        yield hub


def listed(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert run(["list", *flags]) == 0
    return capsys.readouterr().out


def test_without_any_model_it_says_which_one_can_be_pulled(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys, *NOBODY).splitlines()[:-2] == [
        "NAME     SIZE  FORMAT  ARCHITECTURE  NEEDS  WHERE",
        "smollm2                                     not downloaded yet (92.9 MB): octavo pull smollm2",
    ]


@pytest.mark.model
def test_the_demo_model_is_listed_and_pulled_as_a_file(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = json.loads(listed(capsys, "--json", *NOBODY))["models"][0]
    size = demo_model.stat().st_size

    assert row.pop("needed_bytes") == pytest.approx(0.7e9, rel=0.1)
    assert row == {
        "name": "smollm2",
        "state": "ready",
        "architecture": "LlamaForCausalLM",
        "format": "Q4_1",
        "num_weight_bytes": size,
        "num_bytes": size,
        "directory": str(demo_model),
        "trouble": "",
    }
    assert run(["pull", "smollm2"]) == 0
    first, needs, last = capsys.readouterr().out.splitlines()
    assert (first, last) == (f"smollm2: 98.4 MB in {demo_model}", "next: octavo up --model smollm2")
    assert needs.startswith("Q4_1, LlamaForCausalLM: needs 0.7 GB, ")


def test_models_of_the_hub_that_can_be_served_are_listed(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(stage: str, completed: int, total: int | None) -> None:
        raise KeyboardInterrupt

    for name in ("tiny@v1", "tiny", "awq"):
        pull_hub_model(f"org/{name}", ignore_progress)
    with pytest.raises(KeyboardInterrupt):
        pull_hub_model("org/half", stop)

    assert listed(capsys, *NOBODY).splitlines()[2:-2] == [
        "org/half  39 bytes          LlamaForCausalLM            partly downloaded: octavo pull org/half",
        "org/tiny  3.0 MB    F16     LlamaForCausalLM  406.0 MB  ~/hub",
    ]
    assert json.loads(listed(capsys, "--json", *NOBODY))["models"][2] == {
        "name": "org/tiny",
        "state": "ready",
        "architecture": "LlamaForCausalLM",
        "format": "F16",
        "num_weight_bytes": len(WEIGHTS),
        "num_bytes": len(WEIGHTS) + len(CONFIG),
        "needed_bytes": 406_000_000,
        "directory": f"{tmp_path}/hub/models--org--tiny/snapshots/{TINY.commit}",
        "trouble": "",
    }


def test_another_revision_is_listed_with_its_name(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    pull_hub_model("org/tiny@v1", ignore_progress)

    assert listed(capsys, *NOBODY).splitlines()[2].startswith("org/tiny@v1  3.0 MB")


def test_gguf_files_of_the_hub_ollama_and_lm_studio_are_listed_with_what_their_headers_say(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    content = write_small_gguf(tmp_path / "m.gguf", FileType.Q8_0).read_bytes()
    hub.repos["org/files"] = Repo({"m.Q8_0.gguf": content, "m.gguf": content, "mmproj-Q8_0.gguf": content})
    for name in ("org/files:Q8_0", "org/files/m.gguf"):
        pull_hub_model(name, ignore_progress)
    pull_into_ollama(tmp_path / "ollama", "registry.ollama.ai/library/tiny/1b", content)
    pull_into_ollama(tmp_path / "ollama", "registry.ollama.ai/library/cut-off/latest", content[:-100])
    studio = tmp_path / ".lmstudio" / "models" / "org" / "files"
    studio.mkdir(parents=True)
    write_small_gguf(studio / "m-Q4_0.gguf", FileType.Q4_0)
    (studio / "mmproj-m.gguf").write_bytes(content)

    rows = listed(capsys, *NOBODY).splitlines()[2:-2]

    assert [row.split("  ")[0] for row in rows] == [
        "ollama:cut-off:latest",
        "ollama:tiny:1b",
        "org/files/m.gguf",
        "org/files:Q8_0",
        "~/.lmstudio/models/org/files/m-Q4_0.gguf",
    ]
    assert " cannot be served: " in rows[0]
    assert rows[0].endswith("it is truncated, or damaged")
    told = [row.split()[-5:] for row in rows[1:]]
    assert [(each[0], each[1]) for each in told] == [("Q8_0", "LlamaForCausalLM")] * 3 + [("Q4_0", "LlamaForCausalLM")]
    assert [each[-1] for each in told] == ["~/ollama/blobs", "~/hub", "~/hub", "~/.lmstudio/models/org/files"]


async def test_the_model_that_is_served_is_named(
    stand_in: StandIn, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    said = await asyncio.to_thread(listed, capsys, "--address", stand_in.address)

    assert said.endswith(f"\n\nserved at {stand_in.address}: tiny\nwith adapters: poet\n")


def test_codes_with_scales_are_listed_with_what_they_are_and_need(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("fp8", "w8a16"):
        pull_hub_model(f"org/{name}", ignore_progress)

    assert listed(capsys, *NOBODY).splitlines()[2:-2] == [
        "org/fp8    8.0 MB  F8_E4M3  LlamaForCausalLM  408.2 MB  ~/hub",
        "org/w8a16  8.0 MB  I8       LlamaForCausalLM  408.2 MB  ~/hub",
    ]
