"""From `--model` to a directory or GGUF file; for whatever else it names, one sentence that says what to do.

Nothing here looks into config.json: `executor_svc/models/selection.py` does.
"""

import os
from collections.abc import Callable
from pathlib import Path

from executor_svc.checkpoint.hub_model import HubModel, NotAtHubError, fetch_hub_model, find_cached_model, is_hub_id
from executor_svc.checkpoint.hub_name import HubName
from executor_svc.checkpoint.model_files import FORMAT, GGUF_MAGIC, WEIGHT_SUFFIXES, why_no_model
from executor_svc.checkpoint.ollama import PREFIX, find_ollama_file
from octavo_shared.errors import ModelLoadError

GIT_LFS_POINTER = b"version https://git-lfs"


def find_model_path(model: str, transfer: Callable[[HubModel], None] | None = None) -> Path:
    """Return the directory or GGUF file `model`; if there is none, take it for a hub id and download it.

    Args:
        model: A directory, a GGUF file, a model of Ollama, or a hub id and maybe @REVISION.
        transfer: As for `fetch_hub_model`.

    Raises: ModelLoadError: neither works, or what is there is no model in the format that is read.
    """
    if found := check_model_name(model):
        return found
    try:
        path = fetch_hub_model(model, transfer)
    except NotAtHubError as error:
        what = "file" if model.endswith(".gguf") else "directory"
        raise ModelLoadError(f"there is no {what} {model}, and {error}") from error
    if path.is_dir():
        _check_directory(path, f"the hub model {model}")
    return path


def find_local_model(model: str) -> Path | None:
    """Return what `find_model_path` finds if it is complete on this machine, without the hub.

    Raises: ModelLoadError: as `check_model_name`.
    """
    if found := check_model_name(model):
        return found
    name = HubName.of(model)
    assert name is not None, "it is a hub id by its looks"
    return find_cached_model(name)


def check_model_name(model: str) -> Path | None:
    """Return the directory or GGUF file `model`, also a model of Ollama; None: by its looks it is a hub id.

    The hub is not asked.

    Raises: ModelLoadError: it can be neither, or the directory is no model in the format that is read.
    """
    if not model:
        raise ModelLoadError("--model is empty; it takes a directory, a GGUF file or a hub id")
    if model.startswith(PREFIX):
        return find_ollama_file(model)
    try:
        path = Path(model).expanduser()
        is_directory, exists = path.is_dir(), path.exists()
    except OSError as error:
        raise ModelLoadError(f"the model directory {model} cannot be read: {error.strerror}") from error
    except RuntimeError as error:  # ~name of no user
        raise ModelLoadError(f"the model directory {model} does not exist: unknown user") from error
    if is_directory:
        _check_directory(path, f"the model directory {path}")
        return path
    if exists and (path.suffix == ".gguf" or (path.is_file() and _begins_with(path, GGUF_MAGIC))):
        return path
    if exists:
        raise ModelLoadError(_why_not_a_file(path))
    if _looks_like_path(model):
        what = "file" if path.suffix == ".gguf" else "directory"
        raise ModelLoadError(f"the model {what} {path} does not exist")
    if not is_hub_id(model):
        raise ModelLoadError(
            f"{model} is neither a directory, nor a GGUF file, nor a hub id (NAME or ORGANISATION/NAME)"
        )
    return None


def _looks_like_path(model: str) -> bool:
    """Whether a name that exists nowhere cannot be meant as a hub id, which is `name` or `organisation/name`."""
    is_marked = os.path.isabs(model) or model.startswith((".", "~")) or model.endswith("/")
    if not is_marked and (name := HubName.of(model)) is not None and name.is_gguf:
        return False
    return is_marked or model.count("/") > 1 or model.endswith((*WEIGHT_SUFFIXES, ".json"))


def _why_not_a_file(path: Path) -> str:
    wanted = f"--model takes a directory with {FORMAT}, a GGUF file, or a hub id"
    if (path.parent / "config.json").is_file():
        return f"{path} is a file; set --model to its directory, {path.parent}"
    return f"{path} is a file; {wanted}"


def _check_directory(path: Path, name: str) -> None:
    """Refuse a directory that is no model in the format that is read; `name` is what a person calls it."""
    try:
        file_names = sorted(os.listdir(path))
    except OSError as error:
        raise ModelLoadError(f"{name} cannot be read: {error.strerror}") from error
    if {"snapshots", "blobs"} <= set(file_names):
        hub_id = path.name.removeprefix("models--").replace("--", "/")
        raise ModelLoadError(f"{name} is a Hugging Face cache directory: set --model to the hub id, {hub_id}")
    inner = [str(path / each) for each in file_names if (path / each / "config.json").is_file()]
    if trouble := why_no_model(file_names, inner):
        raise ModelLoadError(f"{name} {trouble}")
    for file_name in file_names:
        if file_name.endswith(".safetensors") and _begins_with(path / file_name, GIT_LFS_POINTER):
            raise ModelLoadError(f"{path / file_name} is a Git LFS pointer, not the file: run git lfs pull there")


def _begins_with(path: Path, begin: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(begin)) == begin
    except OSError:  # loading it says so
        return False
