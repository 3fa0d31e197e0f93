"""A Hugging Face hub on loopback: the few routes that a download of a model needs, with the hub's status codes.

`python -m tests.support.hub DIRECTORY` serves the models of a folder (DIRECTORY/org/name) for a person to try.
"""

import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

# What the hub keeps in Git LFS; the cache calls such files by their SHA-256.
_LFS_SUFFIXES = (".safetensors", ".bin", ".gguf")
_CHUNK_BYTES = 1 << 16


@dataclass
class Repo:
    """A model at the hub, with its branches and tags all at one commit.

    Attributes:
        files: Their contents by name.
        gated: Whether its terms must be accepted: no token here has done so.
        token: Without this one it does not exist; "": it is public.
        revisions: The names of its commit.
    """

    files: Mapping[str, bytes]
    gated: bool = False
    token: str = ""
    revisions: tuple[str, ...] = ("main",)

    @cached_property
    def commit(self) -> str:
        names = "".join(f"{name}{hashlib.sha1(content).hexdigest()}" for name, content in sorted(self.files.items()))
        return hashlib.sha1(names.encode()).hexdigest()


@dataclass
class Hub:
    """The hub's side of a test.

    Attributes:
        repos: By id.
        requests: What was asked for, such as `GET /org/tiny/resolve/COMMIT/config.json bytes=5-`.
        stall_after: How many bytes of a weight file are sent before the transfer stands still; None: all.
        stalled: Set when a transfer stands still.
        corrupts: Whether weight files come with another content.
        ignores_ranges: Whether a file comes as a whole, whatever part of it is asked for.
        tampers: Called with each description of a model and each tree of its files, as JSON has them: a hostile hub.
        lies: Headers of files in place of the true ones.
        address: Where it listens.
    """

    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    stall_after: int | None = None
    stalled: threading.Event = field(default_factory=threading.Event)
    corrupts: bool = False
    ignores_ranges: bool = False
    tampers: Callable[[Any], object] = lambda value: None
    lies: dict[str, str] = field(default_factory=dict)
    address: str = ""

    def downloads(self, name: str) -> list[str]:
        """Return the byte ranges in which a file was asked for; "": all of it."""
        calls = [request.split(" ") for request in self.requests if request.startswith("GET ")]
        return [call[2] if len(call) > 2 else "" for call in calls if call[1].endswith(f"/{name}")]

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def environ(self, cache: Path) -> dict[str, str]:
        """Return the environment of a process that uses this hub and a cache of its own."""
        others = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        return {**others, "HF_ENDPOINT": self.url, "HF_HOME": str(cache.parent), "HF_HUB_CACHE": str(cache)}


def use_hub(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub's library of this process, which has read its environment already, use this hub and this cache."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)


def read_repo(directory: Path) -> Repo:
    """Return the files of a directory as a model at the hub."""
    return Repo({path.name: path.read_bytes() for path in directory.iterdir()})


@contextmanager
def running_hub(**repos: Repo) -> Iterator[Hub]:
    """Run a hub for the length of a block; `repos` are those of the organisation `org`."""
    hub = Hub({f"org/{name}": repo for name, repo in repos.items()})
    handler = type("BoundHandler", (_Handler,), {"hub": hub, "ended": threading.Event()})
    with _Server(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.address = f"127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            handler.ended.set()  # type: ignore[attr-defined]
            server.shutdown()
            thread.join()


class _RefusedError(Exception):
    def __init__(self, status: HTTPStatus, code: str) -> None:
        self.status, self.code = status, code


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a client was killed."""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    ended: threading.Event
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", "")
        self.hub.requests.append(f"{self.command} {self.path} {wanted}".rstrip())
        path = unquote(urlsplit(self.path).path)
        try:
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
                repo = self._repo(match[1], match[2])
                self._send_json(_description(match[1], repo))
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
                self._send_json(_tree(self._repo(match[1], match[2])))
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self._send_file(self._repo(match[1], match[2]), match[3], wanted)
            else:
                raise _RefusedError(HTTPStatus.NOT_FOUND, "RepoNotFound")
        except _RefusedError as refusal:
            self.send_response(refusal.status)
            self.send_header("X-Error-Code", refusal.code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""

    def _repo(self, repo_id: str, revision: str | None) -> Repo:
        repo = self.hub.repos.get(repo_id)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if repo is None or token != repo.token:
            # So the hub answers to those whom it does not know, lest they learn what there is.
            raise _RefusedError(HTTPStatus.NOT_FOUND if token else HTTPStatus.UNAUTHORIZED, "RepoNotFound")
        if revision not in (None, repo.commit, *repo.revisions):
            raise _RefusedError(HTTPStatus.NOT_FOUND, "RevisionNotFound")
        if repo.gated and "/resolve/" in self.path:
            raise _RefusedError(HTTPStatus.FORBIDDEN, "GatedRepo")
        return repo

    def _send_json(self, value: object) -> None:
        self.hub.tampers(value)
        body = json.dumps(value).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _send_file(self, repo: Repo, name: str, wanted: str) -> None:
        if name not in repo.files:
            raise _RefusedError(HTTPStatus.NOT_FOUND, "EntryNotFound")
        content = repo.files[name]
        if self.hub.ignores_ranges:
            wanted = ""
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        self.send_response(HTTPStatus.PARTIAL_CONTENT if wanted else HTTPStatus.OK)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        headers = {"ETag": f'"{_etag(name, content)}"', "X-Repo-Commit": repo.commit, **self.hub.lies}
        for header, value in headers.items():
            self.send_header(header, value)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.corrupts and name.endswith(_LFS_SUFFIXES):
            content = bytes(len(content))
        end = len(content)
        if self.hub.stall_after is not None and name.endswith(_LFS_SUFFIXES):
            end = min(end, start + self.hub.stall_after)
        for position in range(start, end, _CHUNK_BYTES):
            self.wfile.write(content[position : min(position + _CHUNK_BYTES, end)])
        if end < len(content):
            self.wfile.flush()
            self.hub.stalled.set()
            self.ended.wait()


def _description(repo_id: str, repo: Repo) -> dict[str, object]:
    siblings = []
    for name, content in repo.files.items():
        sibling: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": _git_id(content)}
        if name.endswith(_LFS_SUFFIXES):
            sibling["lfs"] = {"sha256": _etag(name, content), "size": len(content), "pointerSize": 134}
        siblings.append(sibling)
    return {"id": repo_id, "modelId": repo_id, "sha": repo.commit, "private": bool(repo.token), "siblings": siblings}


def _tree(repo: Repo) -> list[dict[str, object]]:
    entries = []
    for name, content in repo.files.items():
        entry: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": _git_id(content)}
        if name.endswith(_LFS_SUFFIXES):
            entry["lfs"] = {"oid": _etag(name, content), "size": len(content), "pointerSize": 134}
        entries.append(entry)
    return entries


def _etag(name: str, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if name.endswith(_LFS_SUFFIXES) else _git_id(content)


def _git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with running_hub() as served:
        served.repos = {f"{path.parent.name}/{path.name}": read_repo(path) for path in folder.glob("*/*")}
        print(f"HF_ENDPOINT={served.url}", flush=True)
        threading.Event().wait()
