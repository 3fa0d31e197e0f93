"""The headers of a GGUF file, or of several that are one model, joined."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from executor_svc.checkpoint.gguf.header import GGUFHeader, GGUFTensor, read_header
from executor_svc.checkpoint.gguf.metadata import Metadata
from octavo_shared.errors import ModelLoadError

# One of the files is given; the others lie beside it.
_PART = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


def read_files(path: Path) -> tuple[Metadata, Mapping[str, GGUFTensor]]:
    """Return the values of the first file, and the tensors of all.

    Raises: ModelLoadError: a file is damaged, or one of several is missing.
    """
    headers = _read_all(path)
    first = headers[0]
    return in_common_terms(Metadata(first.path, first.values, first.tokenizer_digest), _join(headers))


def _read_all(path: Path) -> list[GGUFHeader]:
    """Return the headers of all files of a model, the first one first."""
    header = read_header(path)
    metadata = Metadata(path, {"general.architecture": "", **header.values})
    count = metadata.whole_number("split.count", 0)
    if count <= 1:
        return [header]
    match = _PART.match(path.name)
    if match is None or int(match["count"]) != count:
        raise ModelLoadError(f"{path} is one of {count} files; it must be named NAME-00001-of-{count:05}.gguf")
    paths = [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if missing := [part for part in paths if not part.is_file()]:
        raise ModelLoadError(f"{missing[0]} is missing: the model has {count} files")
    headers = [read_header(part) for part in paths]
    for number, part in enumerate(headers):
        told = Metadata(part.path, {"general.architecture": "", **part.values}).whole_number("split.no")
        if told != number:
            raise ModelLoadError(f"{part.path} has split.no {told}; it must be {number}")
    return headers


def _join(headers: list[GGUFHeader]) -> Mapping[str, GGUFTensor]:
    tensors: dict[str, GGUFTensor] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise ModelLoadError(f"{tensor} is in {tensors[name].path} too")
            tensors[name] = tensor
    first = Metadata(headers[0].path, {"general.architecture": "", **headers[0].values})
    count = first.whole_number("split.tensors.count", len(tensors))
    if count != len(tensors):
        raise ModelLoadError(f"{first.path} has split.tensors.count {count}; its files have {len(tensors)} tensors")
    return tensors


_ARCHITECTURE = "gemma3"
_OF_VISION = ("v.", "mm.")
_NORM, _GLOBAL, _LOCAL = "attention.layer_norm_rms_epsilon", "rope.global.freq_base", "rope.local.freq_base"
_OF_TOKENS = tuple(f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type"))
# From this length on models were trained on shorter texts, and stretch their positions.
_STRETCHED_FROM, _STRETCH = 131_072, 8.0
# The words of the system come before the first ones of the user.
_TEMPLATE = (
    "{{ bos_token }}"
    "{% set system = messages[0]['content'] | trim + '\n\n' if messages[0]['role'] == 'system' else '' %}"
    "{% for message in (messages[1:] if system else messages) %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    "{{ (system if loop.first else '') + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


def in_common_terms(metadata: Metadata, tensors: Mapping[str, GGUFTensor]) -> tuple[Metadata, Mapping[str, GGUFTensor]]:
    """Return a file's values and tensors as llama.cpp's converter would have written them; without vision."""
    text = {name: tensor for name, tensor in tensors.items() if not name.startswith(_OF_VISION)}
    is_ollamas = len(text) < len(tensors) or not metadata.has(_NORM) or metadata.has(_GLOBAL) or metadata.has(_LOCAL)
    if metadata.architecture != _ARCHITECTURE or not is_ollamas:
        return metadata, tensors
    found: dict[str, object] = {
        _NORM: 1e-6,
        "rope.freq_base": metadata.number(_GLOBAL, 1e6),
        "rope.freq_base_swa": metadata.number(_LOCAL, 1e4),
    }
    if metadata.integer("context_length", 0) >= _STRETCHED_FROM:
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": _STRETCH}
    values = {metadata.key(key): value for key, value in found.items()}
    values |= {"tokenizer.chat_template": _TEMPLATE, **metadata.values}
    elsewhere = tuple(metadata.key(key) for key in ("vision.", "mm.", _GLOBAL, _LOCAL))
    values = {key: value for key, value in values.items() if not key.startswith(elsewhere)}
    digest = metadata.tokenizer_digest
    if (embedding := text.get("token_embd.weight")) is not None:
        num_rows = embedding.shape[0]
        lists = {key: value for key in _OF_TOKENS if isinstance(value := values.get(key), list | np.ndarray)}
        values |= {key: value[:num_rows] for key, value in lists.items()}
        digest = hashlib.sha256(b"%d rows of " % num_rows + digest).digest()
    return Metadata(metadata.path, values, digest), text
