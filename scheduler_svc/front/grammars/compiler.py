"""Reads and compiles grammars in a process of its own: a compile cannot be stopped, but a process can be ended.

front ── files of the tokenizer, then what clients ask for, a frame each ──> this module as a program
<── verdicts, a frame each, each better than the last; an empty frame ends them ──
"""

import json
import os
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import IO, Protocol

from octavo_shared.errors import InvalidFieldError, UnavailableError
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.grammar.matcher import (
    MatcherTokenizer,
    UnsupportedTokenizerError,
    matcher_id_of,
    thread_of_large_stack,
)
from octavo_shared.step_wire.executor_info import TokenizerFile
from scheduler_svc.front.grammars.parts import AskedGrammar
from scheduler_svc.front.grammars.reading import Verdict, refusal, verdicts

# CPU time that one grammar may take, in seconds, and as much again to find the place of an error; a grammar of the
# largest size takes some tenths of a second.
LIMIT_S = 0.7

# A process that neither answers nor uses CPU for so long, in seconds, ends by SIGALRM: a library that deadlocks would
# keep every grammar waiting. This is no verdict on the grammar.
STANDS_STILL_S = 30.0

# Address space that the process may use beyond what it has once its tokenizer is loaded.
LIMIT_BYTES = 2**30

# What the exit code of the process says of a grammar. With 127 the C library ends it: a thread found no memory.
_SMALLER = "make it smaller, or its repetitions shorter"
_TOO_LARGE = f"it needs more than {LIMIT_BYTES // 2**20} MiB of memory to compile; {_SMALLER}"
_ENDS: dict[int, str] = {
    -signal.SIGPROF: f"it takes more than {LIMIT_S:g} s to compile; {_SMALLER}",
    -signal.SIGABRT: _TOO_LARGE,
    127: _TOO_LARGE,
}

_LENGTH = struct.Struct("<I")

# Length of a refused value as it is kept; an error shows less.
_MAX_SHOWN_CHARS = 1000


class CompilerFailedError(UnavailableError):
    """The process ended, and by no limit of its own, so there is no verdict."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(f"the process that compiles grammars ended with code {code}; send the request again")


class Compiler(Protocol):
    """Decides which grammars outputs can follow."""

    matcher_id: str

    def verdict(self, asked: AskedGrammar) -> Verdict:
        """Return the grammar in its wire form, or why outputs cannot follow it. It takes a while."""

    def close(self) -> None:
        """Close the compiler."""


class CompilerProcess:
    """See `Compiler`. For one thread at a time.

    Args:
        eos_token_ids: What ends an output.
        vocab_size: Width of the logits.

    Raises: UnsupportedTokenizerError: no grammar can be followed with this tokenizer.
    """

    command = (sys.executable, "-P", "-m", "scheduler_svc.front.grammars.compiler")

    def __init__(self, files: Sequence[TokenizerFile], eos_token_ids: Sequence[int], vocab_size: int) -> None:
        self.matcher_id = matcher_id_of(files, eos_token_ids, vocab_size)
        names = [file.name for file in files]
        first = {"names": names, "eos_token_ids": list(eos_token_ids), "vocab_size": vocab_size, "limit": LIMIT_BYTES}
        self._frames = [json.dumps(first).encode(), *(file.content for file in files)]
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for words in self._ask(*self._frames):
            raise UnsupportedTokenizerError(words.decode())

    def verdict(self, asked: AskedGrammar) -> Verdict:
        """See `Compiler`. A process that was killed is started again, once."""
        try:
            return self._verdict(asked)
        except CompilerFailedError:
            return self._verdict(asked)

    def _verdict(self, asked: AskedGrammar) -> Verdict:
        assert self._process is not None, "it is not closed"
        if self._process.poll() is not None:  # the last grammar took too much, or the process was killed
            self.close()
            self._start()
        best = None
        try:
            for answer in self._ask(asked.frame):
                best = answer
        except CompilerFailedError as error:
            if best is None:
                if (words := _ENDS.get(error.code)) is None:
                    raise
                part = next(iter(asked.parts.values()))
                return refusal(part, part.text, words)
        assert best is not None, "it answers before the end"
        return _verdict_of(best)

    def _ask(self, *frames: bytes) -> Iterator[bytes]:
        """Send frames and yield the answers. Raises CompilerFailedError: the process has ended."""
        assert self._process is not None
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        answer: bytes | None = None
        with suppress(BrokenPipeError):
            for frame in frames:
                pipe_in.write(_LENGTH.pack(len(frame)) + frame)
            pipe_in.flush()
            while answer := _read(pipe_out):
                yield answer
        if answer is None:
            raise CompilerFailedError(self._process.wait())

    def close(self) -> None:
        """See `Compiler`."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def __del__(self) -> None:
        if getattr(self, "_process", None) is not None:
            self.close()


