"""Logged steps as `AdminService` shows them: field by field, and in one sentence."""

from octavo.admin.v1 import admin_pb2
from octavo.values.wording import counted
from octavo_shared.step_wire.step import Fork, Int32Array
from scheduler_svc.telemetry.recent_steps import RecentStep


def step_state(logged: RecentStep) -> admin_pb2.StepState:
    """Return a step field by field."""
    step, delta, layout, result = logged.step, logged.step.delta, logged.layout, logged.result
    first_chunk = layout.num_decodes
    state = admin_pb2.StepState(
        step_id=step.step_id,
        epoch=step.epoch,
        text=step_text(logged),
        decode_slots=layout.slots[:first_chunk].tolist(),
        prefill_chunks=[
            admin_pb2.PrefillChunk(slot=slot, start=start, num_tokens=length)
            for slot, start, length in zip(
                layout.slots[first_chunk:].tolist(),
                layout.starts[first_chunk:].tolist(),
                layout.lengths[first_chunk:].tolist(),
                strict=True,
            )
        ],
        admitted_slots=[admission.slot for admission in delta.admissions],
        admissions=[
            admin_pb2.AdmittedSequence(
                slot=admission.slot,
                num_tokens=len(admission.token_ids),
                num_computed_tokens=admission.num_computed_tokens,
                num_blocks=len(admission.block_ids),
            )
            for admission in delta.admissions
        ],
        forks=_forks(delta.forks),
        beam_forks=_forks(delta.beam_forks),
        continued_beam_slots=delta.appended_tokens[:, 0].tolist(),
        released_slots=delta.released_slots.tolist(),
        blocks_to_swap_out=_moves(step.blocks_to_swap_out),
        blocks_to_swap_in=_moves(step.blocks_to_swap_in),
        blocks_to_copy=_moves(step.blocks_to_copy),
        request_bytes=logged.request_bytes,
    )
    if result is not None:
        state.execute_duration_us = result.execute_duration_us
        state.round_trip_us = logged.round_trip_us
        state.num_sampled_tokens = _num_sampled_tokens(logged)
        state.num_candidates = _num_candidates(logged)
    return state


def step_summary(logged: RecentStep) -> admin_pb2.StepSummary:
    """Return a step as one line."""
    step, layout = logged.step, logged.layout
    summary = admin_pb2.StepSummary(
        step_id=step.step_id,
        text=step_text(logged),
        decided_at_us=round(logged.decided_at_s * 1e6),
        num_decodes=layout.num_decodes,
        num_prefill_tokens=int(layout.lengths[layout.num_decodes :].sum()),
        num_admissions=len(step.delta.admissions),
        num_moved_blocks=len(step.blocks_to_copy) + len(step.blocks_to_swap_out) + len(step.blocks_to_swap_in),
    )
    if logged.result is not None:
        summary.execute_duration_us = logged.result.execute_duration_us
        summary.round_trip_us = logged.round_trip_us
    return summary


def step_text(logged: RecentStep) -> str:
    """Say in one sentence what a step did, and nothing of what it did not do."""
    step, delta, layout = logged.step, logged.step.delta, logged.layout
    num_chunks = len(layout.slots) - layout.num_decodes
    num_chunk_tokens = int(layout.lengths[layout.num_decodes :].sum())
    num_admitted_tokens = sum(len(admission.token_ids) for admission in delta.admissions)
    num_ready_tokens = sum(admission.num_computed_tokens for admission in delta.admissions)
    num_pooled_tokens = sum(len(text.token_ids) for text in step.pooling_inputs)
    how_ready = f" with {num_ready_tokens} of {num_admitted_tokens} tokens already computed"
    parts = [
        (len(step.blocks_to_swap_out), "block", " swapped out"),
        (len(step.blocks_to_swap_in), "block", " swapped in"),
        (len(step.blocks_to_copy), "block", " copied"),
        (layout.num_decodes, "decode", ""),
        (num_chunks, "prefill chunk", f" of {counted(num_chunk_tokens, 'token')}"),
        (len(step.pooling_inputs), "text", f" pooled, of {counted(num_pooled_tokens, 'token')}"),
        (len(delta.admissions), "admission", how_ready),
        (len(delta.forks), "fork", ""),
        (len(delta.beam_forks), "beam fork", ""),
        (len(delta.released_slots), "slot", " released"),
    ]
    done = ", ".join(counted(number, noun) + more for number, noun, more in parts if number)
    return f"{done}; {_answer_text(logged)}"


def _answer_text(logged: RecentStep) -> str:
    if logged.result is None:
        return "no result yet"
    sampled = f"{counted(_num_sampled_tokens(logged), 'token')} sampled"
    num_candidates = _num_candidates(logged)
    return f"{sampled}, {counted(num_candidates, 'candidate')} for beams" if num_candidates else sampled


def _num_sampled_tokens(logged: RecentStep) -> int:
    """Return the number of tokens that the executor chose itself: rows of beams only bring candidates."""
    if logged.result is not None and logged.result.token_counts is not None:
        return len(logged.result.sampled_token_ids)
    num_candidates = logged.layout.num_candidates
    num_rows = len(logged.layout.sample_slots)
    return num_rows if num_candidates is None else num_rows - int((num_candidates > 0).sum())


def _num_candidates(logged: RecentStep) -> int:
    num_candidates = logged.layout.num_candidates
    return 0 if num_candidates is None else int(num_candidates.sum())


def _forks(forks: tuple[Fork, ...]) -> list[admin_pb2.ForkedSlot]:
    return [admin_pb2.ForkedSlot(parent_slot=fork.parent_slot, slot=fork.slot) for fork in forks]


def _moves(pairs: Int32Array) -> list[admin_pb2.BlockMove]:
    return [admin_pb2.BlockMove(source_block=source, target_block=target) for source, target in pairs.tolist()]
