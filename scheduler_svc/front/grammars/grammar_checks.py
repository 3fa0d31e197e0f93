"""Compiles grammars before their requests are admitted, so that a bad grammar ends only its own request.

parts.py bounds the text, compiler.py the time and the memory. A few requests may wait (`CompileQueue`), and a request
that waits too long is refused. Verdicts are remembered; that a compiler ended is not.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from octavo_shared.errors import InvalidFieldError, QueueFullError, UnavailableError
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.grammar.matcher import UnsupportedTokenizerError
from octavo_shared.process.clock import monotonic_s
from octavo_shared.process.histogram import Histogram
from octavo_shared.process.metric import Family, Metric
from octavo_shared.step_wire.executor_info import TokenizerFile
from scheduler_svc.front.grammars.compiler import Compiler, CompilerProcess
from scheduler_svc.front.grammars.parts import AskedGrammar
from scheduler_svc.front.grammars.reading import Verdict
from scheduler_svc.front.text.text_model import TOKENIZER_FIX, TextModel
from scheduler_svc.front.text.text_threads import DaemonThreads
from scheduler_svc.front.text.tokenizer import Tokenizer

# Different grammars that may wait, once the compiler has started.
MAX_WAITING = 64

RETRY_AFTER_S = 1.0
QUEUE = "the queue of grammars to compile"

# How long one request waits, in seconds, including the grammars before its own.
LIMIT_S = 10.0

# Limits of the remembered verdicts: their number, and their bytes.
MAX_REMEMBERED = 4096
MAX_REMEMBERED_BYTES = 16 * 2**20

COMPILE_TIME = Metric(
    "octavo_grammar_compile_seconds",
    "histogram",
    "Time to read and compile the grammar of a request before it is admitted.",
)
REFUSED = Metric(
    "octavo_grammars_refused_total",
    "counter",
    "Grammars that compiled to an error; those refused before are not counted.",
)
METRICS = (COMPILE_TIME, REFUSED)
_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


_Key: TypeAlias = tuple[str, bytes]

OpenCompiler: TypeAlias = Callable[[Sequence[TokenizerFile], Sequence[int], int], Compiler]


class GrammarMeter:
    """Counts grammars that were compiled.

    Attributes:
        times: How long compiling took, in seconds.
        num_refused: Grammars that outputs cannot follow.
    """

    def __init__(self) -> None:
        self.times = Histogram(_BOUNDS)
        self.num_refused = 0

    def families(self) -> Iterator[Family]:
        """Yield the metrics."""
        yield COMPILE_TIME.histogram_family({(): self.times})
        yield REFUSED.single(self.num_refused)


class GrammarChecks:
    """Checks the grammars of requests for the served model.

    Args:
        open_compiler: Opens what compiles them for a tokenizer; None: `CompilerProcess`.
        meter: Counts the grammars, for all models of a front; None: one of its own.
    """

    def __init__(self, open_compiler: OpenCompiler | None = None, meter: "GrammarMeter | None" = None) -> None:
        self.meter = meter or GrammarMeter()
        self._open_compiler = open_compiler or CompilerProcess
        self._queue = CompileQueue(DaemonThreads(1))  # a compiler serves one thread
        self._compiler: tuple[Tokenizer | None, Compiler | None] = None, None
        self._remembered: OrderedDict[_Key, Verdict] = OrderedDict()
        self._num_remembered_bytes = 0

    async def check(self, asked: AskedGrammar, model: TextModel, tenant: str = "") -> Grammar:
        """Return a grammar in its wire form, if outputs of the model can follow it.

        Raises:
            InvalidFieldError: outputs cannot follow it; with the parser's words and the place.
            QueueFullError, UnavailableError: there is no verdict in time, or the executors have another matcher.
        """
        field = asked.field
        if not model.info.num_grammar_slots:
            rule = "unset: no executor of this model offers grammars; it lacks llguidance, or cannot read the tokenizer"
            raise InvalidFieldError(field, "set", rule)
        if model.tokenizer.is_absent:
            raise InvalidFieldError(field, "set", f"unset: this model has no tokenizer; {TOKENIZER_FIX}")
        key = model.info.matcher_id, asked.digest
        verdict = self._remembered.get(key)
        if verdict is not None:
            with suppress(KeyError):  # the thread has forgotten it just now
                self._remembered.move_to_end(key)
        else:
            try:
                async with asyncio.timeout(LIMIT_S):
                    verdict = await self._queue.run(tenant, key, partial(self._verdict, key, asked, model))
            except TimeoutError:
                raise UnavailableError(
                    f"the grammar was not compiled within {LIMIT_S:g} s; send it again later"
                ) from None
        if isinstance(verdict, InvalidFieldError):
            raise verdict.with_traceback(None)
        return verdict

    def _verdict(self, key: _Key, asked: AskedGrammar, model: TextModel) -> Verdict:
        """Return the verdict on a grammar, in the thread; it is remembered even if its request has left."""
        if key in self._remembered:  # compiled meanwhile, for another tenant
            return self._remembered[key]
        try:
            compiler = self._compiler_of(model, asked.field)
            self._queue.most = MAX_WAITING
            begun_at_s = monotonic_s()
            verdict = compiler.verdict(asked)
            self.meter.times.observe(monotonic_s() - begun_at_s)
        except InvalidFieldError as error:
            verdict = error
        self.meter.num_refused += isinstance(verdict, InvalidFieldError)
        self._remember(key, verdict)
        return verdict

    def _remember(self, key: _Key, verdict: Verdict) -> None:
        self._remembered[key] = verdict
        self._num_remembered_bytes += _size(verdict)
        while len(self._remembered) > MAX_REMEMBERED or self._num_remembered_bytes > MAX_REMEMBERED_BYTES:
            _, forgotten = self._remembered.popitem(last=False)
            self._num_remembered_bytes -= _size(forgotten)

    def _compiler_of(self, model: TextModel, field: str) -> Compiler:
        """Return what compiles grammars for the model's tokens; it is opened for the first grammar."""
        tokenizer, compiler = self._compiler
        if compiler is None or tokenizer is not model.tokenizer:
            if compiler is not None:
                compiler.close()
            try:
                files = model.tokenizer.files
                compiler = self._open_compiler(files, model.info.eos_token_ids, model.info.vocab_size)
            except UnsupportedTokenizerError as error:
                raise InvalidFieldError(field, "set", f"unset: {error}") from error
            self._compiler = model.tokenizer, compiler
        if compiler.matcher_id != model.info.matcher_id:
            raise UnavailableError(
                f"the executors check grammars with {model.info.matcher_id}, this scheduler with "
                f"{compiler.matcher_id}: both need the same release of llguidance and the same tokenizer"
            )
        return compiler


