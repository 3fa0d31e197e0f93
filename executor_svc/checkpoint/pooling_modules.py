"""How a model directory says that texts become vectors: the modules of sentence-transformers.

`modules.json` lists them in their order. What is read here: the transformer itself, one way of pooling, and whether
vectors are normalized. Other modules are refused by name.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from executor_svc.checkpoint.model_directory import read_json_object
from octavo_shared.errors import ModelLoadError
from octavo_shared.step_wire.model_file import read_model_file

PoolingMode = Literal["mean", "cls", "last"]

# As 1_Pooling/config.json calls them.
_MODES: dict[str, PoolingMode] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_MODE_NAMES: dict[str, PoolingMode] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}


@dataclass(frozen=True, slots=True)
class PoolingModules:
    """What becomes of the hidden states of a text.

    Attributes:
        mode: The mean of all tokens, the first, or the last one.
        is_normalized: Whether the vector is scaled to length 1.
        max_tokens: Longest text that the model is published for; None: nothing is said.
    """

    mode: PoolingMode
    is_normalized: bool
    max_tokens: int | None = None


def read_pooling_modules(directory: Path) -> PoolingModules | None:
    """Return what the modules of a directory do; None: it has no modules.json.

    Raises: ModelLoadError: a file is damaged, or a module does what is not supported.
    """
    path = directory / "modules.json"
    if not path.is_file():
        return None
    mode: PoolingMode | None = None
    is_normalized = False
    for module in _read_list(path):
        if not isinstance(module, dict) or not isinstance(module.get("type"), str):
            raise ModelLoadError(f"{path} has a module without a type")
        match module["type"].rpartition(".")[2]:
            case "Transformer":
                if module.get("path"):
                    raise ModelLoadError(f"{path} has its transformer in {module['path']}, which is not supported")
            case "Pooling" if mode is None:
                mode = _read_mode(directory / _folder(path, module.get("path")) / "config.json")
            case "Normalize" if mode is not None:
                is_normalized = True
            case _:
                raise ModelLoadError(
                    f"{path} has the module {module['type']}, which is not supported there; supported are "
                    "Transformer, one Pooling, and Normalize behind it"
                )
    if mode is None:
        raise ModelLoadError(f"{path} has no module that pools")
    return PoolingModules(mode, is_normalized, _max_tokens(directory / "sentence_bert_config.json"))


def _read_list(path: Path) -> list[object]:
    try:
        modules = json.loads(read_model_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(modules, list):
        raise ModelLoadError(f"{path} does not contain a list of modules")
    return modules


def _folder(path: Path, name: object) -> str:
    if not isinstance(name, str) or Path(name).name != name:
        raise ModelLoadError(f"{path} has the path {name!r}; it must be a folder beside it")
    return name


def _read_mode(path: Path) -> PoolingMode:
    """Return the one way of pooling of a module's config.json."""
    values = read_json_object(path)
    if values.get("include_prompt", True) is not True:
        raise ModelLoadError(f"{path} has include_prompt {values['include_prompt']!r}, which is not supported")
    named = values.get("pooling_mode")
    chosen = [name for name, value in values.items() if name.startswith("pooling_mode_") and value is True]
    mode = _MODE_NAMES.get(str(named)) if named is not None else _MODES.get(chosen[0]) if len(chosen) == 1 else None
    if mode is None:
        said = f"pooling_mode {named!r}" if named is not None else " and ".join(sorted(chosen)) or "no pooling mode"
        raise ModelLoadError(f"{path} has {said}; supported is one of {', '.join(_MODES)}")
    return mode


def _max_tokens(path: Path) -> int | None:
    value = read_json_object(path).get("max_seq_length") if path.is_file() else None
    return value if isinstance(value, int) and value > 0 else None
