"""From `--model` to a directory that can be loaded; for whatever else it names, one sentence that says what to do.

Nothing here looks into config.json: `executor_svc/models/choice.py` does.
"""

import os
from pathlib import Path

from executor_svc.checkpoint.model_directory import INDEX_FILE, SINGLE_FILE, ModelDirectory
from shared.errors import ModelLoadError

FORMAT = f"config.json and {SINGLE_FILE} (or shards with {INDEX_FILE})"
# Weights in formats that are not read. Files of a training run have these names too.
WEIGHT_SUFFIXES = (".bin", ".gguf", ".h5", ".msgpack", ".nemo", ".onnx", ".pt", ".pth", ".safetensors")
TRAINING_FILES = ("optimizer", "rng_state", "scheduler", "training_args")
GIT_LFS_POINTER = b"version https://git-lfs"


def find_model_directory(model: str) -> ModelDirectory:
    """Return the directory `model`; if there is none, take it for a hub id and download it.

    Raises: ModelLoadError: neither works, or what is there is no model in the format that is read.
    """
    if directory := check_model_name(model):
        return directory
    path = _download(model)
    _check_directory(path, f"the hub model {model}")
    return ModelDirectory(path)


def check_model_name(model: str) -> ModelDirectory | None:
    """Return the directory `model`; None: by its looks it is a hub id. Nobody asks the hub.

    Raises: ModelLoadError: it can be neither, or the directory is no model in the format that is read.
    """
    if not model:
        raise ModelLoadError("--model is empty; it takes a directory or a hub id")
    try:
        path = Path(model).expanduser()
        is_directory, exists = path.is_dir(), path.exists()
    except OSError as error:
        raise ModelLoadError(f"the model directory {model} cannot be read: {error.strerror}") from error
    except RuntimeError as error:  # ~name of no user
        raise ModelLoadError(f"the model directory {model} does not exist: there is no such user") from error
    if is_directory:
        _check_directory(path, f"the model directory {path}")
        return ModelDirectory(path)
    if exists:
        raise ModelLoadError(_why_not_a_file(path))
    if _looks_like_path(model):
        raise ModelLoadError(f"the model directory {path} does not exist")
    _check_hub_id(model)
    return None


def _looks_like_path(model: str) -> bool:
    """Whether a name that exists nowhere cannot be meant as a hub id, which is `name` or `organisation/name`."""
    is_marked = os.path.isabs(model) or model.startswith((".", "~")) or model.endswith("/")
    return is_marked or model.count("/") > 1 or model.endswith((*WEIGHT_SUFFIXES, ".json"))


def _why_not_a_file(path: Path) -> str:
    wanted = f"--model takes a directory with {FORMAT}, or a hub id"
    if path.suffix == ".gguf":
        return f"{path} is a GGUF file, which Octavo does not read; {wanted}"
    if (path.parent / "config.json").is_file():
        return f"{path} is a file; give --model its directory, {path.parent}"
    return f"{path} is a file; {wanted}"


def _check_directory(path: Path, name: str) -> None:
    """Refuse a directory that is no model in the format that is read; `name` is what a person calls it."""
    try:
        file_names = sorted(os.listdir(path))
    except OSError as error:
        raise ModelLoadError(f"{name} cannot be read: {error.strerror}") from error
    if "config.json" not in file_names:
        raise ModelLoadError(f"{name} {_why_no_config(path, file_names)}")
    if not ((path / SINGLE_FILE).is_file() or (path / INDEX_FILE).is_file()):
        raise ModelLoadError(f"{name} {_why_no_weights(file_names)}")
    for file_name in file_names:
        if file_name.endswith(".safetensors") and _is_git_lfs_pointer(path / file_name):
            raise ModelLoadError(f"{path / file_name} is a pointer of Git LFS, not the file: run git lfs pull there")


def _why_no_config(path: Path, file_names: list[str]) -> str:
    if not file_names:
        return "is empty"
    if gguf := [name for name in file_names if name.endswith(".gguf")]:
        return f"holds {gguf[0]}: Octavo does not read GGUF; it needs a directory with {FORMAT}"
    if "adapter_config.json" in file_names:
        return "is an adapter (such as LoRA), not a model: merge it into its base model first"
    if {"snapshots", "blobs"} <= set(file_names):
        return (
            f"is a cache of the hub: give --model the hub id, {path.name.removeprefix('models--').replace('--', '/')}"
        )
    if "params.json" in file_names:
        return f"has params.json, a format of its makers: Octavo needs its Hugging Face form, with {FORMAT}"
    inner = [str(path / name) for name in file_names if (path / name / "config.json").is_file()]
    if len(inner) == 1:
        return f"has no config.json, but {inner[0]} has one: give --model that"
    return "has no config.json" + (f"; {', '.join(inner[:3])} have one: give --model one of them" if inner else "")


def _why_no_weights(file_names: list[str]) -> str:
    others = [
        name for name in file_names if name.endswith(WEIGHT_SUFFIXES) and not name.startswith((*TRAINING_FILES, "."))
    ]
    if others:
        return (
            f"holds its weights as {others[0]}, which Octavo does not read; it needs {SINGLE_FILE} (or shards with "
            f"{INDEX_FILE}), as save_pretrained of transformers writes them"
        )
    return f"has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}"


def _is_git_lfs_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(GIT_LFS_POINTER)) == GIT_LFS_POINTER
    except OSError:  # whoever loads it says so
        return False


def _check_hub_id(model: str) -> None:
    # Imported here: a local model needs no download library.
    from huggingface_hub import errors, utils

    try:
        utils.validate_repo_id(model)  # type: ignore[attr-defined]  # the module names what it exports late
    except errors.HFValidationError as error:
        reason = f"{model} is neither a directory nor a hub id, which is name or organisation/name"
        raise ModelLoadError(reason) from error


def _download(model: str) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except errors.GatedRepoError as error:
        reason = f"{model} is gated: accept its terms at https://huggingface.co/{model}, and set HF_TOKEN"
        raise ModelLoadError(reason) from error
    except errors.RepositoryNotFoundError as error:
        reason = f"{model} is neither a directory here nor a model of the hub; one that is private needs HF_TOKEN"
        raise ModelLoadError(reason) from error
    except errors.LocalEntryNotFoundError as error:
        cause = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"the hub cannot be reached{_detail(error)}"
        place = f"no earlier download is in {constants.HF_HUB_CACHE}"
        raise ModelLoadError(f"there is no directory {model} here, {cause}, and {place}") from error
    except (OSError, ValueError) as error:  # the roots of the hub's errors, and a full disk
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        raise ModelLoadError(f"there is no directory {model} here, and its download failed: {reason}") from error


def _detail(error: Exception) -> str:
    """Return what the network said, which the hub's library writes on the first of several lines."""
    first, _, others = str(error).strip().partition("\n")
    return f" ({first.removeprefix('Got: ')})" if others else ""
