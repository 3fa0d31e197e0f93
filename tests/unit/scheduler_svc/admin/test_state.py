"""What is shown of a request's sequences: where each one is, and in which blocks."""

from octavo.admin.v1 import admin_pb2
from scheduler_svc.admin.state import RequestLocation, RequestLocations, executor_state, request_state, sequence_states
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.request.parameters import BeamSearchParams
from tests.support.driving import Bench, group, max_tokens, small_limits
from tests.support.idle_engine import IdleEngine

WAITING = admin_pb2.SEQUENCE_STATUS_WAITING
RUNNING = admin_pb2.SEQUENCE_STATUS_RUNNING
SWAPPED = admin_pb2.SEQUENCE_STATUS_SWAPPED
FINISHED = admin_pb2.SEQUENCE_STATUS_FINISHED


def running(bench: Bench) -> RequestLocation:
    return RequestLocation(admin_pb2.REQUEST_STATUS_RUNNING, "here", bench.planner)


def shown(bench: Bench, shown_group: SequenceGroup) -> list[admin_pb2.SequenceState]:
    return sequence_states(shown_group, running(bench))


# Sequences ---------------------------------------------------------------------------------------


def test_outputs_wait_until_the_shared_prompt_is_computed() -> None:
    bench = Bench(small_limits(budget=4))
    added = bench.add(0, 6, max_tokens(4), num_sequences=2)
    bench.step()
    lead, pending_fork = shown(bench, added)
    assert (lead.status, lead.num_tokens, lead.num_computed_tokens) == (RUNNING, 6, 4)
    assert (pending_fork.status, pending_fork.num_tokens, pending_fork.num_computed_tokens) == (WAITING, 6, 0)
    assert not pending_fork.HasField("slot")
    assert not pending_fork.block_table


def test_forks_show_the_blocks_that_they_share() -> None:
    bench = Bench(small_limits())
    added = bench.add(0, 6, max_tokens(4), num_sequences=2)
    bench.step()
    first, second = shown(bench, added)
    assert list(first.block_table) == list(second.block_table) == bench.blocks_of(added.sequences[0])
    bench.step()
    first, second = shown(bench, added)
    assert first.block_table[0] == second.block_table[0]
    assert first.block_table[1] != second.block_table[1]
    assert [state.num_tokens for state in (first, second)] == [8, 8]


def test_a_finished_output_has_nothing_any_more() -> None:
    bench = Bench(small_limits())
    added = bench.add(0, 6, max_tokens(4), num_sequences=2)
    bench.step()
    bench.planner.finish(added.sequences[0])
    ended, live = shown(bench, added)
    assert ended == admin_pb2.SequenceState(output_index=0, status=FINISHED)
    assert (live.output_index, live.status) == (1, RUNNING)


def test_blocks_that_fell_out_of_the_window_are_marked() -> None:
    bench = Bench(small_limits(budget=4, sliding_window=4, blocks=8))
    added = bench.add(0, 14, max_tokens(4))
    for _ in range(4):
        bench.step()
    (state,) = shown(bench, added)
    num_gone = list(state.block_table).count(-1)
    assert num_gone > 0
    assert list(state.block_table[:num_gone]) == [-1] * num_gone
    assert list(state.block_table[num_gone:]) == bench.blocks_of(added.sequences[0])[num_gone:]


def test_a_swapped_sequence_shows_its_host_blocks() -> None:
    bench = Bench(small_limits(blocks=6, host_blocks=8, preemption_mode=PreemptionMode.SWAP))
    bench.add(0, 8, max_tokens(9))
    victim = bench.add(1, 8, max_tokens(9))
    while victim not in bench.planner.swapped.groups:
        bench.step()
    (state,) = sequence_states(victim, RequestLocation(admin_pb2.REQUEST_STATUS_SWAPPED, "here", bench.planner))
    assert state.status == SWAPPED
    assert (state.num_tokens, state.num_computed_tokens) == (13, 12)
    assert list(state.block_table) == [-1, -1, -1]
    assert sorted(state.host_block_table) == [0, 1, 2]


