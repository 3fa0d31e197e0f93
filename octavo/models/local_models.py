"""The models of this machine that can be served, and those that Octavo can fetch: for `octavo list`.

Two places are looked at: the directory of demo models (`octavo/models/store.py`) and the cache of the Hugging Face hub.
Nobody is asked over the network, and nothing is loaded.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from executor_svc.checkpoint.hub_model import find_cached
from executor_svc.checkpoint.model_directory import ModelDirectory
from executor_svc.checkpoint.quantized import refuse_quantized
from octavo.models.hub_transfer import SUFFIX
from octavo.models.store import DEMO_MODELS, find_model
from octavo_shared.errors import ModelLoadError

if TYPE_CHECKING:  # only with the executor's packages
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo


class ModelState(StrEnum):
    """How far a model is from being served."""

    READY = "ready"
    PARTLY_PULLED = "partly pulled"
    NOT_PULLED = "not pulled"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that can be served, now or after a download.

    Attributes:
        name: What `octavo up --model` takes.
        state: Whether it is complete.
        architecture: As config.json names it; "": not known yet.
        num_weight_bytes: Of its safetensors, as far as they are here, or of its GGUF file.
        num_bytes: All that it takes on the disk; of a model that is not pulled: what a pull downloads.
        directory: Where it lies, of a GGUF file the file; None: nowhere yet.
    """

    name: str
    state: ModelState
    architecture: str
    num_weight_bytes: int
    num_bytes: int
    directory: Path | None


def list_local_models() -> list[LocalModel]:
    """Return the models of this machine by name, the demo models first.

    Of the hub's cache those that an executor would try to load: in the format that is read, and not quantized.
    """
    return [*_demo_models(), *sorted(_hub_models(), key=lambda model: model.name.lower())]


def _demo_models() -> Iterator[LocalModel]:
    for model in DEMO_MODELS:
        file = find_model(model.name)
        if file is None:
            yield LocalModel(model.name, ModelState.NOT_PULLED, "", 0, model.source.wheel_bytes, None)
        else:
            num_bytes = file.stat().st_size
            yield LocalModel(model.name, ModelState.READY, _architecture(file), num_bytes, num_bytes, file)


def _architecture(file: Path) -> str:
    """Return what config.json would name for a GGUF file; "": the package that reads it is not installed."""
    try:
        from executor_svc.checkpoint.gguf.config import build_config
        from executor_svc.checkpoint.gguf.header import read_header
        from executor_svc.checkpoint.gguf.metadata import Metadata
    except ModuleNotFoundError:
        return ""
    header = read_header(file)
    return _first_architecture(build_config(Metadata(file, header.values), header.tensors))


def _hub_models() -> Iterator[LocalModel]:
    try:
        from huggingface_hub import constants, scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ModuleNotFoundError:  # then nothing here could serve them
        return
    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for repo in repos:
        if repo.repo_type != "model":
            continue
        for revision in repo.revisions:
            try:
                if (model := _hub_model(repo, revision)) is not None:
                    yield model
            except ModelLoadError:  # damaged, or quantized
                continue


def _hub_model(repo: "CachedRepoInfo", revision: "CachedRevisionInfo") -> LocalModel | None:
    refs = sorted(revision.refs)
    is_default = "main" in refs
    name = repo.repo_id if is_default else f"{repo.repo_id}@{refs[0] if refs else revision.commit_hash}"
    if not (revision.snapshot_path / "config.json").is_file():
        return None
    if find_cached(repo.repo_id, revision.commit_hash) is not None:
        return _describe(name, ModelState.READY, revision.snapshot_path, revision.size_on_disk)
    partial_sizes = [path.stat().st_size for path in (repo.repo_path / "blobs").glob(f"*{SUFFIX}")]
    if not partial_sizes:
        return None
    num_bytes = revision.size_on_disk + sum(partial_sizes)
    return _describe(name, ModelState.PARTLY_PULLED, revision.snapshot_path, num_bytes)


def _describe(name: str, state: ModelState, directory: Path, num_bytes: int) -> LocalModel:
    """Return a model with what its directory says of it. Raises: ModelLoadError: it is damaged, or quantized."""
    config = ModelDirectory(directory).config()
    refuse_quantized(config, directory / "config.json")
    num_weight_bytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    return LocalModel(name, state, _first_architecture(config), num_weight_bytes, num_bytes, directory)


def _first_architecture(config: Mapping[str, object]) -> str:
    architectures = config.get("architectures")
    return str(architectures[0]) if isinstance(architectures, list) and architectures else ""
