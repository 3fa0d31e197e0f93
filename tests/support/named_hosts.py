"""Names to which a test gives addresses: a process runs with `named(MODULE)` and looks them up as those of a DNS.

Answers may be old, as a cluster's are: what the test changes is seen `stale_s` later.
"""

import asyncio
import json
import os
import runpy
import socket
from pathlib import Path
from typing import Any

_FILE = "OCTAVO_TEST_NAMES"
_MODULE = "OCTAVO_TEST_MODULE"


class NamedHosts:
    """The names, in a file that processes read at each look-up.

    Args:
        file: Where they are kept.
        stale_s: How long after a change look-ups still give the former addresses.
    """

    def __init__(self, file: Path, stale_s: float = 0.0) -> None:
        self._file = file
        self.stale_s = stale_s
        self._hosts: dict[str, list[str]] = {}
        self._write("{}")

    def give(self, name: str, hosts: list[str]) -> None:
        """Let a name stand for these addresses."""
        self._hosts[name] = hosts
        asyncio.get_running_loop().call_later(self.stale_s, self._write, json.dumps(self._hosts))

    def environment(self, module: str) -> dict[str, str]:
        """Return what `python -m tests.support.named_hosts` runs a module with."""
        return {_FILE: str(self._file), _MODULE: module}

    def _write(self, text: str) -> None:
        if self._file.parent.exists():  # the test may be over
            part = self._file.with_suffix(".part")
            part.write_text(text, encoding="utf-8")
            part.replace(self._file)


def _run() -> None:
    """Run the module of the environment; names of the file are looked up there."""
    look_up, file = socket.getaddrinfo, Path(os.environ[_FILE])

    def look_up_here(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        hosts = json.loads(file.read_text(encoding="utf-8")).get(host)
        if hosts == []:
            raise socket.gaierror(socket.EAI_NONAME, "the name has no address")
        return [found for each in hosts or [host] for found in look_up(each, port, *args, **kwargs)]

    socket.getaddrinfo = look_up_here
    runpy.run_module(os.environ[_MODULE], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run()
