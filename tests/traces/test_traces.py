"""Scheduling traces: each `*.txt` beside this file is a story of commands and what they lead to.

A command stands on a line, its expected output after `----` up to an empty line; `#` starts a comment.

    limits max_num_seqs=2 budget=8 block_size=4 blocks=6 max_model_len=24   start a core; it also takes
                                                    host_blocks=8 window=8 long=8 prefix_cache=on vocab=13
    add a prompt=5 max_tokens=4 stop=107,108        queue a request; a's prompt is 101 102 ..., b's 201 202 ...
    add a prompt=5 n=2                              a group of two outputs, a.0 and a.1
    add a prompt=5 beams=2                          a beam search of this width
    add a prompt=5,6,7                              a prompt of these tokens
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

import numpy as np
import pytest

from scheduler_svc.core.beams.beam_search import BeamSearchParams
from scheduler_svc.core.executor_core import ExecutorCore
from scheduler_svc.core.integrity import check_integrity
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.step.results import StepUpdates
from scheduler_svc.core.stopping import StopConditions
from shared.step import Step
from tests.support.driving import Bench, group, small_limits
from tests.support.toy_executor import count_up, hashed_next_token

TRACES = sorted(Path(__file__).parent.glob("*.txt"))


class Stage:
    """Plays the commands of one trace."""

    def __init__(self) -> None:
        self.bench = Bench(small_limits())
        self.groups: dict[str, SequenceGroup] = {}

    @property
    def core(self) -> ExecutorCore:
        return self.bench.core

    def play(self, command: str) -> str:
        """Run a command; return its output."""
        verb, *words = command.split()
        options = dict(word.split("=") for word in words if "=" in word)
        names = [word for word in words if "=" not in word]
        lines: list[str] = []
        match verb:
            case "limits":
                self.bench = new_bench(options)
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
                self.core.finish(self.groups[names[0]].live_sequences[-1])
            case "abort":
                self.core.abort(self.groups[names[0]])
            case "evacuate":
                self.evacuate()
            case _:
                raise ValueError(f"unknown command {command!r}")
        check_integrity(self.core)
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
        )
        if not self.core.admissions.can_ever_admit(added):
            return [f"refused  {self.core.admissions.why_never(added)}"]
        self.bench.queue.add(added)
        return []

    def evacuate(self) -> None:
        groups = self.core.evacuate()
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
        return [*failed, f"step {step.step_id} of epoch {step.epoch}", *self.decisions(step, preempted)]

    def decisions(self, step: Step, preempted: list[str]) -> list[str]:
        """Say what a step changes, moves and runs."""
        delta = step.delta
        names = {sequence.slot: name_of(sequence) for sequence in self.running_sequences()}
        lines = [f"  preempt  {name}" for name in preempted]
        lines += [f"  release  slot {slot}" for slot in delta.released_slots.tolist()]
        for admission in delta.admissions:
            cached = f", {admission.num_computed_tokens} tokens are there" if admission.num_computed_tokens else ""
            lines.append(
                f"  admit    {names[admission.slot]} in slot {admission.slot}, {blocks(admission.block_ids)}{cached}"
            )
        for fork in delta.beam_forks:
            lines.append(f"  fork     slot {fork.parent_slot} to slot {fork.slot}")
        for slot, token_id in delta.appended_tokens.tolist():
            lines.append(f"  choose   token {token_id} in slot {slot}")
        lines += [f"  grow     {names[slot]} by block {block}" for slot, block in delta.appended_blocks.tolist()]
        lines += [
            f"  out      block {device} to host block {host}" for device, host in step.blocks_to_swap_out.tolist()
        ]
        lines += [f"  in       host block {host} to block {device}" for host, device in step.blocks_to_swap_in.tolist()]
        lines += [f"  copy     block {source} to block {target}" for source, target in step.blocks_to_copy.tolist()]
        lines += [f"  hold     {names[slot]}" for slot in delta.deactivated_slots.tolist() if slot in names]
        lines += self.rows(step, names)
        for fork in delta.forks:
            lines.append(f"  fork     {names[fork.parent_slot]} to {names[fork.slot]} in slot {fork.slot}, samples")
        return lines

    def rows(self, step: Step, names: dict[int, str]) -> list[str]:
        """Say what a step computes."""
        layout = self.core.in_flight[-1].layout
        chunked, sampled = dict(step.delta.prefill_chunks.tolist()), layout.sample_slots.tolist()
        lines = []
        for slot, start, length in zip(
            layout.slots.tolist(), layout.starts.tolist(), layout.lengths.tolist(), strict=True
        ):
            kind = "prefill" if slot in chunked else "decode "
            last = f" to {start + length - 1}" if length > 1 else ""
            ends = ", samples" if slot in sampled else ""
            if ends and layout.num_candidates is not None and layout.num_candidates[sampled.index(slot)]:
                ends = f", {layout.num_candidates[sampled.index(slot)]} candidates"
            lines.append(f"  {kind}  {names[slot]} position{'s' if last else ''} {start}{last}{ends}")
        return lines

    def process(self) -> list[str]:
        if not self.bench.results:
            return ["no result"]
        step_id = self.bench.results[0].step_id
        return [f"result of step {step_id}", *tokens(self.bench.process())]

    def running_sequences(self) -> list[Sequence]:
        return [
            sequence
            for running in self.core.batch.running
            for sequence in running.sequences
            if sequence.status is SequenceStatus.RUNNING and sequence.slot >= 0
        ]

    def state(self) -> list[str]:
        """Say where every sequence is, and how full the pools are."""
        core, allocator = self.core, self.core.blocks.allocator
        lines = []
        for sequence in self.running_sequences():
            slot = sequence.slot
            is_beam = sequence.group.beams is not None
            num_known = core.table.num_tokens[slot] if is_beam else core.batch.num_known_tokens[slot]
            counts = f"{num_known} tokens, {core.batch.num_computed_tokens[slot]} computed"
            lines.append(f"running  {name_of(sequence)}: {counts}, {blocks(core.batch.held_blocks(slot))}")
        for swapped in core.swapped:
            lines += [f"swapped  {carried(sequence)}" for sequence in swapped.live_sequences]
        for waiting in [*core.preempted.groups, *self.bench.queue.in_order()]:
            lines += [f"waiting  {carried(sequence)}" for sequence in waiting.sequences_to_compute]
        cached = f", {allocator.num_cached_blocks} of them cached" if allocator.num_cached_blocks else ""
        lines.append(f"free     {allocator.num_free_blocks} of {allocator.num_blocks} blocks{cached}")
        host = core.swapped.host
        if host.num_used_blocks:
            lines.append(f"host     {host.num_free_blocks} of {host.num_blocks} blocks free")
        return lines


def prompt_from(option: str, first: int) -> list[int]:
    """Return the tokens of "7,8,9", or as many as a single number says."""
    numbers = [int(number) for number in option.split(",")]
    return numbers if len(numbers) > 1 else list(range(first, first + numbers[0]))


def name_of(sequence: Sequence) -> str:
    """Return "a" for a lone output, "a.0" and so on for those of a group, or the ranks of the beams of a search."""
    owner = sequence.group
    if len(owner.sequences) == 1:
        return owner.request_id
    return f"{owner.request_id}.{owner.sequences.index(sequence)}"


def carried(sequence: Sequence) -> str:
    """Say what a sequence without a slot carries."""
    in_flight = f", {sequence.num_inflight_tokens} in flight" if sequence.num_inflight_tokens else ""
    return f"{name_of(sequence)}: {len(sequence.token_ids)} tokens{in_flight}"


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


def blocks(block_ids: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> str:
    return "blocks " + " ".join(map(str, block_ids.tolist()))


def tokens(updates: StepUpdates) -> list[str]:
    """Say who got which token, and who ended."""
    lines = []
    for row, (sequence, token_id) in enumerate(zip(updates.sequences, updates.token_ids, strict=True)):
        ended = f", ends by {updates.finished[row].name}" if row in updates.finished else ""
        lines.append(f"  token    {name_of(sequence)}: {token_id}{ended}")
    for searched in updates.finished_searches:
        assert searched.beams is not None
        for found in searched.beams.finished_hypotheses():
            output = " ".join(map(str, found.token_ids.tolist()))
            lines.append(
                f"  found    {searched.request_id}: {output}, score {found.score:.3f}, {found.finish_reason.name}"
            )
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
    assert len(TRACES) >= 14
    assert all(path.read_text().startswith("# ") for path in TRACES)


def test_a_wrong_trace_is_noticed() -> None:
    (block, _) = parse("# one\nadd a prompt=5\n----\nfree     8 of 8 blocks\n")

    assert block.command == "add a prompt=5"
    assert Stage().play(block.command) != block.output
