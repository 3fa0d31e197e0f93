"""Executors, requests and their sequences as `AdminService` shows them.

Nothing here changes the engine. Next: `life.py`, what happened to a request; `explanation.py`, why a request waits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from octavo.admin.v1 import admin_pb2
from scheduler_svc.admin.life import event_states, milliseconds, set_times
from scheduler_svc.core.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.swapping import NO_BLOCK
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.executors.driver import ExecutorDriver

SEQUENCE_STATUS: Mapping[SequenceStatus, "admin_pb2.SequenceStatus.ValueType"] = {
    SequenceStatus.WAITING: admin_pb2.SEQUENCE_STATUS_WAITING,
    SequenceStatus.RUNNING: admin_pb2.SEQUENCE_STATUS_RUNNING,
    SequenceStatus.SWAPPED: admin_pb2.SEQUENCE_STATUS_SWAPPED,
    SequenceStatus.FINISHED: admin_pb2.SEQUENCE_STATUS_FINISHED,
}


REQUEST_STATUS_TEXT: Mapping["admin_pb2.RequestStatus.ValueType", str] = {
    admin_pb2.REQUEST_STATUS_WAITING: "waiting",
    admin_pb2.REQUEST_STATUS_RUNNING: "running",
    admin_pb2.REQUEST_STATUS_SWAPPED: "swapped",
    admin_pb2.REQUEST_STATUS_PREEMPTED: "preempted",
    admin_pb2.REQUEST_STATUS_PARKED: "quarantined",
}


@dataclass(frozen=True, slots=True)
class RequestLocation:
    """Where a live request is: on an executor and its planner, or on none."""

    status: "admin_pb2.RequestStatus.ValueType"
    executor: str = ""
    planner: ExecutorPlanner | None = None


class RequestLocations:
    """Where every live request is at this moment."""

    def __init__(self, engine: Engine) -> None:
        self._locations: dict[SequenceGroup, RequestLocation] = {
            request.group: RequestLocation(admin_pb2.REQUEST_STATUS_PARKED)
            for request in engine.requests.suspects.parked
        }
        for driver in engine.drivers.values():
            if driver.planner is not None:
                self._locations.update(locations_in(driver.address, driver.planner))

    def of(self, request: LiveRequest) -> RequestLocation:
        """Return where a live request is."""
        return self._locations.get(request.group) or RequestLocation(admin_pb2.REQUEST_STATUS_WAITING)


def locations_in(executor: str, planner: ExecutorPlanner) -> Iterator[tuple[SequenceGroup, RequestLocation]]:
    """Yield the groups that an executor's planner has, with their locations."""
    for groups, status in (
        (planner.batch.running, admin_pb2.REQUEST_STATUS_RUNNING),
        (planner.swapped.groups, admin_pb2.REQUEST_STATUS_SWAPPED),
        (planner.preempted.groups, admin_pb2.REQUEST_STATUS_PREEMPTED),
    ):
        for group in groups:
            yield group, RequestLocation(status, executor, planner)


def executor_state(driver: ExecutorDriver, now_s: float) -> admin_pb2.ExecutorState:
    """Return an executor; `now_s` is the monotonic time."""
    state = admin_pb2.ExecutorState(
        address=driver.address,
        status=admin_pb2.EXECUTOR_STATUS_CONNECTING,
        status_text="not attached",
        num_losses=driver.num_losses,
        num_output_tokens=driver.num_output_tokens,
        num_void_rows=driver.num_void_rows,
        num_draft_tokens=driver.num_drafts,
        num_accepted_draft_tokens=driver.num_accepted_drafts,
        last_error=driver.last_trouble,
        is_retired=driver.is_retired or driver.is_leaving,
        is_draining=driver.is_draining,
    )
    planner, session = driver.planner, driver.session
    if planner is None or session is None:
        return state
    state.instance_id = session.info.instance_id
    state.model_id = session.info.model_id
    state.numerics_id = session.info.numerics_id
    state.is_invariant = session.info.is_invariant
    state.weights_digest = session.info.weights_digest
    state.kv_cache_dtype = session.info.kv_cache_dtype
    state.warning = "; ".join(filter(None, (driver.trouble(now_s), session.info.warning)))
    state.max_steps_in_flight = driver.in_flight.limit
    if driver.in_flight.round_trip_s is not None:
        state.round_trip_us = round(driver.in_flight.round_trip_s * 1e6)
    set_planner_state(state, planner, now_s)
    return state


def set_planner_state(state: admin_pb2.ExecutorState, planner: ExecutorPlanner, now_s: float) -> None:
    """Fill in the state of an attached executor's planner; `now_s` is the monotonic time."""
    device, host = planner.blocks.allocator, planner.swapped.host
    state.status = admin_pb2.EXECUTOR_STATUS_ATTACHED
    state.status_text = "leaving" if state.is_retired else "draining" if state.is_draining else "attached"
    state.epoch = planner.epoch
    state.num_running_requests = len(planner.batch.running)
    state.num_swapped_requests = len(planner.swapped)
    state.num_preempted_requests = len(planner.preempted.groups)
    state.num_blocks = device.num_blocks
    state.num_free_blocks = device.num_free_blocks
    state.num_used_blocks = device.num_used_blocks
    state.num_cached_blocks = device.num_cached_blocks
    state.num_shared_blocks = device.num_shared_blocks
    state.num_host_blocks = host.num_blocks
    state.num_free_host_blocks = host.num_free_blocks
    state.num_used_host_blocks = host.num_used_blocks
    state.num_cached_host_blocks = host.num_cached_blocks
    state.role = planner.limits.role.value
    state.num_transfers = len(planner.transfers)
    state.num_slots = planner.limits.max_num_seqs
    state.has_states = planner.limits.has_states
    if (states := planner.blocks.states) is not None:
        state.num_state_blocks = states.allocator.num_blocks
        state.num_saved_states = states.allocator.num_cached_blocks
    if (encoder := planner.blocks.encoder) is not None:
        state.num_encoder_blocks = encoder.allocator.num_blocks
        state.num_used_encoder_blocks = encoder.allocator.num_used_blocks
        state.num_cached_encoder_blocks = encoder.allocator.num_cached_blocks
    state.num_free_slots = planner.batch.num_free_slots
    state.num_steps_in_flight = len(planner.in_flight)
    if planner.in_flight:
        state.oldest_step_age_ms = milliseconds(now_s - planner.in_flight[0].scheduled_at_s)
    state.last_sent_step_id = planner.last_scheduled_step_id
    state.last_processed_step_id = planner.last_processed_step_id


