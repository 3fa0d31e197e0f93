"""Why a request waits, in words and numbers, for every reason that there is."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from octavo.admin.v1 import admin_pb2
from octavo_shared.grammar.grammar import Grammar
from scheduler_svc.admin.explanation import ahead_text, explain, obstacle_texts, queued_requests
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.request.parameters import BeamSearchParams, StopConditions
from tests.support.driving import group, max_tokens, small_limits
from tests.support.each_row import each_row
from tests.support.idle_engine import IdleEngine

A, B = "10.0.0.1:50061", "10.0.0.2:50061"


def why(idle: IdleEngine, request: LiveRequest, now_s: float = 1.0) -> str:
    return explain(idle.engine, request, now_s).explanation


def reasons(idle: IdleEngine) -> list[tuple[str, str]]:
    return [(queued.request_id, queued.reason) for queued in queued_requests(idle.engine, 1.0)]


# In words ----------------------------------------------------------------------------------------


@each_row((0, "next in the queue"), (1, "1 request ahead"), (4, "4 requests ahead"))
def test_those_ahead_are_counted(num_ahead: int, text: str) -> None:
    assert ahead_text(num_ahead) == text


def test_a_large_fleet_is_cut_to_its_first_executors() -> None:
    fits = [admin_pb2.ExecutorFit(executor=f"e{i}", obstacle="is full" if i else "") for i in range(5)]
    assert obstacle_texts(fits, "fits") == ["on e0, fits", "on e1, is full", "on e2, is full", "2 more executors"]
    assert obstacle_texts(fits[:3], "fits") == ["on e0, fits", "on e1, is full", "on e2, is full"]
    assert obstacle_texts(fits[:4], "fits")[-1] == "1 more executor"


# Waiting -----------------------------------------------------------------------------------------


def test_who_fits_and_stands_first_waits_for_a_step() -> None:
    idle = IdleEngine([A], small_limits())
    request = idle.add(group(0, 5))
    assert why(idle, request) == f"waits: next in the queue; on {A}, fits, and waits for token budget in a step"


def test_who_finds_no_grammar_slot_says_so_and_those_without_a_grammar_pass_it() -> None:
    idle = IdleEngine([A], small_limits(grammar_slots=1))
    idle.add(group(0, 5, grammar=Grammar(b"one")))
    idle.planners[0].schedule(0.0)
    waiting, behind = idle.add(group(1, 5, grammar=Grammar(b"two"))), idle.add(group(2, 5))
    text = f"on {A}, waits for a grammar slot: requests that run use all 1"
    assert why(idle, waiting).endswith(text)
    assert why(idle, behind).endswith(f"on {A}, fits, and waits for token budget in a step")


def test_blocks_are_counted_as_the_admission_counts_them() -> None:
    idle = IdleEngine([A], small_limits(blocks=6, watermark=0.2))
    idle.add(group(0, 12))
    idle.planners[0].schedule(0.0)
    request = idle.add(group(1, 7))
    explained = explain(idle.engine, request, 1.0)
    # 3 of the 6 blocks are used, and 0.2 * 6 rounded up are kept for them.
    assert explained.explanation == f"waits: next in the queue; on {A}, needs 2 blocks, 1 free"
    (fit,) = explained.executors
    assert (fit.num_needed_blocks, fit.num_free_blocks, fit.num_needed_slots, fit.num_free_slots) == (2, 1, 1, 3)
    assert (explained.num_requests_ahead, explained.executor) == (0, "")


def test_who_does_not_stand_first_is_told_how_many_do() -> None:
    idle = IdleEngine([A], small_limits(blocks=6))
    idle.add(group(0, 12))
    idle.planners[0].schedule(0.0)
    idle.add(group(1, 20))
    request = idle.add(group(2, 5))
    assert why(idle, request) == f"waits: 1 request ahead; on {A}, will fit once the requests ahead of it are admitted"


def test_slots_that_lack_are_named() -> None:
    idle = IdleEngine([A], small_limits(max_num_seqs=2))
    idle.add(group(0, 2))
    idle.planners[0].schedule(0.0)
    request = idle.add(group(1, 2, num_sequences=2))
    assert why(idle, request) == f"waits: next in the queue; on {A}, needs 2 slots of the batch, 1 free"


def test_every_executor_has_its_own_reason() -> None:
    idle = IdleEngine([A, B], small_limits(blocks=6))
    idle.add(group(0, 12))
    idle.planners[0].schedule(0.0)
    idle.planners[1].takes_groups = False
    request = idle.add(group(1, 20))
    explained = explain(idle.engine, request, 1.0)
    assert explained.explanation == (
        f"waits: next in the queue; on {A}, needs 5 blocks, 3 free; on {B}, the executor is leaving the fleet"
    )
    assert [fit.executor for fit in explained.executors] == [A, B]


def test_an_overdue_step_is_a_reason_only_beside_other_executors() -> None:
    alone, fleet = (IdleEngine(addresses, small_limits(blocks=6)) for addresses in ([A], [A, B]))
    texts = []
    for idle in (alone, fleet):
        idle.add(group(0, 12))
        idle.planners[0].schedule(0.0)
        texts.append(why(idle, idle.add(group(1, 20)), now_s=100.0))
    assert texts[0] == f"waits: next in the queue; on {A}, needs 5 blocks, 3 free"
    assert f"on {A}, a step has been running for 100.0 s" in texts[1]


def test_without_an_executor_the_trouble_is_named() -> None:
    idle = IdleEngine([A], None)
    request = idle.add(group(0, 5))
    assert why(idle, request) == "waits: next in the queue; no executor is attached"
    idle.engine.drivers[A].last_trouble = "UNAVAILABLE: connection refused"
    assert why(idle, request).endswith(f"no executor is attached ({A}: UNAVAILABLE: connection refused)")
    assert reasons(idle) == [("a", f"no executor is attached ({A}: UNAVAILABLE: connection refused)")]


def test_a_suspect_behind_another_one_is_parked() -> None:
    idle = IdleEngine([A], small_limits())
    first, second = idle.add(group(0, 5)), idle.add(group(1, 5))
    idle.planners[0].schedule(0.0)
    idle.engine.take_back(idle.planners[0], A, "connection refused")
    first.num_losses = second.num_losses = 1
    idle.engine.on_probed(A, works=True)
    explained = explain(idle.engine, second, 1.0)
    assert explained.status == admin_pb2.REQUEST_STATUS_PARKED
    assert explained.explanation == (
        "quarantined: it may have crashed an executor 2 times; 'a', also quarantined, is run alone first"
    )
    assert why(idle, first).startswith("waits to resume: next in the queue")


def test_a_request_that_was_given_up_is_explained_until_it_has_ended() -> None:
    idle = IdleEngine([A], small_limits())
    request = idle.add(group(0, 30))
    request.group.has_run = True
    assert "exceed max_model_len" in why(idle, request)
    idle.planners[0].schedule(0.0)
    assert why(idle, request) == "is about to finish"


def test_a_request_that_is_too_large_for_those_that_are_there_is_told_how_long_it_waits_for_another() -> None:
    idle = IdleEngine([A], small_limits())
    request = idle.add(group(0, 5, StopConditions(100).accept(5, 64)))
    idle.engine.orphans.note_change()
    idle.engine.orphans.look(0.0)
    assert why(idle, request, 10.0) == (
        f"waits: next in the queue; on {A}, the request was accepted for 64 tokens (a prompt of 5); this executor "
        "holds sequences of 24; it fails in 290 s unless an executor that can hold it is attached (--orphan-timeout-s)"
    )


def test_who_has_an_input_for_the_encoder_is_told_what_it_waits_for_and_whether_it_was_found() -> None:
    idle = IdleEngine(
        [A], small_limits(budget=12, prefix_caching=True, max_num_seqs=8, max_encoder_tokens=12, encoder_blocks=4)
    )
    first = idle.add(group(0, [7], encoder=[1] * 10))
    whole = "with room for 10 encoder tokens: an input is encoded whole"
    fits = f"waits: next in the queue; on {A}, fits, and waits for token budget in a step"
    assert why(idle, first) == f"{fits} {whole}; its encoder reads 10 tokens"
    assert reasons(idle) == [("a", f"on {A}, fits, and waits for token budget in a step {whole}")]
    idle.planners[0].schedule(0.0)
    assert why(idle, first) == f"runs on {A}: 0 output tokens so far; its encoder reads 10 tokens, encoded for it"
    same = idle.add(group(1, [7], encoder=[1] * 10))
    assert why(idle, same) == f"{fits}; its encoder's input is there already; its encoder reads 10 tokens"
    idle.planners[0].schedule(0.0)
    assert why(idle, same).endswith("; its encoder reads 10 tokens, found as another request had them encoded")
    short, other = idle.add(group(2, [7], encoder=[2] * 3)), idle.add(group(3, [7], encoder=[2] * 5))
    assert why(idle, short).startswith(f"{fits} with room for 3 encoder tokens")
    idle.planners[0].schedule(0.0)
    assert why(idle, other) == (
        f"waits: next in the queue; on {A}, needs 2 blocks of the encoder, 0 free; its encoder reads 5 tokens"
    )


def test_an_input_longer_than_the_rest_of_the_budget_says_that_the_next_step_is_its_own() -> None:
    idle = IdleEngine([A], small_limits(budget=12, max_num_seqs=8, max_encoder_tokens=12, encoder_blocks=8))
    idle.add(group(0, [7], encoder=[1] * 3))
    idle.planners[0].schedule(0.0)
    waits = idle.add(group(1, [7], encoder=[2] * 12))
    idle.planners[0].schedule(0.0)
    text = f"on {A}, fits, and waits for token budget in a step with room for 12 encoder tokens: an input is encoded"
    assert f"{text} whole; the next step is for such inputs alone" in why(idle, waits)


# The queue ---------------------------------------------------------------------------------------


def test_behind_the_first_in_line_its_reason_holds_for_all() -> None:
    idle = IdleEngine([A], small_limits(blocks=6))
    idle.add(group(0, 12))
    idle.planners[0].schedule(0.0)
    for arrival in (1, 2, 3):
        idle.add(group(arrival, 20, tenant="red", priority=arrival))
    queued = list(queued_requests(idle.engine, 2.5))
    assert [(q.num_requests_ahead, q.request_id, q.priority) for q in queued] == [(0, "b", 1), (1, "c", 2), (2, "d", 3)]
    assert [q.reason for q in queued] == [f"on {A}, needs 5 blocks, 3 free", *["queued behind 'b'"] * 2]
    assert {(q.tenant, q.num_prompt_tokens, q.age_ms, q.has_run) for q in queued} == {("red", 20, 2500, False)}


def test_who_is_skipped_holds_up_nobody() -> None:
    idle = IdleEngine([A], small_limits(blocks=6, prefix_caching=True))
    prompt = list(range(100, 112))
    idle.add(group(0, prompt))
    idle.planners[0].schedule(0.0)
    idle.add(group(1, prompt))
    idle.add(group(2, 20))
    idle.add(group(3, 1))
    assert reasons(idle) == [
        ("b", f"on {A}, the next block of its prefix is being computed or sent"),
        ("c", f"on {A}, needs 5 blocks, 3 free"),
        ("d", "queued behind 'c'"),
    ]


def test_the_explained_order_is_the_order_of_admission() -> None:
    idle = IdleEngine([A], small_limits(blocks=6, prefix_caching=True, budget=20))
    prompt = list(range(100, 112))
    prompts: list[list[int] | int] = [prompt, prompt, 3, 3]
    for arrival, tokens in enumerate(prompts):
        idle.add(group(arrival, tokens))
    idle.planners[0].schedule(0.0)
    passed_over = [name for name, reason in reasons(idle) if "prefix" in reason]
    assert passed_over == ["b"]
    assert [running.request_id for running in idle.planners[0].batch.running] == ["a", "c", "d"]


# Preempted ---------------------------------------------------------------------------------------


def preempted(limits_mode: PreemptionMode, *, beams: bool = False) -> tuple[IdleEngine, LiveRequest]:
    """Return an engine whose second request was preempted with tokens on their way."""
    idle = IdleEngine([A], small_limits(blocks=6, host_blocks=8, preemption_mode=limits_mode))
    idle.add(group(0, 8, max_tokens(16)))
    request = idle.add(group(1, 8, max_tokens(16)))
    for _ in range(20):
        idle.planners[0].schedule(0.0)
        if request.group.num_preemptions:
            return idle, request
    raise AssertionError("nobody was preempted")


def test_a_preempted_request_waits_for_its_tokens_in_flight() -> None:
    idle, request = preempted(PreemptionMode.RECOMPUTE)
    explained = explain(idle.engine, request, 1.0)
    assert explained.status == admin_pb2.REQUEST_STATUS_PREEMPTED
    num_inflight_rows = request.group.sequences[0].num_inflight_rows
    assert num_inflight_rows > 1
    assert explained.explanation == (
        f"preempted on {A}: {num_inflight_rows} tokens are still in flight; then it goes back to the queue"
    )


def test_a_swapped_request_waits_for_its_tokens_in_flight_then_for_blocks() -> None:
    idle, request = preempted(PreemptionMode.SWAP)
    (sequence,) = request.group.sequences
    assert explain(idle.engine, request, 1.0).status == admin_pb2.REQUEST_STATUS_SWAPPED
    assert why(idle, request).startswith(f"swapped out of {A}: {sequence.num_inflight_rows} tokens are still in flight")
    while sequence.num_inflight_rows:
        sequence.append_inflight_tokens(np.array([1], np.int32))
    explained = explain(idle.engine, request, 1.0)
    (fit,) = explained.executors
    assert fit.num_needed_blocks > fit.num_free_blocks
    text = f"needs {fit.num_needed_blocks} blocks, {fit.num_free_blocks} free"
    assert explained.explanation == f"swapped out of {A}: {text}"


# Running -----------------------------------------------------------------------------------------


def test_a_prefill_tells_how_far_it_is() -> None:
    idle = IdleEngine([A], small_limits(budget=4))
    request = idle.add(group(0, 10))
    idle.planners[0].schedule(0.0)
    assert why(idle, request) == f"runs on {A}: 0 of 10 tokens computed"


def test_a_running_request_says_why_it_is_on_its_executor() -> None:
    idle = IdleEngine([A, B], small_limits(prefix_caching=True, max_num_seqs=8, budget=64, blocks=60))
    first, second = idle.planners
    for arrival, planner in enumerate((first, second)):
        idle.add(group(arrival, 6))
        planner.schedule(0.0)
    request = idle.add(group(2, 5, max_tokens(3)))
    first.schedule(0.0)
    cost = "placed there at the lowest cost, 15 tokens: 5 tokens to compute, 0 tokens cached, 1 sequence already there"
    assert why(idle, request) == f"runs on {A}: 0 output tokens so far; {cost}"
    assert request.group.placed is not None
    request.group.placed = request.group.placed._replace(other=B, other_cost=99)
    assert why(idle, request).endswith(f"{cost}; on {B} it would cost 99")


@each_row(
    (1, None, "0 output tokens so far"),
    (3, None, "0 output tokens in 3 outputs, 3 of them live"),
    (1, BeamSearchParams(2), "a beam search of width 2, 0 output tokens in its live beams"),
)
def test_a_running_request_says_what_it_makes(
    num_sequences: int, beam_search: BeamSearchParams | None, text: str
) -> None:
    idle = IdleEngine([A], small_limits())
    request = idle.add(group(0, 5, num_sequences=num_sequences, beam_search=beam_search))
    idle.planners[0].schedule(0.0)
    explained = explain(idle.engine, request, 1.0)
    assert explained.explanation == f"runs on {A}: {text}"
    assert explained.executor == A
    assert not explained.HasField("num_requests_ahead")


# What puts others first, and what is wrong with executors -----------------------------------------


@each_row(
    (1, "1 request ahead (1 came later and belongs to a tenant with less service so far, relative to its weight)"),
    (2, "2 requests ahead (2 came later and belong to tenants with less service so far, relative to their weights)"),
)
def test_who_came_later_and_goes_first_is_explained(num_later: int, text: str) -> None:
    idle = IdleEngine([A], small_limits(max_num_seqs=1))
    idle.add(group(0, 5))
    idle.planners[0].schedule(0.0)
    waits = idle.add(group(1, 5, tenant="small"))
    for number in range(num_later):
        idle.add(group(2 + number, 5, tenant="other"))
    idle.engine.queue.charge("small", 100)
    assert why(idle, waits).startswith(f"waits: {text}; ")


def test_a_step_that_takes_long_is_told_to_those_that_wait_for_it_and_to_those_in_it() -> None:
    idle = IdleEngine([A], small_limits(max_num_seqs=2))
    runs = idle.add(group(0, 5))
    idle.planners[0].schedule(0.0)
    session = SimpleNamespace(trouble=lambda now_s: "no heartbeat is answered", is_resuming=False)
    idle.engine.drivers[A].session = cast("Any", session)
    waits = idle.add(group(1, 5))
    trouble = "a step has been running for 7.0 s; no heartbeat is answered"
    assert why(idle, waits, now_s=7.0) == f"waits: next in the queue; on {A}, {trouble}"
    assert why(idle, runs, now_s=7.0).endswith(f"; on its executor {trouble}")
    assert "running" not in why(idle, waits, now_s=0.5)
    session.is_resuming = True
    assert why(idle, runs, now_s=7.0).endswith("; on its executor no heartbeat is answered"), "nothing runs meanwhile"
