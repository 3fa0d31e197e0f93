"""A model of the Hugging Face hub: which of its files an executor reads, and how they come into the hub's own cache.

`--model` of the executor and `octavo pull` both start here, so they agree to the file. The package `huggingface_hub` is
imported late: a model in a directory does without it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from executor_svc.checkpoint.hub_answers import check_answers
from executor_svc.checkpoint.hub_name import HubName, choose_gguf, describe_ggufs
from executor_svc.checkpoint.model_directory import INDEX_FILE, read_json_object
from executor_svc.checkpoint.model_files import SMALL_FILES, weight_files, why_no_model
from octavo.values.wording import how_to_install
from octavo_shared.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. `sha256` is what a large file is called in the cache; None: a small one."""

    name: str
    num_bytes: int
    sha256: str | None


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model at the hub.

    Attributes:
        repo_id: Its name there, such as Qwen/Qwen3-0.6B.
        revision: The branch, tag or commit that was asked for; None: the default one.
        commit: What that is today.
        files: What an executor reads.
    """

    repo_id: str
    revision: str | None
    commit: str
    files: tuple[HubFile, ...]

    @property
    def cache_directory(self) -> Path:
        """Where the hub's cache keeps this repository."""
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE, f"models--{self.repo_id.replace('/', '--')}")


class NotAtHubError(ModelLoadError):
    """The hub knows no such model, does not show it to us, or does not answer."""


def is_hub_id(model: str) -> bool:
    """Return whether a text may name a model of the hub; see `HubName`."""
    if (name := HubName.of(model)) is None:
        return False
    try:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
    except ModuleNotFoundError:  # `fetch_hub_model` says what to install
        return True
    try:
        validate_repo_id(name.repo_id)
    except HFValidationError:
        return False
    return True


def fetch_hub_model(model: str, transfer: Callable[[HubModel], None] | None = None) -> Path:
    """Return the directory of a model of the hub, or its GGUF file; what is missing of it is downloaded first.

    A model that is complete in the cache is returned also if the hub does not answer, or does not answer us.

    Args:
        model: As `HubName` takes it apart.
        transfer: Brings large files into the cache in its own way; None: the hub's library downloads all.

    Raises: ModelLoadError: it cannot be had, or is no model in the format that is read.
    """
    try:
        import huggingface_hub  # noqa: F401 (whether it is there)
    except ModuleNotFoundError as error:
        raise ModelLoadError(
            f"{model} must be downloaded from the hub, which requires {error.name}: {how_to_install('executor')}"
        ) from error
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    check_answers()
    name = HubName.of(model)
    assert name is not None, "the caller has checked the name"
    try:
        found = _look_up(name)
    except NotAtHubError:
        if (cached := find_cached_model(name)) is not None:
            return cached
        raise
    try:
        if transfer is not None:
            disable_progress_bars()  # `transfer` has its own
            # Small ones first: then a download that was cut off differs from one that never began.
            _download(found, [file.name for file in found.files if file.name in SMALL_FILES])
            transfer(found)
        directory = _download(found, [file.name for file in found.files])
        first = found.files[0].name
        return directory / first if first.endswith(".gguf") else directory
    except _transport_errors() as error:
        raise ModelLoadError(_to_sentence(error, found.repo_id)) from error


def find_cached_model(name: HubName) -> Path | None:
    """Return the directory or GGUF file of a name that is complete in the cache, without the hub; None: it is not."""
    directory = None if name.is_gguf else find_cached(name.repo_id, name.revision)
    return directory or find_cached_gguf(name)


def find_cached(repo_id: str, revision: str | None = None) -> Path | None:
    """Return the directory of a model that is complete in the hub's cache, without the hub; None: there is none."""
    from huggingface_hub import errors, snapshot_download

    def find(names: list[str]) -> Path:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=names, local_files_only=True))

    try:
        directory = find([*SMALL_FILES, INDEX_FILE])
        names = os.listdir(directory)
        if why_no_model(names):
            return None
        weights = weight_files(names, _read_index(directory))
        find(weights)
    except (errors.LocalEntryNotFoundError, errors.HFValidationError, ModelLoadError, OSError):
        return None
    return directory if all((directory / name).is_file() for name in weights) else None


def find_cached_gguf(name: HubName) -> Path | None:
    """Return the first part of a GGUF file that is complete in the hub's cache, without the hub; None: it is not."""
    from huggingface_hub import errors, snapshot_download

    try:
        # No patterns: what else the repository has need not be there.
        found = snapshot_download(name.repo_id, revision=name.revision, allow_patterns=[], local_files_only=True)
    except (errors.LocalEntryNotFoundError, errors.HFValidationError, OSError):
        return None
    directory = Path(found)
    chosen = choose_gguf(name, [str(path.relative_to(directory)) for path in directory.rglob("*.gguf")])
    if not chosen or not all((directory / each).is_file() for each in chosen):
        return None
    return directory / chosen[0]