def request_state(
    request: LiveRequest, location: RequestLocation, now_s: float, *, is_whole: bool = True
) -> admin_pb2.RequestState:
    """Return a live request and its sequences; `now_s` is the monotonic time.

    `is_whole` False: without block tables and events, for lists.
    """
    group = request.group
    state = admin_pb2.RequestState(
        request_id=group.request_id,
        status=location.status,
        status_text=REQUEST_STATUS_TEXT[location.status],
        executor=location.executor,
        tenant=group.tenant,
        priority=group.priority,
        num_prompt_tokens=group.num_prompt_tokens,
        num_output_tokens=num_output_tokens(request),
        num_cached_tokens=group.num_cached_tokens,
        num_draft_tokens=request.num_draft_tokens,
        num_preemptions=group.num_preemptions,
        num_losses=request.num_losses,
        age_ms=milliseconds(now_s - request.times.arrived_at_s),
        sequences=sequence_states(group, location, shows_blocks=is_whole),
    )
    first = next((s for s in state.sequences if s.status != admin_pb2.SEQUENCE_STATUS_FINISHED), None)
    if location.planner is not None:
        block_size = location.planner.limits.block_size
        state.num_blocks = sum(-(-sequence.num_computed_tokens // block_size) for sequence in state.sequences)
    if first is not None:
        state.num_computed_tokens = first.num_computed_tokens
        if first.HasField("slot"):
            state.slot = first.slot
            state.block_table.extend(block for block in first.block_table if block != NO_BLOCK)
    if group.beam_search is not None:
        state.beam_search.CopyFrom(beam_search_state(group))
    times = replace(request.times, first_scheduled_at_s=group.first_scheduled_at_s)  # the group has it first
    set_times(state, times)
    if times.last_token_at_s is not None:
        state.last_token_age_ms = milliseconds(now_s - times.last_token_at_s)
    if is_whole:
        state.events.extend(event_states(times, group.num_prompt_tokens, request.life.events))
    return state


def num_output_tokens(request: LiveRequest) -> int:
    """Return the number of tokens generated so far, over all outputs or live beams."""
    beams = request.group.beams
    return request.num_output_tokens if beams is None else sum(len(beam.token_ids) for beam in beams.live)


def sequence_states(
    group: SequenceGroup, location: RequestLocation, *, shows_blocks: bool = True
) -> list[admin_pb2.SequenceState]:
    """Return the outputs of a group by index, or its live beams by rank; maybe without their block tables."""
    planner = location.planner
    table_slots = dict(planner.beam_batch.source_slots(group)) if planner is not None else {}
    states = []
    for rank, sequence in enumerate(group.sequences):
        state = admin_pb2.SequenceState(
            output_index=sequence.index if group.beams is None else rank,
            status=SEQUENCE_STATUS[sequence.status],
            num_tokens=0 if sequence.status is SequenceStatus.FINISHED else len(sequence.token_ids),
            num_late_tokens=sequence.num_inflight_rows,
        )
        if planner is not None and sequence in table_slots:
            table_slot = table_slots[sequence]  # until a forked beam has a slot, it is that of its parent
            if sequence.slot >= 0:
                state.slot = sequence.slot
            state.num_tokens = int(planner.table.num_known_tokens[table_slot])
            state.num_computed_tokens = int(planner.batch.num_computed_tokens[table_slot])
            if shows_blocks:
                state.block_table.extend(block_table(planner, table_slot))
        elif planner is not None and sequence in planner.swapped.tables:
            table = planner.swapped.tables[sequence]
            state.num_computed_tokens = table.num_computed_tokens
            if shows_blocks:
                state.block_table.extend(table.device_blocks.tolist())
                state.host_block_table.extend(table.host_blocks.tolist())
        if group.beams is not None and rank < len(group.beams.live):  # a finished search has none
            state.num_tokens = group.num_prompt_tokens + len(group.beams.live[rank].token_ids)
        states.append(state)
    return states


def block_table(planner: ExecutorPlanner, slot: int) -> list[int]:
    """Return the block table of a slot; NO_BLOCK stands for a block that fell out of the sliding window."""
    first = planner.blocks.groups[0]
    held: list[int] = first.held(slot).tolist()
    return [NO_BLOCK] * int(first.first_blocks[slot]) + held


def beam_search_state(group: SequenceGroup) -> admin_pb2.BeamSearchState:
    """Return the progress of a group's beam search; before its first admission it has no beam."""
    assert group.beam_search is not None
    state = admin_pb2.BeamSearchState(
        beam_width=group.beam_search.beam_width, num_outputs=group.beam_search.num_outputs
    )
    if group.beams is not None:
        state.live_scores.extend(beam.score for beam in group.beams.live)
        state.hypotheses.extend(
            admin_pb2.HypothesisState(score=hypothesis.score, num_tokens=len(hypothesis.token_ids))
            for hypothesis in group.beams.finished_hypotheses()
        )
    return state
