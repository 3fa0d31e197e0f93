"""Where adapters may be read from: folders and names that the executor's configuration allows, and nothing outside."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from octavo.values.wording import shown
from octavo_shared.errors import ModelLoadError


class AdapterSources:
    """Finds the adapter that a source of the wire names.

    Args:
        folders: A source that is no name is a path in one of these, relative to it or absolute.
        named: Paths by name; they may lie anywhere.
    """

    def __init__(self, folders: Sequence[Path] = (), named: Mapping[str, Path] | None = None) -> None:
        self._folders = [folder.resolve() for folder in folders]
        self._named = dict(named or {})

    @property
    def names(self) -> tuple[str, ...]:
        """The names, which are sources too."""
        return tuple(self._named)

    @classmethod
    def of(cls, folders: Sequence[str], named: Sequence[str]) -> "AdapterSources":
        """Return the sources of a configuration: folders, and NAME=PATH."""
        paths = {name: Path(path) for name, path in (entry.split("=", 1) for entry in named)}
        return cls([Path(folder) for folder in folders], paths)

    def find(self, source: str) -> Path:
        """Return the path of an adapter, without symbolic links.

        Raises: ModelLoadError: it may not be read, or is not there.
        """
        found = ""
        try:
            if (path := self._named.get(source)) is not None:
                return path.resolve()
            for folder in self._folders:
                path = (folder / source).resolve()
                if not path.is_relative_to(folder) or path == folder:
                    continue
                if path.exists():
                    return path
                found = f"; {shown(source)} is not there"
        except (OSError, ValueError, RuntimeError) as error:  # a name that no file can have, or links in a circle
            raise ModelLoadError(f"the adapter {shown(source)} cannot be found: {shown(str(error))}") from error
        raise ModelLoadError(
            f"the adapter {shown(source)} is no name of --lora, and no path in the folders of --lora-dir{found}"
        )

    def read(self, source: str) -> bytes:
        """Return the content of an adapter that is one file. Raises ModelLoadError: see `find`."""
        try:
            return self.find(source).read_bytes()
        except OSError as error:
            raise ModelLoadError(f"the adapter {shown(source)} cannot be read: {error.strerror}") from error
