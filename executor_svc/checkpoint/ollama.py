"""The models that Ollama has pulled: a name leads to a manifest, and that to the GGUF file, which is read in place.

    OLLAMA_MODELS, else ~/.ollama/models, else that of its system service
    ├── manifests/registry.ollama.ai/library/qwen3/0.6b    ollama:qwen3:0.6b
    ├── manifests/registry.ollama.ai/someone/qwen3/0.6b    ollama:someone/qwen3:0.6b
    ├── manifests/hf.co/someone/repo/Q4_K_M                ollama:hf.co/someone/repo:Q4_K_M
    └── blobs/sha256-...

Of a model only the weights' file is read, and not Ollama's own template, system prompt and parameters.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from executor_svc.checkpoint.model_directory import read_json_object
from octavo_shared.errors import ModelLoadError

PREFIX = "ollama:"
_REGISTRY, _LIBRARY, _TAG = "registry.ollama.ai", "library", "latest"
_PART = r"[\w][\w.-]*"
_NAME = re.compile(rf"(?:(?:(?P<registry>{_PART})/)?(?P<owner>{_PART})/)?(?P<model>{_PART})(?::(?P<tag>{_PART}))?")
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_SERVICE_FOLDER = Path("/usr/share/ollama/.ollama/models")
_MODEL, _ADAPTER = "application/vnd.ollama.image.model", "application/vnd.ollama.image.adapter"


def find_ollama_file(name: str) -> Path:
    """Return the GGUF file of a model of Ollama; `name` begins with PREFIX.

    Raises: ModelLoadError: there is no such model, or it is none that can be read; the message says why.
    """
    match = _NAME.fullmatch(name.removeprefix(PREFIX))
    if match is None:
        raise ModelLoadError(
            f"{name} is no name of a model of Ollama; such a name is ollama:NAME, ollama:NAME:TAG or ollama:OWNER/NAME"
        )
    folder = ollama_folder()
    if folder is None:
        told = os.environ.get("OLLAMA_MODELS")
        why = f"OLLAMA_MODELS is {told}, which has none" if told else "set OLLAMA_MODELS to it"
        raise ModelLoadError(f"there is no {name}: Ollama has no folder of models here; {why}")
    place = Path(match["registry"] or _REGISTRY, match["owner"] or _LIBRARY, match["model"], match["tag"] or _TAG)
    manifest = folder / "manifests" / place
    if not manifest.is_file():
        there = ", ".join(sorted(ollama_models())) or "none"
        raise ModelLoadError(f"there is no {name} in {folder}; there are: {there}")
    return _weights_file(name, manifest, folder / "blobs")


def ollama_models() -> Iterator[str]:
    """Yield the names of all models that Ollama has pulled, as `find_ollama_file` takes them."""
    folder = ollama_folder()
    if folder is None:
        return
    for path in (folder / "manifests").glob("*/*/*/*"):
        registry, owner, model, tag = path.parts[-4:]
        if registry != _REGISTRY:
            name = f"{registry}/{owner}/{model}"
        else:
            name = model if owner == _LIBRARY else f"{owner}/{model}"
        if path.is_file() and _NAME.fullmatch(f"{name}:{tag}"):
            yield f"{PREFIX}{name}:{tag}"


def ollama_folder() -> Path | None:
    """Return where Ollama keeps its models; None: nowhere that is known."""
    if told := os.environ.get("OLLAMA_MODELS"):
        folders = [Path(told).expanduser()]
    else:
        folders = [Path(os.path.expanduser("~")) / ".ollama" / "models", _SERVICE_FOLDER]
    return next((folder for folder in folders if os.access(folder / "manifests", os.R_OK | os.X_OK)), None)


def _weights_file(name: str, manifest: Path, blobs: Path) -> Path:
    layers = read_json_object(manifest).get("layers")
    found = [each for each in layers if isinstance(each, dict)] if isinstance(layers, list) else []
    if any(layer.get("mediaType") == _ADAPTER for layer in found):
        raise ModelLoadError(f"{name} has an adapter (such as LoRA), which Octavo does not read")
    digests = [_DIGEST.fullmatch(str(layer.get("digest"))) for layer in found if layer.get("mediaType") == _MODEL]
    if len(digests) != 1 or digests[0] is None:
        found_there = "names no valid SHA-256" if len(digests) == 1 else f"has {len(digests)} files of weights, not one"
        raise ModelLoadError(f"{manifest} of {name} {found_there}; run ollama pull {name.removeprefix(PREFIX)}")
    path = blobs / f"sha256-{digests[0][1]}"
    if not path.is_file():
        raise ModelLoadError(f"{name} is not complete: {path} is missing; run ollama pull {name.removeprefix(PREFIX)}")
    return path
