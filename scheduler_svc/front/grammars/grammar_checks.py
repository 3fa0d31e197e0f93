"""Compiles grammars before their requests are admitted, so that what cannot be followed ends one request.

The text was bounded before (parts.py), the time is by compiler.py. A few requests may wait for it (compile_queue.py),
and who waits too long is refused. What the compiler says of a grammar is remembered; that it ended is not.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TypeAlias

from octavo_shared.errors import InvalidFieldError, UnavailableError
from octavo_shared.grammar.matcher import UnsupportedTokenizerError
from octavo_shared.process.clock import monotonic_s
from octavo_shared.process.histogram import Histogram
from octavo_shared.process.metric import Family, Metric
from octavo_shared.step_wire.executor_info import TokenizerFile
from scheduler_svc.front.grammars.compile_queue import CompileQueue
from scheduler_svc.front.grammars.compiler import TOO_LONG, Compiler, CompilerProcess
from scheduler_svc.front.grammars.parts import AskedGrammar, Part, grammar_of
from scheduler_svc.front.grammars.schema import Place, alone, subschemas
from scheduler_svc.front.text.text_model import TOKENIZER_FIX, TextModel
from scheduler_svc.front.text.text_threads import DaemonThreads
from scheduler_svc.front.text.tokenizer import Tokenizer

# Different grammars that may wait for it, once it has started.
MAX_WAITING = 64

# How long one request waits, in seconds: for those before it, too.
LIMIT_S = 10.0

# Grammars that are remembered, each by 32 bytes, and what is wrong with those that are.
MAX_REMEMBERED = 4096

# How long parts of a schema are compiled alone to find the place of what is wrong, in seconds.
SEARCH_S = 0.2

COMPILE_TIME = Metric(
    "octavo_grammar_compile_seconds", "histogram", "Time to compile the grammar of a request before it is admitted."
)
REFUSED = Metric(
    "octavo_grammars_refused_total",
    "counter",
    "Grammars that compiled to an error; those refused before are not counted.",
)
METRICS = (COMPILE_TIME, REFUSED)
_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


_Verdict: TypeAlias = InvalidFieldError | None
_Key: TypeAlias = tuple[str, bytes, str]

OpenCompiler: TypeAlias = Callable[[Sequence[TokenizerFile], Sequence[int], int], Compiler]


class GrammarMeter:
    """Counts grammars that were compiled.

    Attributes:
        times: How long that took, in seconds.
        num_refused: Those that outputs cannot follow.
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
        meter: Counts them, for all models of a front; None: for this one.

    Attributes:
        meter: As above.
    """

    def __init__(self, open_compiler: OpenCompiler | None = None, meter: "GrammarMeter | None" = None) -> None:
        self.meter = meter or GrammarMeter()
        self._open_compiler = open_compiler or CompilerProcess
        self._queue: CompileQueue[_Verdict] = CompileQueue(DaemonThreads(1))  # a compiler is for one
        self._compiler: tuple[Tokenizer | None, Compiler | None] = None, None
        self._remembered: OrderedDict[_Key, _Verdict] = OrderedDict()

    async def check(self, asked: AskedGrammar, model: TextModel, tenant: str = "") -> None:
        """Return if outputs of the model can follow a grammar.

        Args:
            asked: The grammar.
            model: Whose outputs.
            tenant: Who asks.

        Raises:
            InvalidFieldError: they cannot, with the parser's words and the place.
            QueueFullError, UnavailableError: that is not known in time, or the executors have another matcher.
        """
        field = asked.field
        if not model.info.num_grammar_slots:
            rule = "unset: no executor of this model offers grammars; it lacks llguidance, or cannot read the tokenizer"
            raise InvalidFieldError(field, "set", rule)
        if model.tokenizer.is_absent:
            raise InvalidFieldError(field, "set", f"unset: this model has no tokenizer; {TOKENIZER_FIX}")
        key = model.info.matcher_id, asked.grammar.digest, field
        if key in self._remembered:
            self._remembered.move_to_end(key)
            wrong = self._remembered[key]
        else:
            try:
                async with asyncio.timeout(LIMIT_S):
                    wrong = await self._queue.run(tenant, key, partial(self._verdict, key, asked, model))
            except TimeoutError:
                raise UnavailableError(
                    f"the grammar was not compiled within {LIMIT_S:g} s; send it again later"
                ) from None
        if wrong is not None:
            raise wrong.with_traceback(None)

    def _verdict(self, key: _Key, asked: AskedGrammar, model: TextModel) -> _Verdict:
        """Return what is wrong with a grammar, in the thread; it is remembered, whoever still wants to know."""
        if key in self._remembered:  # another tenant's turn came before
            return self._remembered[key]
        wrong: _Verdict = None
        try:
            compiler = self._compiler_of(model, asked.field)
            self._queue.most = MAX_WAITING
            begun_at_s = monotonic_s()
            words = compiler.check(asked.grammar)
            self.meter.times.observe(monotonic_s() - begun_at_s)
            if words:
                wrong = refusal(asked, words, compiler)
        except InvalidFieldError as error:
            wrong = error
        self.meter.num_refused += wrong is not None
        self._remembered[key] = wrong
        if len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)
        return wrong

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


def refusal(asked: AskedGrammar, words: str, compiler: Compiler) -> InvalidFieldError:
    """Return the refusal of a grammar that does not compile, with the part and the place that are wrong."""
    part = asked.parts[0]
    if words != TOO_LONG:
        alone_wrong = ((one, found) for one in asked.parts if (found := _words_of(one, compiler)))
        part, words = next(alone_wrong, (part, words))
    shown = part.shown
    has_place = part.schema is not None and words != TOO_LONG
    if has_place and (place := _place(part.schema or {}, words, part, compiler)).above is not None:
        shown = f"a schema that cannot be held at {place}"
    return InvalidFieldError(part.field, shown, f"{part.noun} that outputs can follow: {' '.join(words.split())}")


def _words_of(part: Part, compiler: Compiler) -> str:
    return compiler.check(grammar_of([part.rules], part))


def _place(schema: Mapping[str, object], words: str, part: Part, compiler: Compiler) -> Place:
    """Return the place of the innermost schema that alone is wrong in the same words, if that is found in time."""
    found, end_s = Place(), monotonic_s() + SEARCH_S
    for place, inner in islice(subschemas(schema), 1, None):
        if monotonic_s() > end_s:
            break
        tried = grammar_of([{"json_schema": alone(schema, inner)}], part)
        if place.is_in(found) and compiler.check(tried) == words:
            found = place
    return found
