"""Scheduling traces: each `*.txt` beside this file is a story of commands and what they lead to.

A command stands on a line, its expected output after `----` up to an empty line; `#` starts a comment.

    limits max_num_seqs=2 budget=8 block_size=4 blocks=6 max_model_len=24   start a core; it also takes
                                                    host_blocks=8 window=8 long=8 prefix_cache=on vocab=13
                                                    waiting=4, as --max-waiting-requests
    add a prompt=5 max_tokens=4 stop=107,108        queue a request; a's prompt is 101 102 ..., b's 201 202 ...
    add a prompt=5 n=2                              a group of two outputs, a.0 and a.1
    add a prompt=5 beams=2                          a beam search of this width
    add a prompt=5,6,7                              a prompt of these tokens
    add a prompt=5 tenant=red                       of this tenant
    schedule                                        decide a step and run it; its result stays on its way
    process                                         take the oldest result
    step                                            schedule, then process
    run                                             step until there is nothing to do; shows the last state only
    finish a                                        end its last live sequence from outside
    abort a                                         its client leaves
    evacuate                                        lose the executor; go on in a new core

The toy model counts: the token after 105 is 106, so a token that is lost or repeated shows at once; output i
counts in steps of i + 1. With `vocab` tokens are hashes of all tokens before them; searches need that.
After a change of the core, look at the difference that OCTAVO_REWRITE_TRACES=1 makes.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from octavo_shared.errors import QueueFullError
from scheduler_svc.core.integrity import check_integrity
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.waiting.policy import FcfsPolicy
from scheduler_svc.engine.held_requests import HeldRequests
from scheduler_svc.engine.settings import EngineSettings
from scheduler_svc.engine.suspects import Suspects
from scheduler_svc.engine.waiting_limits import WaitingLimits
from scheduler_svc.executors.driver_interface import DriverSettings
from scheduler_svc.executors.serving_limits import PlannerSettings
from scheduler_svc.request.parameters import BeamSearchParams, StopConditions
from tests.support.driving import Bench, group, small_limits
from tests.support.step_words import decision_lines, state_lines, token_lines
from tests.support.toy_executor import count_up, hashed_next_token

TRACES = sorted(Path(__file__).parent.glob("*.txt"))


class Stage:
    """Plays the commands of one trace."""

    def __init__(self) -> None:
        self.bench = Bench(small_limits())
        self.max_waiting_requests = 1000
        self.groups: dict[str, SequenceGroup] = {}

    @property
    def planner(self) -> ExecutorPlanner:
        return self.bench.planner

    def play(self, command: str) -> str:
        """Run a command; return its output."""
        verb, *words = command.split()
        options = dict(word.split("=") for word in words if "=" in word)
        names = [word for word in words if "=" not in word]
        lines: list[str] = []
        match verb:
            case "limits":
                self.bench = new_bench(options)
                self.max_waiting_requests = int(options.get("waiting", 1000))
            case "add":
                lines = self.add(names[0], options)
            case "schedule":
                lines = self.schedule()
            case "process":
                lines = self.process()
            case "step":
                lines = [*self.schedule(), *self.process()]
            case "run":
                self.bench.run()
            case "finish":
                self.planner.finish(self.groups[names[0]].live_sequences[-1])
            case "abort":
                self.planner.abort(self.groups[names[0]])
            case "evacuate":
                self.evacuate()
            case _:
                raise ValueError(f"unknown command {command!r}")
        check_integrity(self.planner)
        return "\n".join([*lines, *self.state()])

    def add(self, name: str, options: dict[str, str]) -> list[str]:
        arrival = ord(name) - ord("a")
        added = self.groups[name] = group(
            arrival,
            prompt_from(options["prompt"], 100 * (arrival + 1) + 1),
            StopConditions(
                int(options["max_tokens"]) if "max_tokens" in options else None,
                frozenset(int(token) for token in options["stop"].split(",")) if "stop" in options else frozenset(),
            ),
            num_sequences=int(options.get("n", 1)),
            beam_search=BeamSearchParams(int(options["beams"])) if "beams" in options else None,
            tenant=options.get("tenant", ""),
        )
        if not self.planner.admissions.can_ever_admit(added):
            return [f"refused  {self.planner.admissions.why_never(added)}"]
        try:
            displaced = self.waiting_limits().require_room(added.tenant, added.num_prompt_tokens)
        except QueueFullError as error:
            return [f"refused  {error}"]
        for other, _ in displaced:
            self.planner.abort(other)
        self.bench.queue.add(added)
        return [f"ended    {other.request_id}: {error}" for other, error in displaced]

    def waiting_limits(self) -> WaitingLimits:
        settings = EngineSettings(PlannerSettings(), DriverSettings(), FcfsPolicy(), self.max_waiting_requests)
        return WaitingLimits(self.bench.queue, Suspects(), HeldRequests(), settings, lambda: 1.0)

    def evacuate(self) -> None:
        groups = self.planner.evacuate()
        lost = self.bench
        self.bench = Bench(lost.limits, lost.next_token, epoch=lost.epoch + 1)
        for moved in [*groups, *lost.queue]:
            self.bench.queue.add(moved)

    def schedule(self) -> list[str]:
        preempted_before = {name: shown.num_preemptions for name, shown in self.groups.items()}
        num_failures = len(self.bench.failures)
        step = self.bench.try_schedule()
        failed = [f"failed   {f.group.request_id}: {f.message}" for f in self.bench.failures[num_failures:]]
        if step is None:
            return [*failed, "no step"]
        preempted = [name for name, shown in self.groups.items() if shown.num_preemptions > preempted_before[name]]
        return [
            *failed,
            f"step {step.step_id} of epoch {step.epoch}",
            *decision_lines(self.planner, self.planner.in_flight[-1], preempted),
        ]

    def process(self) -> list[str]:
        if not self.bench.results:
            return ["no result"]
        step_id = self.bench.results[0].step_id
        return [f"result of step {step_id}", *token_lines(self.bench.process())]

    def state(self) -> list[str]:
        """Say where every sequence is, and how full the pools are."""
        return state_lines(self.planner, self.bench.queue.in_order())


def prompt_from(option: str, first: int) -> list[int]:
    """Return the tokens of "7,8,9", or as many as a single number says."""
    numbers = [int(number) for number in option.split(",")]
    return numbers if len(numbers) > 1 else list(range(first, first + numbers[0]))


def new_bench(options: dict[str, str]) -> Bench:
    vocab_size = int(options.get("vocab", 0))
    limits: CoreLimits = small_limits(
        max_num_seqs=int(options["max_num_seqs"]),
        budget=int(options["budget"]),
        block_size=int(options["block_size"]),
        blocks=int(options["blocks"]),
        max_model_len=int(options["max_model_len"]),
        vocab_size=vocab_size or 100_000,
        host_blocks=int(options.get("host_blocks", 0)),
        sliding_window=int(options.get("window", 0)),
        long_prefill_threshold=int(options.get("long", 0)),
        prefix_caching=options.get("prefix_cache") == "on",
    )
    return Bench(limits, hashed_next_token(vocab_size) if vocab_size else count_up)


@dataclass
class Block:
    """A part of a trace: its text up to the command, the command (or none), the expected output."""

    text: str
    command: str | None = None
    output: str = ""

    def render(self, output: str) -> str:
        return self.text if self.command is None else f"{self.text}{self.command}\n----\n{output}\n"


def parse(trace: str) -> list[Block]:
    """Split a trace; rendering the blocks with their outputs, joined, gives it back."""
    parsed, text, lines = [], "", iter(trace.splitlines())
    for line in lines:
        if not line or line.startswith("#"):
            text += line + "\n"
            continue
        assert next(lines, None) == "----", f"no ---- after {line!r}"
        output = []
        ended_by_empty_line = False
        for expected in lines:
            if not expected:
                ended_by_empty_line = True
                break
            output.append(expected)
        parsed.append(Block(text, line, "\n".join(output)))
        text = "\n" if ended_by_empty_line else ""
    return [*parsed, Block(text)]


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_trace(path: Path) -> None:
    trace = path.read_text()
    stage, played = Stage(), ""

    for block in parse(trace):
        output = stage.play(block.command) if block.command else ""
        played += block.render(output)

    if os.environ.get("OCTAVO_REWRITE_TRACES") == "1":
        path.write_text(played)
    else:
        assert played == trace


def test_there_are_traces_and_each_tells_its_story_first() -> None:
    assert len(TRACES) >= 14
    assert all(path.read_text().startswith("# ") for path in TRACES)


def test_a_wrong_trace_is_noticed() -> None:
    (block, _) = parse("# one\nadd a prompt=5\n----\nfree     8 of 8 blocks\n")

    assert block.command == "add a prompt=5"
    assert Stage().play(block.command) != block.output
