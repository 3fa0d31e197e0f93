"""Adapters: what they ask of an engine, and what they tell of its answers."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.end_to_end.adapters.interface import Options
from benchmarks.end_to_end.adapters.peers import NUM_SLOTS, LlamaCppServer, TransformersGenerate, first_token_time
from benchmarks.end_to_end.engine_process import ROOT
from benchmarks.end_to_end.workloads import Request
from tests.numerics.tiny_models import save_tiny_model

FAKE_SERVER = Path(__file__).with_name("fake_llama_server.py")


def options(model: Path, number_format: str, program: str = "") -> Options:
    return Options(str(model), number_format, 1, [0], 64, program)


@pytest.mark.usefixtures("one_thread")
def test_transformers_makes_the_tokens_of_ragged_requests_and_times_the_first(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    engine = TransformersGenerate(options(tmp_path, "float32"))
    assert engine.start().settings["dtype"] == "float32"
    generation = engine.generate([Request([5, 6, 7], 2), Request([8], 6)])
    assert generation.output_tokens == [2, 6]
    assert len(set(generation.first_token_s)) == 1
    assert 0 < generation.first_token_s[0] < generation.seconds
    engine.stop()


def test_llama_cpp_gets_a_slot_for_each_request_or_one_for_a_long_prompt(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text(f"#!{sys.executable}\n{FAKE_SERVER.read_text(encoding='utf-8')}", encoding="utf-8")
    program.chmod(0o755)
    program.with_name("VERSION").write_text("11434.0.0\n", encoding="utf-8")
    engine = LlamaCppServer(options(tmp_path / "model.gguf", "F32", str(program)))
    try:
        assert engine.start().versions == {"llama.cpp": "11434.0.0"}
        for requests, num_slots in (([Request([3], 2)] * 3, NUM_SLOTS), ([Request([3] * 2000, 2)], 1)):
            generation = engine.generate(requests)
            assert generation.output_tokens == [2] * len(requests)
            assert engine._num_slots == num_slots
        with pytest.raises(RuntimeError, match=r"llama-server answered 400: .*no such token"):
            engine.generate([Request([1], 2)])
    finally:
        engine.stop()
    assert engine._server is None


@pytest.mark.parametrize(("num_tokens", "expected_s"), [(1, 3.0), (5, 1.0)])
def test_the_first_token_of_llama_cpp_comes_before_the_time_of_the_others(num_tokens: int, expected_s: float) -> None:
    assert first_token_time({"tokens_predicted": num_tokens, "timings": {"predicted_ms": 2000.0}}, 3.0) == expected_s


def test_an_adapter_that_fails_says_why_and_ends(tmp_path: Path) -> None:
    """The real process, with what a library prints kept away from the answers."""
    lines = [asdict(options(tmp_path, "F32", "/nowhere/llama-server")), {"requests": []}]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.end_to_end.adapters.serve", "peers:LlamaCppServer"],
        input="\n".join(map(json.dumps, lines)),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"].startswith("FileNotFoundError: ")
    assert "Traceback" in done.stderr
