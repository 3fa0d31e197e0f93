"""The models that this machine can serve or Octavo can fetch: for `octavo list`.

Four places are looked at: the directory of demo models (`octavo/models/store.py`), the cache of the Hugging Face hub,
and the folders of Ollama and LM Studio. Nothing goes over the network, and nothing is loaded: headers are read.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from executor_svc.checkpoint.hub_model import find_cached
from executor_svc.checkpoint.hub_name import HubName, choose_gguf, model_ggufs, quantization_of
from executor_svc.checkpoint.ollama import find_ollama_file, ollama_folder, ollama_models
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
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that can be served, now or after a download.

    Attributes:
        name: What `octavo up --model` takes.
        state: Whether it is complete.
        architecture: As config.json names it; "": not known yet.
        format: In which most of its weights are, as the files name it; "": not known yet.
        num_weight_bytes: Of its files with weights, as far as they are here.
        num_bytes: All that it takes on the disk; of a model that is not pulled: what a pull downloads.
        needed_bytes: Memory that it needs to run as it is; None: not known yet.
        directory: Where it lies, a GGUF file by itself; None: nowhere yet.
        trouble: Why it is refused; "": it is not.
    """

    name: str
    state: ModelState
    architecture: str
    format: str
    num_weight_bytes: int
    num_bytes: int
    needed_bytes: int | None
    directory: Path | None
    trouble: str = ""


def list_local_models() -> list[LocalModel]:
    """Return the models of this machine by name, the demo models first.

    Of the hub's cache it lists models in a format that an executor reads. A GGUF file that is damaged, or of a kind
    that is not read, is there too, with the reason: people look for their files.
    """
    models = [*_hub_models(), *_ollama_models(), *_lm_studio_models()] if find_spec("gguf") else []  # which reads them
    return [*_demo_models(), *sorted(models, key=lambda model: model.name.lower())]


def _demo_models() -> Iterator[LocalModel]:
    for model in DEMO_MODELS:
        file = find_model(model.name)
        if file is None:
            yield LocalModel(model.name, ModelState.NOT_PULLED, "", "", 0, model.source.wheel_bytes, None, None)
        elif find_spec("gguf"):
            yield _gguf(model.name, file)
        else:
            size = file.stat().st_size
            yield LocalModel(model.name, ModelState.READY, "", "", size, size, None, file)


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
            yield from _hub_ggufs(repo, revision)
            try:
                if (model := _hub_model(repo, revision)) is not None:
                    yield model
            except ModelLoadError:  # damaged, or quantized
                continue


def _hub_name(repo: "CachedRepoInfo", revision: "CachedRevisionInfo") -> str:
    refs = sorted(revision.refs)
    return repo.repo_id if "main" in refs else f"{repo.repo_id}@{refs[0] if refs else revision.commit_hash}"


def _hub_ggufs(repo: "CachedRepoInfo", revision: "CachedRevisionInfo") -> Iterator[LocalModel]:
    """Yield the GGUF files of a revision, by their quantization if that leads to them."""
    root, name = revision.snapshot_path, _hub_name(repo, revision)
    files = [str(path.relative_to(root)) for path in root.rglob("*.gguf")]
    for file in model_ggufs(files):
        quantization = (quantization_of(file) or "").upper()
        is_found = quantization and choose_gguf(HubName(repo.repo_id, quantization=quantization), files)[0] == file
        yield _gguf(f"{name}:{quantization}" if is_found else f"{name}/{file}", root / file)


def _hub_model(repo: "CachedRepoInfo", revision: "CachedRevisionInfo") -> LocalModel | None:
    name = _hub_name(repo, revision)
    if not (revision.snapshot_path / "config.json").is_file():
        return None
    if find_cached(repo.repo_id, revision.commit_hash) is not None:
        return _describe(name, ModelState.READY, revision.snapshot_path, revision.size_on_disk)
    partial_sizes = [path.stat().st_size for path in (repo.repo_path / "blobs").glob(f"*{SUFFIX}")]
    if not partial_sizes:
        return None
    num_bytes = revision.size_on_disk + sum(partial_sizes)
    return _describe(name, ModelState.PARTLY_PULLED, revision.snapshot_path, num_bytes)


def _ollama_models() -> Iterator[LocalModel]:
    for name in ollama_models():
        try:
            yield _gguf(name, find_ollama_file(name))
        except ModelLoadError as error:
            yield LocalModel(name, ModelState.REFUSED, "", "", 0, 0, None, ollama_folder(), str(error))


def _lm_studio_models() -> Iterator[LocalModel]:
    """Yield the files of LM Studio, FOLDER/PUBLISHER/REPO/FILE.gguf, by their paths."""
    home = Path(os.path.expanduser("~"))
    for folder in (home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"):
        for file in model_ggufs(sorted(map(str, folder.glob("*/*/*.gguf")))):
            yield _gguf(f"~/{Path(file).relative_to(home)}", Path(file))


def _gguf(name: str, path: Path) -> LocalModel:
    """Return a GGUF file with what its header says, or why it is refused."""
    # Here and below: only with the executor's packages.
    from executor_svc.models.memory_needs import summarize_model

    try:
        summary = summarize_model(path)
    except ModelLoadError as error:
        size = path.stat().st_size if path.is_file() else 0
        return LocalModel(
            name, ModelState.REFUSED, "", "", size, size, None, path, str(error).removeprefix(f"{path}: ")
        )
    weights = summary.formats[0] if summary.formats else ""
    size, needed = summary.file_bytes, summary.needed_bytes()
    return LocalModel(name, ModelState.READY, summary.architecture, weights, size, size, needed, path)


def _describe(name: str, state: ModelState, directory: Path, num_bytes: int) -> LocalModel:
    """Return a model with what its directory says of it. Raises: ModelLoadError: it is damaged, or quantized."""
    from executor_svc.models.memory_needs import summarize_model

    summary = summarize_model(directory)
    weights = summary.formats[0] if summary.formats else ""
    needed = summary.needed_bytes() if state is ModelState.READY else None
    return LocalModel(name, state, summary.architecture, weights, summary.file_bytes, num_bytes, needed, directory)
