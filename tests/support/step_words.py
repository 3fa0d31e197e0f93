"""Steps of a core in the words of the trace files (`tests/traces/`): decisions, tokens, and where every sequence is."""

from collections.abc import Collection, Iterable

import numpy as np

from scheduler_svc.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.step_plan import StepInFlight
from scheduler_svc.core.step.step_updates import StepUpdates


def decision_lines(core: ExecutorPlanner, sent: StepInFlight, preempted: Collection[str]) -> list[str]:
    """Say what a step changes, moves and runs, right after it was decided; `preempted`: the names of groups."""
    step, delta = sent.step, sent.step.delta
    names = {sequence.slot: name_of(sequence) for sequence in _running_sequences(core)}
    lines = [f"  preempt  {name}" for name in preempted]
    lines += [f"  release  slot {slot}" for slot in delta.released_slots.tolist()]
    for admission in delta.admissions:
        cached = f", {admission.num_computed_tokens} tokens are there" if admission.num_computed_tokens else ""
        name = _of_slot(names, admission.slot)
        lines.append(f"  admit    {name} in slot {admission.slot}, {_blocks(admission.block_ids)}{cached}")
    for fork in delta.beam_forks:
        lines.append(f"  fork     slot {fork.parent_slot} to slot {fork.slot}")
    for slot, token_id in delta.appended_tokens.tolist():
        lines.append(f"  choose   token {token_id} in slot {slot}")
    lines += [f"  grow     {_of_slot(names, slot)} by block {block}" for slot, block in delta.appended_blocks.tolist()]
    lines += [f"  out      block {device} to host block {host}" for device, host in step.blocks_to_swap_out.tolist()]
    lines += [f"  in       host block {host} to block {device}" for host, device in step.blocks_to_swap_in.tolist()]
    lines += [f"  copy     block {source} to block {target}" for source, target in step.blocks_to_copy.tolist()]
    lines += [f"  hold     {names[slot]}" for slot in delta.deactivated_slots.tolist() if slot in names]
    lines += _row_lines(sent, names)
    for fork in delta.forks:
        parent, child = _of_slot(names, fork.parent_slot), _of_slot(names, fork.slot)
        lines.append(f"  fork     {parent} to {child} in slot {fork.slot}, samples")
    return lines


def _row_lines(sent: StepInFlight, names: dict[int, str]) -> list[str]:
    """Say what a step computes."""
    layout = sent.layout
    chunked, sampled = dict(sent.step.delta.prefill_chunks.tolist()), layout.sample_slots.tolist()
    lines = []
    for slot, start, length in zip(layout.slots.tolist(), layout.starts.tolist(), layout.lengths.tolist(), strict=True):
        kind = "prefill" if slot in chunked else "decode "
        last = f" to {start + length - 1}" if length > 1 else ""
        ends = ", samples" if slot in sampled else ""
        if ends and layout.num_candidates is not None and layout.num_candidates[sampled.index(slot)]:
            ends = f", {layout.num_candidates[sampled.index(slot)]} candidates"
        lines.append(f"  {kind}  {_of_slot(names, slot)} position{'s' if last else ''} {start}{last}{ends}")
    return lines


def token_lines(updates: StepUpdates) -> list[str]:
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


def state_lines(core: ExecutorPlanner, queue: Iterable[SequenceGroup]) -> list[str]:
    """Say where every sequence is, and how full the pools are; `queue`: the groups that no core has, in their order."""
    lines = []
    for sequence in _running_sequences(core):
        slot = sequence.slot
        is_beam = sequence.group.beams is not None
        num_known = core.table.num_tokens[slot] if is_beam else core.table.num_known_tokens[slot]
        counts = f"{num_known} tokens, {core.batch.num_computed_tokens[slot]} computed"
        held = [group.held(slot) for group in core.blocks.groups]
        lines.append(f"running  {name_of(sequence)}: {counts}, {_blocks(core.blocks.wire_ids(held))}")
    for swapped in core.swapped:
        lines += [f"swapped  {_carried(sequence)}" for sequence in swapped.live_sequences]
    for waiting in [*core.preempted.groups, *queue]:
        lines += [f"waiting  {_carried(sequence)}" for sequence in waiting.sequences_to_compute]
    for allocator in (group.allocator for group in core.blocks.groups):
        cached = f", {allocator.num_cached_blocks} of them cached" if allocator.num_cached_blocks else ""
        lines.append(f"free     {allocator.num_free_blocks} of {allocator.num_blocks} blocks{cached}")
    host = core.swapped.host
    if host.num_used_blocks:
        lines.append(f"host     {host.num_free_blocks} of {host.num_blocks} blocks free")
    return lines


def name_of(sequence: Sequence) -> str:
    """Return "a" for a lone output, "a.0" and so on for those of a group, or the ranks of the beams of a search."""
    owner = sequence.group
    if len(owner.sequences) == 1:
        return owner.request_id
    return f"{owner.request_id}.{owner.sequences.index(sequence)}"


def _running_sequences(core: ExecutorPlanner) -> list[Sequence]:
    return [
        sequence
        for running in core.batch.running
        for sequence in running.sequences
        if sequence.status is SequenceStatus.RUNNING and sequence.slot >= 0
    ]


def _of_slot(names: dict[int, str], slot: int) -> str:
    return names.get(slot, f"slot {slot}")


def _carried(sequence: Sequence) -> str:
    """Say what a sequence without a slot carries."""
    in_flight = f", {sequence.num_inflight_rows} in flight" if sequence.num_inflight_rows else ""
    return f"{name_of(sequence)}: {len(sequence.token_ids)} tokens{in_flight}"


def _blocks(block_ids: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> str:
    return "blocks " + " ".join(map(str, block_ids.tolist()))
