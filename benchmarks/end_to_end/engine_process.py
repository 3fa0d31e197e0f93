"""One engine in a process of its own, with the interpreter of its environment: start it, ask it, stop it."""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from benchmarks.end_to_end.adapters.interface import (
    Description,
    Generation,
    Message,
    Options,
    options_to_message,
    requests_to_message,
)
from benchmarks.end_to_end.process_load import process_tree
from benchmarks.end_to_end.workloads import Request

ROOT = Path(__file__).parents[2]
_LAST_WORDS_BYTES = 2000
_STOP_S = 40.0


class EngineError(Exception):
    """An engine failed; the message says how, with the last line that it printed."""


class EngineProcess:
    """Owns an adapter's process. Use it as a context; nothing that it started survives.

    Args:
        command: Interpreter and arguments.
        log_path: Where what it prints goes.
    """

    def __init__(self, command: Sequence[str], log_path: Path) -> None:
        self._log_path = log_path
        self._log: IO[bytes] = log_path.open("wb")
        # Adapters find `benchmarks` here, and nothing of our environment: a peer has its own packages.
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'shared'}", "PYTHONNOUSERSITE": "1"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._log, cwd=ROOT, env=environment, start_new_session=True
        )
        self._unread = b""

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The adapter's; what it started is below it."""
        return self._process.pid

    def start(self, options: Options, timeout_s: float) -> Description:
        """Load the model.

        Raises:
            EngineError: it ended, said that it failed, or took longer.
        """
        return Description(**self._ask(options_to_message(options), timeout_s))

    def generate(self, requests: list[Request], timeout_s: float) -> Generation:
        """Compute requests that arrive at once.

        Raises:
            EngineError: as in `start`; or an output has not the length that was asked for.
        """
        generation = Generation(**self._ask(requests_to_message(requests), timeout_s))
        wanted = [request.output_tokens for request in requests]
        if generation.output_tokens != wanted:
            got = sum(generation.output_tokens)
            raise EngineError(f"it made {got} tokens in lengths other than those asked for, {sum(wanted)} together")
        return generation

    def stop(self) -> None:
        """Let it stop by itself; what does not is killed, with all that it started."""
        if not self._log.closed:
            family = process_tree(self.pid)
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                for pid in family:
                    _kill(pid)
                self._process.wait()
            self._process.stdout.close()
            self._log.close()

    def _ask(self, message: Message, timeout_s: float) -> Message:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineError(f"it ended: {self._last_words()}") from None
        answer: Message = json.loads(self._read_line(timeout_s))
        if "error" in answer:
            raise EngineError(str(answer["error"]))
        return answer

    def _read_line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        give_up_at = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left_s = give_up_at - time.monotonic()
            if left_s <= 0 or not select.select([self._process.stdout], [], [], left_s)[0]:
                raise EngineError(f"it did not answer within {timeout_s:g} s: {self._last_words()}")
            data = os.read(self._process.stdout.fileno(), 1 << 20)
            if not data:
                raise EngineError(f"it ended: {self._last_words()}")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self) -> str:
        lines = self._log_path.read_bytes()[-_LAST_WORDS_BYTES:].decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
