"""Compiles grammars in a process of its own: a compile cannot be stopped, but a process that computes too long ends.

front ── files of the tokenizer, then grammars, a frame each ──> this module as a program
<── one frame each: why it cannot be used, "": it can ────
"""

import json
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Protocol

from octavo_shared.errors import UnavailableError
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.grammar.matcher import (
    MatcherTokenizer,
    UnsupportedTokenizerError,
    check_grammar,
    matcher_id_of,
    reason_against,
)
from octavo_shared.step_wire.executor_info import TokenizerFile

# CPU time that one grammar may take, in seconds; one of the largest size takes some tenths of one.
LIMIT_S = 0.7

TOO_LONG = f"it takes more than {LIMIT_S:g} s to compile; make it smaller, or its repetitions shorter"

_LENGTH = struct.Struct("<I")


class CompilerFailedError(UnavailableError):
    """The process ended, and by no limit of its own; it is not known what it would have said.

    Args:
        code: What it ended with.
    """

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(f"the process that compiles grammars ended with code {code}; send the request again")


class Compiler(Protocol):
    """Says which grammars outputs can follow."""

    matcher_id: str

    def check(self, grammar: Grammar) -> str:
        """Return why outputs cannot follow a grammar, in the words of its parser; "": they can. It takes a while."""

    def close(self) -> None:
        """Be used no more."""


class CompilerProcess:
    """See `Compiler`. For one thread at a time.

    Args:
        files: The model's tokenizer.
        eos_token_ids: What ends an output.
        vocab_size: Width of the logits.

    Raises: UnsupportedTokenizerError: no grammar can be followed with this tokenizer.
    """

    def __init__(self, files: Sequence[TokenizerFile], eos_token_ids: Sequence[int], vocab_size: int) -> None:
        self.matcher_id = matcher_id_of(files, eos_token_ids, vocab_size)
        names = [file.name for file in files]
        first = json.dumps({"names": names, "eos_token_ids": list(eos_token_ids), "vocab_size": vocab_size}).encode()
        self._frames = [first, *(file.content for file in files)]
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-P", "-m", "scheduler_svc.front.grammars.compiler"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        words = self._ask(*self._frames)
        if words:
            raise UnsupportedTokenizerError(words)

    def check(self, grammar: Grammar) -> str:
        """See `Compiler`. A process that somebody ends is started again, once."""
        try:
            return self._check(grammar)
        except CompilerFailedError:
            return self._check(grammar)

    def _check(self, grammar: Grammar) -> str:
        assert self._process is not None, "it is not closed"
        if self._process.poll() is not None:  # the grammar before took too long, or somebody killed it
            self.close()
            self._start()
        try:
            return self._ask(grammar.body)
        except CompilerFailedError as error:
            if error.code == -signal.SIGPROF:
                return TOO_LONG
            raise

    def _ask(self, *frames: bytes) -> str:
        """Send frames and return what is answered. Raises CompilerFailedError: the process has ended."""
        assert self._process is not None
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        answer = None
        with suppress(BrokenPipeError):
            for frame in frames:
                pipe_in.write(_LENGTH.pack(len(frame)) + frame)
            pipe_in.flush()
            answer = _read(pipe_out)
        if answer is None:
            raise CompilerFailedError(self._process.wait())
        return answer.decode()

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

    def check(self, grammar: Grammar) -> str:
        """See `Compiler`."""
        return reason_against(self._tokenizer, grammar)

    def close(self) -> None:
        """See `Compiler`."""


def _read(pipe: IO[bytes]) -> bytes | None:
    """Return the next frame; None: there is none."""
    length = pipe.read(_LENGTH.size)
    if len(length) < _LENGTH.size:
        return None
    frame = pipe.read(*_LENGTH.unpack(length))
    return frame if len(frame) == _LENGTH.unpack(length)[0] else None


def main() -> None:
    """Answer until stdin ends. SIGPROF ends the process when a grammar has used up its CPU time."""
    pipe_in, pipe_out = sys.stdin.buffer, sys.stdout.buffer

    def answer(words: str) -> None:
        content = words.encode()
        pipe_out.write(_LENGTH.pack(len(content)) + content)
        pipe_out.flush()

    first = _read(pipe_in)
    if first is None:
        return
    given = json.loads(first)
    files = [TokenizerFile(name, _read(pipe_in) or b"") for name in given["names"]]
    try:
        tokenizer = MatcherTokenizer.load(files, given["eos_token_ids"], given["vocab_size"])
    except UnsupportedTokenizerError as error:
        answer(str(error))
        return
    answer("")
    while (body := _read(pipe_in)) is not None:
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        words = check_grammar(tokenizer, Grammar(body))
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer(words)


if __name__ == "__main__":
    main()
