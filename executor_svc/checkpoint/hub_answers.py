"""What a hub answers, checked before a path is made of it.

The hub names commits, files and checksums. All of them become paths in the cache: in `octavo/models/hub_transfer.py`,
and in the hub's library, which checks few of them. `check_answers` looks at whatever comes to that library.
"""

import json
import re
from typing import Any

from octavo_shared.errors import ModelLoadError

_GIT_ID = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def require_sha256(value: object) -> None:
    """Raises: ModelLoadError: it is no SHA-256 as 64 hexadecimal digits."""
    _require(isinstance(value, str) and _SHA256.fullmatch(value) is not None, "as a SHA-256", value)


def require_commit(value: object) -> None:
    """Raises: ModelLoadError: it is no id of a commit."""
    _require(isinstance(value, str) and _GIT_ID.fullmatch(value) is not None, "as a commit", value)


def require_inner_path(value: object) -> None:
    """Raises: ModelLoadError: it could lead out of the directory that it is put behind, or has control characters."""
    is_inner = isinstance(value, str) and not _CONTROL_CHARACTERS.search(value)
    is_inner = is_inner and not {"", ".", ".."} & set(str(value).split("/"))
    _require(is_inner, "as the name of a file", value)


def check_answers() -> None:
    """From now on let the hub's library refuse answers that lead out of its cache."""
    from huggingface_hub import get_session

    session = get_session()
    hooks = session.event_hooks
    if _check_answer not in hooks["response"]:
        session.event_hooks = {**hooks, "response": [*hooks["response"], _check_answer]}


def _check_answer(response: Any) -> None:  # of httpx or httpx2, as the release of the hub's library has it
    if commit := response.headers.get("X-Repo-Commit"):  # on files, also if the hub does not have them
        require_commit(commit)
        if etag := response.headers.get("X-Linked-Etag") or response.headers.get("ETag"):
            require_inner_path(etag.removeprefix("W/").strip('"'))  # what the cache calls the file
    path = response.request.url.path
    if "/api/models/" in path and "/resolve/" not in path:
        try:
            _check_description(json.loads(response.read()))
        except (ValueError, RecursionError):
            return  # an error page: the library says so


def _check_description(value: object) -> None:
    description = value if isinstance(value, dict) else {}
    if "sha" in description:
        require_commit(description["sha"])
    siblings = description.get("siblings")
    for file in [*(siblings if isinstance(siblings, list) else []), *(value if isinstance(value, list) else [])]:
        if isinstance(file, dict):
            require_inner_path(file.get("rfilename", file.get("path")))
            lfs = file.get("lfs")
            if isinstance(lfs, dict):
                require_sha256(lfs.get("sha256", lfs.get("oid")))
            for blob in filter(None, (file.get("oid"), file.get("blobId"))):  # mirrors have ids of their own
                require_inner_path(blob)


def _require(is_good: bool, what: str, value: object) -> None:
    if not is_good:
        raise ModelLoadError(f"the hub returned the invalid value {str(value)[:200]!r} {what}; no file was written")
