"""What a line says of a request or an executor, and the orders."""

from octavo.admin.v1 import admin_pb2
from octavo.top.rates import Rates
from octavo.top.rows import Order, ended_rows, executor_rows, in_order, live_rows
from tests.support.each_row import each_row
from tests.unit.octavo.top.scripted import ended, executor, lost_executor, picture, running, state, waiting


def sequences(*num_computed_tokens: int) -> list[admin_pb2.SequenceState]:
    return [admin_pb2.SequenceState(num_computed_tokens=number) for number in num_computed_tokens]


def test_a_request_that_runs_says_how_it_does() -> None:
    request = running("a", 4000, sequences=sequences(17, 16), num_preemptions=1)
    (row,) = live_rows(
        picture(None, request, rates=Rates(request_output_tokens={"a": 12.0}), block_sizes={"127.0.0.1:50061": 16})
    )
    assert (row.status, row.place, row.tokens_per_s) == ("running", "on 127.0.0.1:50061", 12.0)
    assert (row.num_blocks, row.num_tokens, row.num_preemptions) == (3, 110, 1)
    assert (row.age_ms, row.silent_ms, row.queued_ms) == (4000, 20, 5)


def test_a_request_that_waits_says_why() -> None:
    first, second = live_rows(picture(None, waiting("a", 700), waiting("b"), reasons={"a": "needs 2 blocks, 1 free"}))
    assert (first.place, second.place) == ("needs 2 blocks, 1 free", "far back in the queue")
    assert (first.silent_ms, first.queued_ms, first.tokens_per_s) == (700, 700, None)


@each_row(
    (admin_pb2.REQUEST_STATUS_SWAPPED, "swapped", "in the host cache of 127.0.0.1:50061"),
    (admin_pb2.REQUEST_STATUS_PREEMPTED, "preempted", "tokens in flight from 127.0.0.1:50061"),
    (admin_pb2.REQUEST_STATUS_PARKED, "parked", "quarantined: it may crash executors; others go first"),
)
def test_every_status_has_a_word_and_a_place(status: int, word: str, place: str) -> None:
    (row,) = live_rows(picture(None, running("a", status=status)))
    assert (row.status, row.place) == (word, place)


def test_a_request_that_has_ended_says_how() -> None:
    failed = "RESOURCE_EXHAUSTED: it takes 40 blocks, and the pool has 16"
    rows = ended_rows(picture(ended=(ended("a"), ended("b", failed))))
    assert [(row.place, row.has_failed, row.ended_ago_ms) for row in rows] == [
        ("length", False, 3000),
        (failed, True, 3000),
    ]


def test_what_was_aborted_has_not_failed() -> None:
    (row,) = ended_rows(picture(ended=(ended("a", "ABORTED: the client ended the call"),)))
    assert (row.place, row.has_failed) == ("aborted: the client ended the call", False)


@each_row("WAITING", "SWAPPED", "PREEMPTED", "PARKED")
def test_a_request_that_does_not_run_waits_since_its_last_token(status: str) -> None:
    again = running("a", 9000, status=admin_pb2.RequestStatus.Value(f"REQUEST_STATUS_{status}"), last_token_age_ms=4000)
    first, runs = live_rows(picture(None, again, running("b")))
    assert (first.waiting_ms, first.queued_ms) == (4000, 5)
    assert runs.waiting_ms is None


def test_what_clients_write_cannot_steer_the_terminal() -> None:
    (row,) = live_rows(picture(None, running("a\x1b]0;x\x07", tenant="red\n")))
    assert (row.request_id, row.shown_id, row.tenant) == ("a\x1b]0;x\x07", "a�]0;x�", "red�")


@each_row(
    (Order.AGE, "a b c d"),
    (Order.SILENCE, "d b c a"),
    (Order.WAIT, "c d b a"),
    (Order.TOKENS, "b a d c"),
    (Order.BLOCKS, "d a b c"),
    (Order.TENANT, "d b a c"),
)
def test_orders_put_the_most_first(order: Order, expected: str) -> None:
    requests = [
        running("a", 9000, tenant="green", last_token_age_ms=1, queue_ms=1, sequences=sequences(32)),
        running("b", 8000, tenant="Blue", last_token_age_ms=300, queue_ms=9, num_output_tokens=99),
        running("c", 7000, tenant="green", last_token_age_ms=200, queue_ms=500, num_output_tokens=1),
        running("d", 400, tenant="", last_token_age_ms=399, queue_ms=20, num_output_tokens=9, sequences=sequences(99)),
    ]
    rows = live_rows(picture(None, *reversed(requests), block_sizes={"127.0.0.1:50061": 16}))
    assert " ".join(row.request_id for row in in_order(rows, order)) == expected


def test_filters_look_at_ids_and_tenants() -> None:
    (row,) = live_rows(picture(None, running("Chat-17", tenant="Red")))
    assert [row.matches(text) for text in ("chat", "T-1", "red", "blue", "")] == [True, True, True, False, True]


def test_executors_that_are_missing_come_first_and_blocks_add_up() -> None:
    scheduler = state(executor(), executor("b:1", is_retired=True, oldest_step_age_ms=7), lost_executor())
    rates = Rates(executor_output_tokens={"b:1": 3.0})
    missing, first, leaving = executor_rows(picture(scheduler, rates=rates))
    assert (missing.status, missing.num_losses, missing.num_blocks) == ("not attached", 2, 0)
    assert missing.trouble == "cannot connect to 127.0.0.1:50062: connection refused"
    assert (first.num_used_blocks, first.num_shared_blocks, first.num_cached_blocks) == (768, 256, 512)
    assert (first.num_blocks, first.num_taken_blocks, first.num_free_blocks) == (4096, 1024, 2560)
    assert (leaving.status, leaving.oldest_step_ms, leaving.tokens_per_s) == ("leaving", 7, 3.0)