class CompilerHere:
    """See `Compiler`, on this thread: for tests, whose grammars take no time."""

    def __init__(self, files: Sequence[TokenizerFile], eos_token_ids: Sequence[int], vocab_size: int) -> None:
        self._tokenizer = MatcherTokenizer.load(files, eos_token_ids, vocab_size)
        self.matcher_id = self._tokenizer.matcher_id

    def verdict(self, asked: AskedGrammar) -> Verdict:
        """See `Compiler`."""
        *_, best = verdicts(self._tokenizer, asked)
        return best

    def close(self) -> None:
        """See `Compiler`."""


def _read(pipe: IO[bytes]) -> bytes | None:
    """Return the next frame; None: there is none."""
    length = pipe.read(_LENGTH.size)
    if len(length) < _LENGTH.size:
        return None
    frame = pipe.read(*_LENGTH.unpack(length))
    return frame if len(frame) == _LENGTH.unpack(length)[0] else None


def _frame_of(verdict: Verdict) -> bytes:
    if isinstance(verdict, Grammar):
        return b"+" + verdict.body
    return b"-" + json.dumps([verdict.field, str(verdict.value)[:_MAX_SHOWN_CHARS], verdict.limit]).encode()


def _verdict_of(frame: bytes) -> Verdict:
    return Grammar(frame[1:]) if frame[:1] == b"+" else InvalidFieldError(*json.loads(frame[1:]))


def _limit_memory(num_bytes: int) -> None:
    """Let the process grow by so much; allocating more ends it with SIGABRT."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    most = size + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answer_all(pipe_in: IO[bytes], pipe_out: IO[bytes]) -> None:
    """Answer until the pipe closes. SIGPROF ends the process when a grammar has used up its CPU time."""

    def write(*frames: bytes) -> None:
        for frame in frames:
            pipe_out.write(_LENGTH.pack(len(frame)) + frame)
        pipe_out.flush()

    first = _read(pipe_in)
    if first is None:
        return
    given = json.loads(first)
    files = [TokenizerFile(name, _read(pipe_in) or b"") for name in given["names"]]
    try:
        tokenizer = MatcherTokenizer.load(files, given["eos_token_ids"], given["vocab_size"])
    except UnsupportedTokenizerError as error:
        write(str(error).encode(), b"")
        return
    write(b"")
    _limit_memory(given["limit"])
    while (frame := _read(pipe_in)) is not None:
        signal.setitimer(signal.ITIMER_REAL, STANDS_STILL_S)
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        for verdict in verdicts(tokenizer, AskedGrammar.of_frame(frame)):
            write(_frame_of(verdict))
            signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write(b"")


def main() -> None:
    """Run the process."""
    with thread_of_large_stack("grammars") as thread:
        try:
            thread.submit(_answer_all, sys.stdin.buffer, sys.stdout.buffer).result()
        except MemoryError:  # when the library has none left
            os.abort()


if __name__ == "__main__":
    main()
