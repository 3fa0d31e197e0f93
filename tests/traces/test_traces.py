"""Scheduling traces: each `*.txt` beside this file is a story of commands and what they lead to.

A command stands on a line, its expected output after `----` up to an empty line; `#` starts a comment.

    limits max_num_seqs=2 budget=8 block_size=4 blocks=6 max_model_len=24   start a scheduler
    add a prompt=5 max_tokens=4 stop=107,108    queue a request; a's prompt is 101 102 ..., b's 201 202 ...
    schedule                                    decide a step and run it; its result stays on its way
    process                                     take the oldest result
    step                                        schedule, then process
    finish a                                    end it from outside
    evacuate                                    lose the executor; go on in a new scheduler

The toy model counts: the token after 105 is 106, so a token that is lost or repeated shows at once.
After a change of the scheduler, look at the difference that OCTAVO_REWRITE_TRACES=1 makes.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.scheduler import Scheduler, StepUpdates
from scheduler_svc.core.sequence import Sequence, SequenceGroup, StopConditions
from shared.step import SamplingRow, Step
from tests.support.driving import Bench, small_limits

TRACES = sorted(Path(__file__).parent.glob("*.txt"))


class Stage:
    """Plays the commands of one trace."""

    def __init__(self) -> None:
        self.bench = Bench(small_limits())
        self.groups: dict[str, SequenceGroup] = {}

    @property
    def scheduler(self) -> Scheduler:
        return self.bench.scheduler

    def play(self, command: str) -> str:
        """Run a command; return its output."""
        verb, *words = command.split()
        options = dict(word.split("=") for word in words if "=" in word)
        names = [word for word in words if "=" not in word]
        match verb:
            case "limits":
                self.bench = Bench(limits_from(options))
                lines = []
            case "add":
                lines = [self.add(names[0], options)]
            case "schedule":
                lines = self.schedule()
            case "process":
                lines = self.process()
            case "step":
                lines = [*self.schedule(), *self.process()]
            case "finish":
                self.scheduler.finish(self.groups[names[0]].sequence)
                lines = []
            case "evacuate":
                self.evacuate()
                lines = []
            case _:
                raise ValueError(f"unknown command {command!r}")
        self.scheduler.check_integrity()
        return "\n".join([*lines, *self.state()])

    def add(self, name: str, options: dict[str, str]) -> str:
        first = 100 * (ord(name) - ord("a") + 1) + 1
        prompt = np.arange(first, first + int(options["prompt"]), dtype=np.int32)
        stop = frozenset(int(token) for token in options["stop"].split(",")) if "stop" in options else frozenset()
        conditions = StopConditions(int(options["max_tokens"]) if "max_tokens" in options else None, stop)
        group = self.groups[name] = SequenceGroup(name, prompt, SamplingRow(), conditions, len(self.groups))
        return f"add      {self.scheduler.add(group).name}"

    def evacuate(self) -> None:
        groups = self.scheduler.evacuate()
        self.bench = Bench(self.scheduler.limits, epoch=self.scheduler.epoch + 1)
        for group in groups:
            self.scheduler.add(group)

    def schedule(self) -> list[str]:
        before = {sequence.slot: sequence for sequence in self.scheduler.running}
        if (step := self.scheduler.schedule()) is None:
            return ["no step"]
        self.bench.results.append(self.bench.executor.execute(step))
        preempted = [sequence for sequence in self.scheduler.waiting if sequence in before.values()]
        return [f"step {step.step_id} of epoch {step.epoch}", *self.decisions(step, preempted)]

    def decisions(self, step: Step, preempted: list[Sequence]) -> list[str]:
        """Say what a step changes and runs."""
        layout, delta = self.scheduler.in_flight[-1].layout, step.delta
        names = {sequence.slot: sequence.group.request_id for sequence in self.scheduler.running}
        lines = [f"  preempt  {sequence.group.request_id}" for sequence in preempted]
        lines += [f"  release  slot {slot}" for slot in delta.released_slots.tolist()]
        for admission in delta.admissions:
            lines.append(f"  admit    {names[admission.slot]} in slot {admission.slot}, {blocks(admission.block_ids)}")
        lines += [f"  grow     {names[slot]} by block {block}" for slot, block in delta.appended_blocks.tolist()]
        lines += [f"  hold     {names[slot]}" for slot in delta.deactivated_slots.tolist()]
        chunked = dict(delta.prefill_chunks.tolist())
        sampled = layout.sample_slots.tolist()
        for slot, start, length in zip(
            layout.slots.tolist(), layout.starts.tolist(), layout.lengths.tolist(), strict=True
        ):
            kind = "prefill" if slot in chunked else "decode "
            last = f" to {start + length - 1}" if length > 1 else ""
            samples = ", samples" if slot in sampled else ""
            lines.append(f"  {kind}  {names[slot]} position{'s' if last else ''} {start}{last}{samples}")
        return lines

    def process(self) -> list[str]:
        if not self.bench.results:
            return ["no result"]
        result = self.bench.results.popleft()
        updates = self.scheduler.process(result)
        return [f"result of step {result.step_id}", *tokens(updates)]

    def state(self) -> list[str]:
        """Say where every sequence is, and how full the pool is."""
        table, allocator = self.scheduler.table, self.scheduler.block_manager.allocator
        lines = []
        for sequence in self.scheduler.running:
            slot = sequence.slot
            known, computed = self.scheduler.num_known_tokens[slot], self.scheduler.num_computed_tokens[slot]
            counts = f"{known} tokens, {computed} computed"
            lines.append(f"running  {sequence.group.request_id}: {counts}, {blocks(table.blocks_of(slot))}")
        for sequence in self.scheduler.waiting:
            late = f", {sequence.num_late_tokens} late" if sequence.num_late_tokens else ""
            lines.append(f"waiting  {sequence.group.request_id}: {len(sequence.token_ids)} tokens{late}")
        return [*lines, f"free     {allocator.num_free_blocks} of {allocator.num_blocks} blocks"]


def limits_from(options: dict[str, str]) -> SchedulerLimits:
    return small_limits(
        max_num_seqs=int(options["max_num_seqs"]),
        budget=int(options["budget"]),
        block_size=int(options["block_size"]),
        blocks=int(options["blocks"]),
        max_model_len=int(options["max_model_len"]),
    )


def blocks(block_ids: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> str:
    return "blocks " + " ".join(map(str, block_ids.tolist()))


def tokens(updates: StepUpdates) -> list[str]:
    """Say who got which token, and who ended."""
    lines = []
    for row, (sequence, token_id) in enumerate(zip(updates.sequences, updates.token_ids, strict=True)):
        ended = f", ends by {updates.finished[row].name}" if row in updates.finished else ""
        lines.append(f"  token    {sequence.group.request_id}: {token_id}{ended}")
    return lines


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
    assert len(TRACES) >= 8
    assert all(path.read_text().startswith("# ") for path in TRACES)


def test_a_wrong_trace_is_noticed() -> None:
    (block, _) = parse("# one\nadd a prompt=5\n----\nadd      NEVER\nfree     8 of 8 blocks\n")

    assert block.command == "add a prompt=5"
    assert Stage().play(block.command) != block.output
