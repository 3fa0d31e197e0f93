"""The header of a GGUF file: values by key, and where each tensor lies. All of it is checked against the file."""

import hashlib
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from executor_svc.checkpoint.model_files import GGUF_MAGIC
from octavo.values.wording import shown
from octavo_shared.errors import ModelLoadError

_VERSIONS = (2, 3)  # the same but for big-endian files, which version 3 allows
_DEFAULT_ALIGNMENT = 32
_MOST_DIMENSIONS = 4

# The types of values: struct reads the first ones; then text and array.
_NUMBERS: Final[Mapping[int, str]] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
_TEXT, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor in its file; `shape` has the rows first, as torch has them."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    path: Path
    begin: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.path}: the tensor {shown(self.name)}"


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """What a file says of itself; `tokenizer_digest` is of all values of the tokenizer, keys included."""

    path: Path
    values: Mapping[str, object]
    tensors: Mapping[str, GGUFTensor]
    tokenizer_digest: bytes


def read_header(path: Path) -> GGUFHeader:
    """Read the header of a file.

    Raises: ModelLoadError: it is no GGUF file, or a damaged one; says where, and what was expected.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != GGUF_MAGIC:
                raise ModelLoadError(f"{path} is not a GGUF file: it does not begin with GGUF")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error


class _Reader:
    """Goes through a header once, from its begin to its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = len(GGUF_MAGIC)
        self._where = "its header"

    def header(self) -> GGUFHeader:
        version = self._number("I")
        if version not in _VERSIONS:
            is_swapped = version and not version & 0xFFFF
            kind = "a big-endian file" if is_swapped else f"GGUF version {version}"
            raise ModelLoadError(f"{self._path} is {kind}; supported are the versions 2 and 3, little-endian")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        self._check_count(num_tensors, 24, "tensors")
        self._check_count(num_values, 13, "values")
        values: dict[str, object] = {}
        of_tokenizer = hashlib.sha256()
        for _ in range(num_values):
            begin = self._at
            key = self._text()
            self._where = f"its value {shown(key)}"
            if key in values:
                raise self._damaged("stands there twice")
            values[key] = self._value()
            if key.startswith("tokenizer."):
                of_tokenizer.update(self._data[begin : self._at])
        infos = [self._tensor_info() for _ in range(num_tensors)]
        self._where = "its value general.alignment"
        alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"is {shown(str(alignment))}; it must be a power of two")
        first = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for info in infos:
            tensor = self._placed(*info, first, alignment)
            if tensor.name in tensors:
                raise self._damaged("stands there twice")
            tensors[tensor.name] = tensor
        self._check_overlap(tensors)
        return GGUFHeader(self._path, MappingProxyType(values), MappingProxyType(tensors), of_tokenizer.digest())

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        self._where = f"the tensor {shown(name)}"
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
            raise self._damaged(f"has {num_dimensions} dimensions; 1 to {_MOST_DIMENSIONS} are possible")
        sizes = tuple(self._number("Q") for _ in range(num_dimensions))
        return name, tuple(reversed(sizes)), self._number("I"), self._number("Q")

    def _placed(
        self, name: str, shape: tuple[int, ...], type_number: int, offset: int, first: int, alignment: int
    ) -> GGUFTensor:
        self._where = f"the tensor {shown(name)}"
        try:
            kind = GGMLQuantizationType(type_number)
        except ValueError as error:
            raise self._damaged(f"has the type {type_number}, which GGUF does not have") from error
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        if not all(shape) or shape[-1] % block_size:
            raise self._damaged(f"has the shape {list(shape)}; rows of {kind.name} are multiples of {block_size}")
        num_bytes = math.prod(shape) // block_size * block_bytes
        if offset % alignment:
            raise self._damaged(f"begins at {offset}; it must be a multiple of {alignment}")
        if first + offset + num_bytes > self._size:
            raise self._damaged(
                f"ends at byte {first + offset + num_bytes}, but the file has {self._size}: it is truncated, or damaged"
            )
        return GGUFTensor(name, shape, kind, self._path, first + offset, num_bytes)

    def _check_overlap(self, tensors: Mapping[str, GGUFTensor]) -> None:
        end, before = 0, ""
        for tensor in sorted(tensors.values(), key=lambda each: each.begin):
            if tensor.begin < end:
                self._where = f"the tensor {shown(tensor.name)}"
                raise self._damaged(f"lies over the tensor {shown(before)}")
            end, before = tensor.begin + tensor.num_bytes, tensor.name

    def _value(self) -> object:
        kind = self._number("I")
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            return self._number(self._number_kind(kind))
        kind, count = self._number("I"), self._number("Q")
        if kind == _TEXT:
            self._check_count(count, 8, "texts")
            return self._texts(count)
        code = self._number_kind(kind)
        self._check_count(count, struct.calcsize(f"<{code}"), "numbers")
        values = np.frombuffer(self._data, np.dtype(code).newbyteorder("<"), count, self._at).copy()
        self._at += values.nbytes
        return values.tolist()

    def _number_kind(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise self._damaged(f"has the type {kind}; 0 to 12 are possible, and no lists of lists")
        return _NUMBERS[kind]

    def _number(self, code: str) -> int:
        """Return a number; of a fraction or a truth too, which mypy need not know."""
        size = struct.calcsize(f"<{code}")
        if self._at + size > self._size:
            raise self._damaged("goes on behind the end of the file: it is truncated, or damaged")
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += size
        return value  # type: ignore[no-any-return]

    def _text(self) -> str:
        size = self._number("Q")
        self._check_count(size, 1, "bytes of text")
        begin, self._at = self._at, self._at + size
        return self._data[begin : self._at].decode("utf-8", "replace")

    def _texts(self, count: int) -> list[str]:
        """Return so many texts; in one loop, as vocabularies have hundreds of thousands."""
        data, at, end, read_size = self._data, self._at, self._size, struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            if at + 8 > end or (size := read_size(data, at)[0]) > end - at - 8:
                break
            at += 8 + size
            texts.append(data[at - size : at].decode("utf-8", "replace"))
        self._at = at
        if len(texts) < count:
            self._text()  # goes on behind the end of the file, and says so
        return texts

    def _check_count(self, count: int, least_bytes: int, what: str) -> None:
        """Refuse a count of things that cannot be in the rest of the file, before memory is taken for them."""
        if count * least_bytes > self._size - self._at:
            raise self._damaged(f"has {count} {what}, more than the file holds: it is truncated, or damaged")

    def _damaged(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path}: {self._where} {what}")