def _size(verdict: Verdict) -> int:
    return len(verdict.body) if isinstance(verdict, Grammar) else len(str(verdict).encode(errors="replace"))


@dataclass(eq=False, slots=True)
class _Work:
    """A call that waits or runs, with the number of callers that want its result."""

    call: Callable[[], Verdict]
    result: "asyncio.Future[Verdict]"
    num_wanting: int = 0


class CompileQueue:
    """Runs one call at a time. For one event loop. Tenants take turns.

    Equal grammars that wait for one tenant are compiled once, and so is one that runs, whichever tenants ask. A full
    queue still takes grammars within the fair share of their tenant, as the waiting queue does
    (engine/waiting_limits.py): it drops the newest grammar of the tenant that is furthest above its own share.

    Attributes:
        most: How many calls may wait; None: any number.
    """

    def __init__(self, threads: Executor) -> None:
        self.most: int | None = None
        self._threads = threads
        self._waiting: dict[str, dict[Hashable, _Work]] = {}  # by tenant in the order of turns, oldest call first
        self._running: dict[Hashable, _Work] = {}  # at most one

    async def run(self, tenant: str, key: Hashable, call: Callable[[], Verdict]) -> Verdict:
        """Return the result of a call, or of the equal one that waits or runs.

        Args:
            tenant: The tenant whose turn it takes.
            key: Equal for equal calls.
            call: Runs in a thread.

        Raises: QueueFullError: there is no room for it, or another tenant took its place.
        """
        work = self._running.get(key) or self._waiting.get(tenant, {}).get(key)
        if work is None:
            self._make_room(tenant)
            work = _Work(call, asyncio.get_running_loop().create_future())
            self._waiting.setdefault(tenant, {})[key] = work
            self._start()
        work.num_wanting += 1
        try:
            return await asyncio.shield(work.result)
        finally:
            work.num_wanting -= 1
            if not work.num_wanting and self._waiting.get(tenant, {}).get(key) is work:
                self._take_out(tenant, key)

    def _make_room(self, tenant: str) -> None:
        """Make room for one more call of a tenant. Raises QueueFullError: there is none."""
        num_of = {name: len(works) for name, works in self._waiting.items()}
        num_waiting = sum(num_of.values())
        if self.most is None or num_waiting < self.most:
            return
        share = self.most / len({*num_of, tenant})
        furthest = max(num_of, key=num_of.__getitem__)
        num_own = num_of.get(tenant, 0)
        if (num_own and num_own + 1 > share) or num_of[furthest] <= max(1, share):
            raise QueueFullError(num_waiting, RETRY_AFTER_S, queue=QUEUE)
        displaced = self._take_out(furthest, next(reversed(self._waiting[furthest])))
        displaced.result.set_exception(
            QueueFullError(num_of[furthest] - 1, RETRY_AFTER_S, furthest, queue=QUEUE, gives_way=True)
        )

    def _take_out(self, tenant: str, key: Hashable) -> _Work:
        work = self._waiting[tenant].pop(key)
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        return work

    def _start(self) -> None:
        """Run what is next, if nothing runs."""
        if self._running or not self._waiting:
            return
        tenant = next(iter(self._waiting))
        key = next(iter(self._waiting[tenant]))
        self._running[key] = work = self._take_out(tenant, key)
        if others := self._waiting.pop(tenant, None):
            self._waiting[tenant] = others  # behind all other tenants
        running = asyncio.get_running_loop().run_in_executor(self._threads, work.call)
        running.add_done_callback(partial(self._end, work))

    def _end(self, work: _Work, ran: "asyncio.Future[Verdict]") -> None:
        self._running.clear()
        if ran.cancelled():  # the loop ends
            return
        error = ran.exception()
        if not work.num_wanting:
            work.result.cancel()
        elif error is not None:
            work.result.set_exception(error)
        else:
            work.result.set_result(ran.result())
        self._start()
