"""Typed access to config.json, with errors that name the file and the field."""

from collections.abc import Mapping
from pathlib import Path

from shared.errors import ModelLoadError, UnsupportedModelError


class ConfigFields:
    """A JSON object; null means absent. Every getter raises ModelLoadError on a value of another kind.

    Args:
        values: The object.
        source: The file, for error messages.
        prefix: What stands before the names in error messages, for an object in an object.
    """

    def __init__(self, values: Mapping[str, object], source: Path, prefix: str = "") -> None:
        self.values = values
        self.source = source
        self._prefix = prefix

    @property
    def architecture(self) -> str:
        """The architecture that config.json names."""
        architectures = self.values.get("architectures")
        if not isinstance(architectures, list) or not architectures:
            raise ModelLoadError(f"{self.source} names no architecture")
        return str(architectures[0])

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a whole number of at least `least`."""
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ModelLoadError(f"{self._describe(name)} {value!r}; it must be a whole number of at least {least}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number above 0."""
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ModelLoadError(f"{self._describe(name)} {value!r}; it must be a number above 0")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ModelLoadError(f"{self._describe(name)} {value!r}; it must be true or false")
        return value

    def nested(self, name: str) -> "ConfigFields":
        """Return the fields of an object in this one; an absent one has none."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise ModelLoadError(f"{self._describe(name)} {value!r}; it must be an object")
        return ConfigFields(value or {}, self.source, f"{self._prefix}{name}.")

    def optional_integer(self, name: str) -> int | None:
        """Return a whole number above 0, or None if it is absent."""
        return None if self.values.get(name) is None else self.integer(name)

    def optional_number(self, name: str) -> float | None:
        """Return a number above 0, or None if it is absent."""
        return None if self.values.get(name) is None else self.number(name)

    def refuse(self, names: Mapping[str, object]) -> None:
        """Leave a model with other settings to transformers' code, or to nobody.

        Args:
            names: Settings that are not read, each with the value that changes nothing; absent ones do neither.

        Raises: UnsupportedModelError: a setting has another value.
        """
        for name, harmless in names.items():
            value = self.values.get(name)
            if value is not None and value != harmless:
                raise UnsupportedModelError(f"{self._describe(name)} {value!r}, which is not supported")

    def _describe(self, name: str) -> str:
        return f"{self.source} has {self._prefix}{name}"

    def _get(self, name: str, default: float | None) -> object:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelLoadError(f"{self.source} has no {self._prefix}{name}")
        return value
