"""A model on a disk: a directory of Hugging Face, or a GGUF file, which answers the same questions."""

from pathlib import Path

from executor_svc.checkpoint.gguf.model import GGUFModel
from executor_svc.checkpoint.gguf.weights import GGUFCheckpoint
from executor_svc.checkpoint.model_directory import ModelDirectory
from executor_svc.checkpoint.weights import Checkpoint

Model = ModelDirectory | GGUFModel
AnyCheckpoint = Checkpoint | GGUFCheckpoint


def open_model(path: Path) -> Model:
    """Return the model at a path that `find_model` has found. Raises: ModelLoadError: a GGUF file is damaged."""
    return ModelDirectory(path) if path.is_dir() else GGUFModel(path)


def open_checkpoint(model: Model, *, allow_requantization: bool = False, restores_codes: bool = False) -> AnyCheckpoint:
    """Return the weights of a model; see both classes. Raises: ModelLoadError: a file is missing or damaged."""
    if isinstance(model, GGUFModel):
        return model.checkpoint(allow_requantization=allow_requantization, restores_codes=restores_codes)
    return Checkpoint(model.path, allow_requantization=allow_requantization, restores_codes=restores_codes)
