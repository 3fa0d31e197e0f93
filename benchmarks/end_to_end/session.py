"""The engines take turns: engines of one class of number formats live together, and one of them works at a time.

A slow spell of the machine then hits all that are compared. A peer that took more than SLOW times as long as the
fastest of its class in the first round is not measured again at that workload: it cannot be the best one.

A row, one workload in one class, is measured in all its rounds before the next one: a run can be cut into pieces.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.end_to_end.engine_process import EngineError, EngineProcess, LoadMeter
from benchmarks.end_to_end.engines import CLASSES, OURS, EngineSpec, interpreter, options_of, weight_bytes, why_missing
from benchmarks.end_to_end.limits import Sample, sample_limits
from benchmarks.end_to_end.result import EngineRecord, Model, RunRecord
from benchmarks.end_to_end.workloads import WARM_UPS, Workload

SLOW = 1.4
SPOILED_SHARE = 0.05  # of all cores, by other processes than the engine
START_TIMEOUT_S = 600.0
RUN_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured."""

    specs: Sequence[EngineSpec]
    directory: Path  # the model: a Hugging Face directory or a GGUF file
    vocab_size: int
    workloads: Sequence[Workload]  # in this order, every round
    num_rounds: int
    num_repeats: int  # how often a run that other work spoiled is repeated
    num_threads: int  # equal for all engines
    folder: Path  # where the engines' logs go
    measured: frozenset[tuple[str, str]] = frozenset()  # engines and workloads that another piece of the result has
    most_minutes: float = math.inf  # no row begins later than this; the class that runs then is the last one
    # How an engine's process is started; tests have another one.
    command: Callable[[EngineSpec], list[str]] = lambda spec: adapter_command(spec.adapter, interpreter(spec))

    @property
    def max_tokens(self) -> int:
        """The longest sequence that an engine must hold."""
        return max(workload.longest_tokens for workload in (*self.workloads, *WARM_UPS))


@dataclass(slots=True)
class Findings:
    """What was measured so far."""

    engines: list[EngineRecord] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    runs: list[RunRecord] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


def adapter_command(adapter: str, python: Path = Path(sys.executable)) -> list[str]:
    return [str(python), "-m", "benchmarks.end_to_end.adapters.serve", adapter]