def test_beams_are_shown_by_rank_with_the_blocks_of_their_parent_until_they_have_their_own() -> None:
    bench = Bench(small_limits(vocab_size=50))
    added = bench.add(0, 6, max_tokens(4), beam_search=BeamSearchParams(2))
    bench.step()
    best, second = shown(bench, added)
    assert [state.output_index for state in (best, second)] == [0, 1]
    assert [state.num_tokens for state in (best, second)] == [7, 7]
    assert best.HasField("slot")
    assert not second.HasField("slot")
    assert list(best.block_table) == list(second.block_table)
    assert len(best.block_table) == 2


# Requests and executors --------------------------------------------------------------------------


def test_a_request_is_shown_by_its_first_live_sequence() -> None:
    idle = IdleEngine(["e"], small_limits())
    request = idle.add(group(0, 6, num_sequences=2, tenant="red", priority=-3))
    planner = idle.planners[0]
    planner.schedule(0.0)
    state = request_state(request, RequestLocations(idle.engine).of(request), now_s=2.0)
    assert (state.status, state.executor, state.slot) == (admin_pb2.REQUEST_STATUS_RUNNING, "e", 0)
    assert (state.tenant, state.priority, state.age_ms, state.num_prompt_tokens) == ("red", -3, 2000, 6)
    assert list(state.block_table) == planner.table.blocks_of(0).tolist()
    planner.finish(request.group.sequences[0])
    state = request_state(request, RequestLocations(idle.engine).of(request), now_s=2.0)
    assert state.slot == request.group.sequences[1].slot != 0
    assert not state.HasField("beam_search")


def test_a_search_shows_width_scores_and_hypotheses() -> None:
    bench = Bench(small_limits(vocab_size=50, eos_token_ids=tuple(range(0, 50, 5))))
    idle = IdleEngine([], None)
    request = idle.add(group(0, [3, 1, 2], max_tokens(9), beam_search=BeamSearchParams(2, 2)))
    before = request_state(request, RequestLocation(admin_pb2.REQUEST_STATUS_WAITING), 0.0)
    assert before.beam_search == admin_pb2.BeamSearchState(beam_width=2, num_outputs=2)
    bench.queue.add(request.group)
    while not ((search := request.group.beams) and search.finished_hypotheses()):
        bench.step()
    state = request_state(request, running(bench), 0.0)
    assert list(state.beam_search.live_scores) == [beam.score for beam in search.live]
    assert len(state.sequences) == len(search.live) > 0
    assert [h.score for h in state.beam_search.hypotheses] == [h.score for h in search.finished_hypotheses()]
    assert state.num_output_tokens == sum(len(beam.token_ids) for beam in search.live)


def test_a_search_that_is_over_is_shown_until_its_client_has_its_answer() -> None:
    bench = Bench(small_limits(vocab_size=50))
    idle = IdleEngine([], None)
    request = idle.add(group(0, 6, max_tokens(2), beam_search=BeamSearchParams(2)))
    bench.queue.add(request.group)
    while request.group.live_sequences:
        bench.step()
    state = request_state(request, RequestLocation(admin_pb2.REQUEST_STATUS_WAITING), 0.0)
    assert [each.status for each in state.sequences] == [admin_pb2.SEQUENCE_STATUS_FINISHED] * len(state.sequences)
    assert state.beam_search.hypotheses


def test_an_executor_that_is_looked_for_has_no_counts() -> None:
    idle = IdleEngine(["e"], None)
    driver = idle.engine.drivers["e"]
    driver.num_losses, driver.last_trouble = 2, "UNAVAILABLE: gone"
    driver.retire(is_retired=True)
    assert executor_state(driver, 0.0) == admin_pb2.ExecutorState(
        address="e",
        status=admin_pb2.EXECUTOR_STATUS_CONNECTING,
        status_text="not attached",
        num_losses=2,
        last_error="UNAVAILABLE: gone",
        is_retired=True,
    )
