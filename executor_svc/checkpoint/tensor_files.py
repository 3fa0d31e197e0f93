"""Safetensors files, and which of them has which tensor of a model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from executor_svc.checkpoint.model_directory import INDEX_FILE, SINGLE_FILE, read_json_object
from octavo.values.wording import shown
from octavo_shared.errors import ModelLoadError


@contextmanager
def open_tensors(path: Path) -> Iterator[safe_open]:
    """Open a safetensors file. Raises: ModelLoadError: it is missing or damaged."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} is missing") from error
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is corrupt: {error}") from error


def find_tensors(directory: Path, *, any_names: bool = False) -> tuple[dict[str, Path], Path]:
    """Return the file of each tensor, and what lists them: the one file, the index, or the directory.

    With shards the index says it: what it does not name is not read.

    Args:
        directory: With the files.
        any_names: Whether files without an index may have any names.

    Raises: ModelLoadError: a file is missing or damaged, or the index does not fit the shards.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file():
        return dict.fromkeys(_tensor_names(single), single), single
    if index.is_file():
        return _indexed(directory, index), index
    if any_names:
        return _in_all_files(directory), directory
    raise ModelLoadError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}")


def _indexed(directory: Path, index: Path) -> dict[str, Path]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(_is_file_name(name) for name in weight_map.values()):
        raise ModelLoadError(f"{index} has no weight_map of tensor names to file names")
    held = {path: set(_tensor_names(path)) for path in {directory / name for name in weight_map.values()}}
    file_of = {name: directory / file_name for name, file_name in sorted(weight_map.items())}
    for name, path in file_of.items():
        if name not in held[path]:
            raise ModelLoadError(f"{path} does not contain the tensor {shown(name)} that the index lists there")
    return file_of


def _in_all_files(directory: Path) -> dict[str, Path]:
    file_of: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        for name in _tensor_names(path):
            if name in file_of:
                raise ModelLoadError(f"{path} contains the tensor {shown(name)}, which is in {file_of[name].name} too")
            file_of[name] = path
    if not file_of:
        raise ModelLoadError(f"{directory} has no tensors in safetensors files")
    return file_of


def _is_file_name(value: object) -> bool:
    """Whether an index names a file in its own directory, and nothing outside of it."""
    return isinstance(value, str) and Path(value).name == value


def _tensor_names(path: Path) -> list[str]:
    with open_tensors(path) as file:
        return list(file.keys())  # type: ignore[no-untyped-call]  # the library has no types
