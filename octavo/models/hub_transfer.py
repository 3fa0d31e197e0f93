"""Brings the large files of a hub model into the hub's cache, and goes on where an earlier try was cut off.

The hub's library begins a file again from its first byte when a download was killed. Here its bytes wait in the cache
beside the complete files, under a name of our own, and are checked against the SHA-256 that the hub gives. The rest is
the library's: `executor_svc/checkpoint/hub_model.py` calls it for what is still missing.
"""

import hashlib
import io
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from executor_svc.checkpoint.hub_answers import require_sha256
from executor_svc.checkpoint.hub_model import HubFile, HubModel, fetch_hub_model
from octavo.models.progress import ProgressCallback
from octavo.models.store import exclusive_lock
from octavo_shared.errors import ModelLoadError

# Partial files that end so are known to the hub's tools, which can remove them.
SUFFIX = ".octavo.incomplete"
_CHUNK_BYTES = 1 << 20


def pull_hub_model(model: str, progress: ProgressCallback) -> Path:
    """Return the directory of a model of the hub, downloaded if need be; a second try goes on where one was cut off.

    Safe to call from several processes at a time: one downloads a file, the others wait for it.

    Args:
        model: A hub id and maybe @REVISION.
        progress: Receives where the work is; an exception of it ends the work.

    Raises: ModelLoadError: it cannot be had, or is no model that an executor could read.
    """
    return fetch_hub_model(model, partial(transfer_large_files, progress=progress))


def transfer_large_files(model: HubModel, progress: ProgressCallback) -> None:
    """Bring those files of a model into the cache that lie in the hub's large file storage.

    Raises:
        ModelLoadError: the disk has too little space, or what came is not what the hub promised, or what it promised
            is no checksum.
        Exception: What the hub's library raises; what has come until then stays.
    """
    from huggingface_hub import constants

    for file in model.files:
        if file.sha256 is not None:
            require_sha256(file.sha256)  # it is a path below
    blobs = model.cache_directory / "blobs"
    snapshot = model.cache_directory / "snapshots" / model.commit
    missing = [file for file in model.files if not (snapshot / file.name).exists()]
    missing = [file for file in missing if file.sha256 is None or not (blobs / file.sha256).exists()]
    if not missing:
        return
    blobs.mkdir(parents=True, exist_ok=True)
    _require_space(model, missing, blobs)
    meter = _Meter(sum(file.num_bytes for file in missing), progress)
    for file in missing:
        # What is larger than this comes by the library's own protocol only.
        if file.sha256 is not None and file.num_bytes <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            _transfer(model, file, blobs / file.sha256, meter)


class _Meter:
    """Adds up the bytes of all files for the bar."""

    def __init__(self, total: int, progress: ProgressCallback) -> None:
        self.progress = progress
        self._total = total
        self._completed = 0

    def add(self, num_bytes: int) -> None:
        """Count bytes that have come; below 0: that are lost."""
        self._completed += num_bytes
        self.progress("Downloading", self._completed, self._total)


class _PartialFile(io.BufferedWriter):
    """A file that is written at its end, and hashed on the way.

    Args:
        path: The file, which may hold the first bytes already.
        on_bytes: Called with the number of bytes that come, or that are lost.
    """

    def __init__(self, path: Path, on_bytes: Callable[[int], None]) -> None:
        super().__init__(io.FileIO(path, "ab"))
        self._on_bytes = on_bytes
        self.sha256 = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                self.sha256.update(chunk)
                on_bytes(len(chunk))

    def write(self, chunk: bytes, /) -> int:  # type: ignore[override]
        self.sha256.update(chunk)
        self._on_bytes(len(chunk))
        return super().write(chunk)

    def truncate(self, size: int | None = None, /) -> int:
        self._on_bytes(-self.seek(0, os.SEEK_END))
        self.sha256 = hashlib.sha256()
        self.seek(0)
        return super().truncate(0)


def _transfer(model: HubModel, file: HubFile, blob: Path, meter: _Meter) -> None:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    path = blob.with_name(blob.name + SUFFIX)
    with exclusive_lock(path, meter.progress):
        if blob.exists():  # another process was faster, and the lock is on what has become the blob
            meter.add(file.num_bytes)
            return
        with _PartialFile(path, meter.add) as target:
            if target.tell() > file.num_bytes:
                target.truncate()
            http_get(
                hf_hub_url(model.repo_id, file.name, revision=model.commit),
                target,
                resume_size=target.tell(),
                headers=build_hf_headers(),
                expected_size=file.num_bytes,
            )
        if target.sha256.hexdigest() != file.sha256:
            path.unlink()
            raise ModelLoadError(
                f"{file.name} of {model.repo_id} does not match the hub's checksum and was deleted: pull it again"
            )
        path.rename(blob)


def _require_space(model: HubModel, missing: list[HubFile], blobs: Path) -> None:
    """Refuse before the download what would fail in the middle of it."""
    num_bytes = sum(file.num_bytes for file in missing)
    num_bytes -= sum(path.stat().st_size for path in blobs.glob(f"*{SUFFIX}"))
    free_bytes = shutil.disk_usage(blobs).free
    if free_bytes < num_bytes:
        raise ModelLoadError(
            f"{model.repo_id} needs {num_bytes / 1e6:.1f} MB more in {model.cache_directory.parent}, where "
            f"{free_bytes / 1e6:.1f} MB are free (set HF_HOME to use another disk)"
        )
