"""A small file of a model directory, read without following a link out of it.

A model directory comes from a third party, and what its configuration, tokenizer and chat template hold leaves the
process: in messages, and to clients. A link there to another file of this machine would publish that file.
"""

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path


def read_model_file(path: Path) -> bytes:
    """Return the content of a file of a model. Raises OSError: see `real_model_file`, or it cannot be read."""
    return real_model_file(path).read_bytes()


def real_model_file(path: Path) -> Path:
    """Return where a file is that lies in its directory, or in the hub's cache that the directory is a part of.

    Links inside of the directory are followed, such as Kubernetes makes them (`..data`).

    Raises: OSError: the file is not there, is a link to another place, or is no regular file.
    """
    real = Path(os.path.realpath(path, strict=True))
    parent = path.parent.resolve()
    # A module of sentence-transformers has a folder of its own below the model directory.
    homes = (*_homes(parent), *(_homes(parent.parent)[1:] if parent.parent.parent.name == "snapshots" else ()))
    if not any(real.is_relative_to(home) for home in homes):
        raise PermissionError(
            errno.EACCES, f"it is a symbolic link to {real}, outside the model directory; put the file itself there"
        )
    if not stat.S_ISREG(real.stat().st_mode):  # reading a pipe would wait for ever
        raise OSError(errno.EINVAL, "it is not a regular file")
    return real


def find_link_out(directory: Path, folders: Sequence[Path]) -> Path | None:
    """Return a file of weights or settings in a directory that is a link out of all folders; None: there is none.

    Args:
        directory: With the files.
        folders: Without symbolic links. Of a hub's cache the snapshots are links to its blobs.

    Raises: OSError: the directory cannot be read.
    """
    for path in sorted(directory.iterdir()):
        if path.suffix in (".safetensors", ".json") and path.is_symlink():
            real = Path(os.path.realpath(path))
            if not any(real.is_relative_to(folder) for folder in folders):
                return path
    return None


def _homes(directory: Path) -> tuple[Path, ...]:
    """Return where the files of a directory may lie: of CACHE/models--NAME/snapshots/COMMIT also in the hub's blobs."""
    snapshots, repository = directory.parent, directory.parent.parent
    if snapshots.name != "snapshots" or not repository.name.startswith("models--"):
        return (directory,)
    return directory, repository / "blobs", repository.parent / "blobs"