class Session:
    """Carries out a plan.

    Args:
        plan: What to measure.
        model: For the bytes that the engines read.
        say: Called with a sentence about each event.
    """

    def __init__(self, plan: Plan, model: Model, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._model = model
        self._say = say
        self._seed = time.time_ns() // 1_000_000_000  # fresh ids in every run
        self._began = time.monotonic()
        self.findings = Findings()

    def measure(self, after_row: Callable[[Findings], None]) -> None:
        """Measure class by class; `after_row` is called with all that is known by then."""
        self._sample_limits()
        for number_class in CLASSES:
            specs = [spec for spec in self._plan.specs if spec.number_class == number_class]
            specs = [spec for spec in specs if any(self._is_wanted(spec, each) for each in self._plan.workloads)]
            if specs and not self._is_time_up():
                self._measure_class(specs, after_row)

    def _sample_limits(self) -> None:
        sample = sample_limits(self._plan.num_threads)
        self.findings.samples.append(sample)
        if sample.read_gb is not None and sample.fma_gflop is not None:
            self._say(f"this machine: {sample.read_gb:.1f} GB/s read, {sample.fma_gflop:.0f} GFLOP/s in float32")

    def _is_wanted(self, spec: EngineSpec, workload: Workload) -> bool:
        takes_part = not spec.workloads or workload.name in spec.workloads
        return takes_part and (spec.name, workload.name) not in self._plan.measured

    def _is_time_up(self) -> bool:
        return time.monotonic() - self._began >= 60 * self._plan.most_minutes

    def _measure_class(self, specs: Sequence[EngineSpec], after_row: Callable[[Findings], None]) -> None:
        with ExitStack() as stack:
            alive: dict[str, EngineProcess] = {}
            for spec in specs:
                process = self._start(spec, stack)
                if process is not None:
                    alive[spec.name] = process
            by_name = {spec.name: spec for spec in specs}
            for workload in self._plan.workloads:
                if self._is_time_up():
                    self._say("the time is up; --append goes on with the rows that are left")
                    break
                for round_number in range(1, self._plan.num_rounds + 1):
                    for name in _rotated(list(alive), round_number):
                        if self._is_wanted(by_name[name], workload) and not self._is_slow(name, workload, specs):
                            self._run(name, workload, round_number, alive)
                after_row(self.findings)
        self._sample_limits()
        after_row(self.findings)

    def _start(self, spec: EngineSpec, stack: ExitStack) -> EngineProcess | None:
        """Start an engine and warm it up; None: it cannot run, and the findings say why."""
        plan = self._plan
        reason = why_missing(spec, plan.directory)
        if reason is None:
            log_path = plan.folder / f"{spec.name.replace(' ', '-')}.log"
            process = stack.enter_context(EngineProcess(plan.command(spec), log_path))
            try:
                began = time.monotonic()
                options = options_of(spec, plan.directory, plan.num_threads, plan.max_tokens)
                description = process.start(options, START_TIMEOUT_S)
                for warm_up in WARM_UPS:
                    process.generate(warm_up.requests(self._next_seed(), plan.vocab_size), RUN_TIMEOUT_S)
            except EngineError as error:
                reason = str(error)
            else:
                start_s = time.monotonic() - began
                record = EngineRecord(
                    name=spec.name,
                    product=spec.product,
                    number_format=spec.number_format,
                    number_class=spec.number_class,
                    versions=description.versions,
                    settings=description.settings,
                    weight_bytes=weight_bytes(spec, plan.directory, self._model),
                    start_s=round(start_s, 1),
                )
                self.findings.engines.append(record)
                self._say(f"{spec.name} is ready after {start_s:.0f} s")
                return process
        self._say(f"{spec.name} is left out: {reason}")
        self.findings.missing[spec.name] = reason
        return None

    def _run(self, name: str, workload: Workload, round_number: int, alive: dict[str, EngineProcess]) -> None:
        """Measure one run; the least spoiled of its repetitions counts."""
        runs: list[RunRecord] = []
        for _ in range(1 + self._plan.num_repeats):
            requests = workload.requests(self._next_seed(), self._plan.vocab_size)
            meter = LoadMeter(alive[name].pid, [other.pid for key, other in alive.items() if key != name])
            try:
                generation = alive[name].generate(requests, RUN_TIMEOUT_S)
            except EngineError as error:
                self._say(f"{name} failed at {workload.name} and is left out from here on: {error}")
                self.findings.missing[name] = f"failed at {workload.name}: {error}"
                alive.pop(name).stop()
                return
            load = meter.stop()
            run = RunRecord(
                engine=name,
                workload=workload.name,
                round=round_number,
                seconds=generation.seconds,
                first_token_s=[round(seconds, 5) for seconds in generation.first_token_s],
                output_tokens=sum(generation.output_tokens),
                foreign_share=round(load.foreign_share, 4),
                idle_engines_s=round(load.idle_engines_s, 2),
                is_spoiled=load.foreign_share > SPOILED_SHARE,
            )
            runs.append(run)
            if not run.is_spoiled:
                break
        best = min(runs, key=lambda run: run.foreign_share)
        self.findings.runs.append(best)
        others = f", others took {best.foreign_share:.0%} of the machine" if best.is_spoiled else ""
        self._say(f"round {round_number} {workload.name} {name}: {best.seconds:.2f} s{others}")

    def _is_slow(self, name: str, workload: Workload, specs: Sequence[EngineSpec]) -> bool:
        """Return whether a peer took so long in the first round that it need not run again."""
        names = {spec.name for spec in specs}
        first = {
            run.engine: run.seconds
            for run in self.findings.runs
            if run.workload == workload.name and run.round == 1 and run.engine in names
        }
        is_ours = any(spec.name == name and spec.product == OURS for spec in specs)
        return not is_ours and name in first and first[name] > SLOW * min(first.values())

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed


def _rotated(names: list[str], by: int) -> list[str]:
    """Let another engine begin in each round."""
    start = by % len(names) if names else 0
    return names[start:] + names[:start]
