"""Workloads, the list of engines, the model's costs, the machine's limits, the installer, the command line."""

import json
import subprocess
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as FileType

from benchmarks.end_to_end import __main__ as command
from benchmarks.end_to_end import engines, peers
from benchmarks.end_to_end.engines import CLASSES, EngineSpec, all_engines, model_costs, our_formats
from benchmarks.end_to_end.limits import measure
from benchmarks.end_to_end.workloads import WORKLOADS, Workload, by_name
from octavo.bench.provenance import provenance
from tests.numerics.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.support.gguf_files import write_small_gguf


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_requests_have_their_lengths_and_ids_that_are_new_with_every_seed(workload: Workload) -> None:
    first, again, other = (workload.requests(seed, 49_152) for seed in (1, 1, 2))
    lengths = [(len(request.prompt), request.output_tokens) for request in first]
    assert lengths == [(shape.prompt_tokens, shape.output_tokens) for shape in workload.shapes]
    assert first == again
    assert first[0].prompt[:8] != other[0].prompt[:8]


def test_only_the_prefix_is_shared() -> None:
    first, second = by_name("W4").requests(1, 49_152)[:2]
    assert first.prompt[:512] == second.prompt[:512]
    assert first.prompt[512:] != second.prompt[512:]


def test_every_number_format_of_the_executor_is_measured_beside_its_class() -> None:
    specs = all_engines()
    ours = [spec for spec in specs if spec.product == engines.OURS]
    assert [spec.number_format for spec in ours] == list(our_formats())
    assert {spec.number_class for spec in specs} <= set(CLASSES)
    assert [spec.name for spec in ours if spec.weight_bits is None] == [], "say how many bits a weight has"
    assert len({spec.name for spec in specs}) == len(specs)


def test_an_engine_that_is_not_here_says_which_command_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "ROOT", tmp_path)
    monkeypatch.setattr(engines, "PEERS_FOLDER", tmp_path / ".venv-bench")
    reasons = {spec.name: engines.why_missing(spec, tmp_path) for spec in all_engines()}
    assert reasons["transformers float32"] is None
    assert reasons["vLLM float32"] == ".venv-bench/vllm/bin/python is missing; make bench-peers makes it"
    python = engines.peer_python("openvino")
    python.parent.mkdir(parents=True)
    python.touch()
    assert engines.why_missing(EngineSpec("OpenVINO", "int8", "8 bits", "", peer="openvino"), tmp_path) == (
        ".venv-bench/models/openvino-int8 is missing; make bench-peers makes it"
    )


def test_the_costs_of_a_model_are_those_of_its_matrices(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, tie_word_embeddings=True)
    costs = model_costs(tmp_path)
    embeddings = model.get_input_embeddings().weight.numel()
    assert costs.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert costs.prefill_flops == 2 * (costs.num_parameters - embeddings)
    assert costs.head_flops == 2 * embeddings
    assert costs.vocab_size == VOCAB_SIZE
    assert costs.attention_flops == 4 * 2 * 32  # layers, width of all heads


def test_a_gguf_file_is_loaded_as_it_is_by_both_engines_that_read_one(tmp_path: Path) -> None:
    file = write_small_gguf(tmp_path / "m.gguf", FileType.Q8_0)
    specs = command.chosen_engines(command._parse(["--model", str(file)]))
    assert [(spec.name, spec.number_class) for spec in specs] == [
        ("Octavo Q8_0", "8 bits"),
        ("llama.cpp Q8_0", "8 bits"),
    ]
    assert {engines.options_of(spec, file, 2, 64).model for spec in specs} == {str(file)}
    costs = model_costs(file)  # an embedding of 256 x 256, and a norm
    assert (costs.name, costs.num_parameters) == ("m", 256 * 256 + 256)
    assert (costs.prefill_flops, costs.head_flops) == (2 * 256, 2 * 256 * 256)


@pytest.mark.usefixtures("one_thread")
def test_the_limits_are_rates_of_this_machine() -> None:
    sample = measure(1, read_bytes=1 << 24, fma_steps=100_000, gemm=128)
    assert sample.read_gb is not None
    assert sample.fma_gflop is not None
    assert sample.gemm_gflop is not None
    assert 0.1 < sample.read_gb < 2_000
    assert 1 < sample.fma_gflop < 5_000


def test_what_cannot_be_installed_is_said_and_the_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        subprocess.run([sys.executable, "-c", "raise SystemExit(3)"], check=True)

    def lack() -> None:
        raise FileNotFoundError("there is no C++ compiler")

    monkeypatch.setattr(peers, "PEERS_FOLDER", tmp_path / "peers")
    monkeypatch.setattr(peers, "INSTALLERS", {"a": fail, "b": lack, "c": lambda: None})
    assert peers.install(["a", "b", "c"]) == ["a", "b"]
    assert [line for line in capsys.readouterr().out.splitlines() if "installed" in line] == [
        "== a cannot be installed here (exit code 3); make bench leaves it out",
        "== b cannot be installed here (there is no C++ compiler); make bench leaves it out",
        "== c is installed",
    ]


def test_a_wheel_is_installed_with_what_it_asks_for_but_builds_for_cuda(tmp_path: Path) -> None:
    wheel = tmp_path / "v.whl"
    asked = ["regex", "torch==2.13.0+cpu; platform_machine == 'x'", "torchvision", "numpy>=2", "ray; extra == 'ray'"]
    with zipfile.ZipFile(wheel, "w") as archive:
        lines = ["Metadata-Version: 2.4", *(f"Requires-Dist: {requirement}" for requirement in asked)]
        archive.writestr("v-1.dist-info/METADATA", "\n".join(lines) + "\n\nTorch is not needed.\n")
    assert peers.requirements(wheel) == ["regex", "numpy>=2"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--quick", "--engines", "transformers", "vllm"], ["transformers float32"]),
        (["--formats", "int8", "--engines", "octavo", "llama.cpp"], ["Octavo int8", "llama.cpp Q8_0"]),
        (["--formats", "none", "--engines", "openvino"], ["OpenVINO float32"]),
    ],
)
def test_the_command_line_chooses_engines(arguments: list[str], expected: list[str]) -> None:
    assert [spec.name for spec in command.chosen_engines(command._parse(arguments))] == expected


def test_what_a_result_says_of_its_making_has_no_paths_and_no_name() -> None:
    made = provenance("python", "-m", "x", "--output", "/root/secret/a.json", "--openai", "http://h/v1")
    assert made.command == "python -m x --output a.json --openai http://h/v1"
    assert made.machine.kind.endswith(f"{made.machine.cores}-cores")
    assert json.loads(made.json({"rows": [1]})) == {**asdict(made), "rows": [1]}
