"""From what people call a model to what the executor takes: a directory or a hub id."""

import os

from octavo.errors import LocalServiceError
from octavo.models.progress import ModelPrepareError, ignore_progress
from octavo.models.store import DEMO_MODELS, find_model, prepare_model

DEMO_MODEL = DEMO_MODELS[0].name


def resolve_model(model: str | os.PathLike[str], *, progress: bool = True) -> str:
    """Return the directory or hub id to serve; a demo model is made on its first use.

    Args:
        model: Name of a demo model, a directory, or a hub id. A directory that is named like a demo
            model is meant with a leading `./`.
        progress: Whether to show on stderr how the making of a demo model goes.

    Raises:
        LocalServiceError: the demo model cannot be made; the message says why.
    """
    name = os.fspath(model)
    if all(name != demo_model.name for demo_model in DEMO_MODELS):
        return name
    try:
        directory = find_model(name) or _prepare(name, progress)
    except ModelPrepareError as error:
        raise LocalServiceError(str(error)) from error
    return str(directory)


def _prepare(name: str, progress: bool) -> os.PathLike[str]:
    if not progress:
        return prepare_model(name, progress=ignore_progress)
    # Only here, since it draws with rich, and most models need no preparation.
    from octavo.models.command import StageBars

    with StageBars() as bars:
        return prepare_model(name, progress=bars)
