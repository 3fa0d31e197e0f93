"""Typed access to the key-value part of a GGUF file, for `gguf_conversion.py` and `gguf_tokenizer.py`.

Source of the keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from typing import TYPE_CHECKING

from octavo.models.progress import ModelPrepareError

if TYPE_CHECKING:
    from gguf import GGUFReader


class GGUFMetadata:
    """The key-value part of one GGUF file.

    Every getter raises `ModelPrepareError` if the key is absent or of another type.

    Args:
        reader: The opened file.
    """

    def __init__(self, reader: "GGUFReader") -> None:
        self._reader = reader

    def has(self, key: str) -> bool:
        """Say whether the file has `key`."""
        return self._reader.get_field(key) is not None

    def text(self, key: str) -> str:
        """Return a string."""
        value = self._value(key)
        if not isinstance(value, str):
            raise ModelPrepareError(f"{key} of the GGUF file is not a string")
        return value

    def integer(self, key: str) -> int:
        """Return a whole number."""
        value = self._value(key)
        if not isinstance(value, int):
            raise ModelPrepareError(f"{key} of the GGUF file is not a whole number")
        return value

    def number(self, key: str) -> float:
        """Return a float32 as the decimal number its author wrote: 1e-05, not 9.999999747378752e-06."""
        import numpy as np

        value = self._value(key)
        if not isinstance(value, float):
            raise ModelPrepareError(f"{key} of the GGUF file is not a floating-point number")
        return float(str(np.float32(value)))

    def texts(self, key: str) -> list[str]:
        """Return a list of strings."""
        return [str(value) for value in self._list(key)]

    def integers(self, key: str) -> list[int]:
        """Return a list of whole numbers."""
        return [int(value) for value in self._list(key)]

    def _list(self, key: str) -> list[str] | list[int]:
        value = self._value(key)
        if not isinstance(value, list):
            raise ModelPrepareError(f"{key} of the GGUF file is not a list")
        return value

    def _value(self, key: str) -> object:
        field = self._reader.get_field(key)
        if field is None:
            raise ModelPrepareError(f"the GGUF file has no key {key}")
        value: object = field.contents()
        return value
