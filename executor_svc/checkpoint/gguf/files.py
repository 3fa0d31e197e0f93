"""The headers of a GGUF file, or of several that are one model, joined."""

import re
from collections.abc import Mapping
from pathlib import Path

from executor_svc.checkpoint.gguf.header import GGUFHeader, GGUFTensor, read_header
from executor_svc.checkpoint.gguf.metadata import Metadata
from executor_svc.checkpoint.gguf.ollama_gemma3 import in_common_terms
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
