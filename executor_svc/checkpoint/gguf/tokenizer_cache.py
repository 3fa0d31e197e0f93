"""Converted tokenizers in the user's cache, so that only the first start of a GGUF file converts.

    OCTAVO_CACHE_DIR, else XDG_CACHE_HOME/octavo, else ~/.cache/octavo
    └── tokenizers
        └── DIGEST.json     a line with the digest of DIGEST and of what follows, then tokenizer.json

DIGEST names everything that decides on the result: what the file says of its tokenizer, our code, and the versions of
the libraries. An entry appears by a rename. One that is damaged, or that another user could have written, counts as
none and is replaced. Where the cache cannot be written, each start converts.
"""

import contextlib
import hashlib
import importlib.metadata
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from octavo_shared.process.events import Event
from octavo_shared.process.user_cache import user_cache_directory

_logger = logging.getLogger(__name__)

_LIBRARIES = ("transformers", "tokenizers")
# The entries that were used last stay; one takes up to 40 MB.
_NUM_KEPT = 16


def cached_conversion(origin: Iterable[bytes], convert: Callable[[], bytes]) -> bytes:
    """Return what `convert` made of the same origin before; else call it, and keep the result.

    Args:
        origin: What the result depends on beside the libraries.
        convert: Returns tokenizer.json. What it raises is raised, and nothing is kept.
    """
    versions = [importlib.metadata.version(name).encode() for name in _LIBRARIES]
    key = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in (*origin, *versions))).hexdigest()
    try:
        path = user_cache_directory() / "tokenizers" / f"{key}.json"
    except RuntimeError:  # this user has no home directory
        return convert()
    content = _read(path)
    if content is None:
        content = convert()
        _write(path, content)
    return content


def _read(path: Path) -> bytes | None:
    """Return the content of an entry; None: there is none that can be trusted."""
    try:
        if not _is_own(path.parent.stat(), stat.S_IFDIR):
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a FIFO would wait for a writer
        with open(descriptor, "rb") as file:
            if not _is_own(os.fstat(descriptor), stat.S_IFREG):
                return None
            first, _, content = file.read().partition(b"\n")
    except OSError:
        return None
    if first != _first_line(path, content):
        return None
    with contextlib.suppress(OSError):  # of a cache that is read-only nothing is removed either
        os.utime(path)
    return content


def _write(path: Path, content: bytes) -> None:
    """Keep an entry, if that is possible, and remove the least recently used ones."""
    partial = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as file:
            partial = Path(file.name)
            file.write(_first_line(path, content) + b"\n" + content)
        partial.replace(path)
    except OSError as error:
        _logger.info(Event("tokenizer_not_cached", path=str(path), reason=error.strerror))
    with contextlib.suppress(OSError):  # another process may remove the same
        if partial is not None:
            partial.unlink(missing_ok=True)
        files = sorted(path.parent.iterdir(), key=lambda each: each.stat().st_mtime)
        for old in files[:-_NUM_KEPT]:
            old.unlink()


def _is_own(status: os.stat_result, kind: int) -> bool:
    """Return whether only this user can have written there."""
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_IFMT(status.st_mode) == kind and status.st_uid == os.geteuid() and not others_write


def _first_line(path: Path, content: bytes) -> bytes:
    """Return the digest of an entry's name and content: an entry under another name does not have it."""
    return hashlib.sha256(path.name.encode() + b"\n" + content).hexdigest().encode()