def _look_up(name: HubName) -> HubModel:
    """Ask the hub for the files of a model. Raises: NotAtHubError; ModelLoadError: they make none."""
    repo_id, revision = name.repo_id, name.revision
    from huggingface_hub import HfApi, constants

    try:
        info = HfApi().model_info(
            repo_id, revision=revision, files_metadata=True, timeout=constants.DEFAULT_REQUEST_TIMEOUT
        )
    except _transport_errors() as error:
        raise NotAtHubError(_to_sentence(error, repo_id, revision)) from error
    files = {
        sibling.rfilename: HubFile(sibling.rfilename, sibling.size or 0, sibling.lfs.sha256 if sibling.lfs else None)
        for sibling in info.siblings or ()
    }
    ggufs = describe_ggufs(repo_id, files)
    chosen = choose_gguf(name, files)
    if name.is_gguf or (chosen and "config.json" not in files):
        if not chosen or not set(chosen) <= files.keys():
            what = f"file {name.file}" if name.file else f"GGUF file in {name.quantization}"
            raise ModelLoadError(
                f"the hub model {repo_id} has no complete {what}" + (f"; it has {ggufs}" if ggufs else "")
            )
        assert info.sha is not None, "the hub names the commit of whatever it describes"
        return HubModel(repo_id, revision, info.sha, tuple(files[each] for each in chosen))
    if ggufs and "config.json" not in files:
        raise ModelLoadError(f"the hub model {repo_id} has GGUF files only; use one of {ggufs} for --model")
    if trouble := why_no_model(sorted(files)):
        raise ModelLoadError(f"the hub model {repo_id} {trouble}")
    assert info.sha is not None, "the hub names the commit of whatever it describes"
    small = [files[name] for name in (*SMALL_FILES, INDEX_FILE) if name in files]
    index = None
    if INDEX_FILE in files:
        try:
            index = _read_index(_download(HubModel(repo_id, revision, info.sha, ()), [INDEX_FILE]))
        except _transport_errors() as error:
            raise ModelLoadError(_to_sentence(error, repo_id)) from error
    weights = weight_files(files, index)
    if missing := [name for name in weights if name not in files]:
        raise ModelLoadError(f"the hub model {repo_id} has no {missing[0]}, which its {INDEX_FILE} lists")
    return HubModel(repo_id, revision, info.sha, (*small, *(files[name] for name in weights)))


def _download(model: HubModel, names: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model.repo_id, revision=model.revision, allow_patterns=names))


def _read_index(directory: Path) -> dict[str, object] | None:
    path = directory / INDEX_FILE
    return read_json_object(path) if path.is_file() else None


def _transport_errors() -> tuple[type[Exception], ...]:
    """Return what the hub's library raises: its own errors, its HTTP library's, and the disk's."""
    from huggingface_hub import errors

    # Its HTTP library has changed from one release to the next; the root of its errors is a base of the hub's.
    return (*errors.HfHubHTTPError.__bases__, OSError, ValueError)


def _to_sentence(error: Exception, repo_id: str, revision: str | None = None) -> str:
    """Return what a person can do about a failed call of the hub's library."""
    from huggingface_hub import constants, errors

    match error:
        case errors.HFValidationError():
            return f"{repo_id} is not a hub id; a hub id is NAME or ORGANISATION/NAME"
        case errors.GatedRepoError():
            return f"{repo_id} is gated: accept its terms at {constants.ENDPOINT}/{repo_id}, and set HF_TOKEN"
        case errors.RevisionNotFoundError():
            return f"the hub model {repo_id} has no revision {revision}"
        case errors.RepositoryNotFoundError():
            return f"the hub has no model {repo_id}; a private model needs HF_TOKEN"
        case errors.HfHubHTTPError(response=response) if response.status_code == 401:
            return "the hub rejected the token in HF_TOKEN"
        case errors.OfflineModeIsEnabled():
            return f"HF_HUB_OFFLINE is set, and no complete {repo_id} is in {constants.HF_HUB_CACHE}"
        case errors.HfHubHTTPError():
            return f"the hub returned an error for {repo_id}: {_first_line(error)}"
        case OSError(errno=int(), strerror=str(strerror)):
            return (
                f"{repo_id} cannot be written to {constants.HF_HUB_CACHE} (set HF_HOME to use another disk): {strerror}"
            )
        case OSError() | ValueError():
            return f"the download of {repo_id} failed: {_first_line(error)}"
        case _:
            return (
                f"the hub cannot be reached ({type(error).__name__}: {_first_line(error)}), and no complete {repo_id} "
                f"is in {constants.HF_HUB_CACHE}; check the network, or use a model that is on this machine"
            )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", maxsplit=1)[0]
