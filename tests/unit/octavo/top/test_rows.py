"""What a line says of a request or an executor, and the orders."""

from octavo.admin.v1 import admin_pb2
from octavo.top.rates import Rates
from octavo.top.rows import Order, in_order, live_rows
from tests.support.each_row import each_row
from tests.unit.octavo.top.scripted import picture, running, waiting


def test_a_request_that_runs_says_how_it_does() -> None:
    request = running("a", 4000, num_blocks=3)
    (row,) = live_rows(picture(None, request, rates=Rates(request_output_tokens={"a": 12.0})))
    assert (row.status, row.place, row.tokens_per_s) == ("running", "on 127.0.0.1:50061", 12.0)
    assert (row.silent_ms, row.queued_ms, row.waiting_ms) == (20, 5, None)


def test_a_request_that_waits_says_why() -> None:
    first, second = live_rows(picture(None, waiting("a", 700), waiting("b"), reasons={"a": "needs 2 blocks, 1 free"}))
    assert (first.place, second.place) == ("needs 2 blocks, 1 free", "far back in the queue")
    assert (first.silent_ms, first.queued_ms, first.tokens_per_s) == (700, 700, None)


@each_row(
    ("SWAPPED", "in the host cache of 127.0.0.1:50061"),
    ("PREEMPTED", "tokens in flight from 127.0.0.1:50061"),
    ("PARKED", "it may crash executors; others go first"),
)
def test_a_request_that_does_not_run_has_a_place_and_waits_since_its_last_token(name: str, place: str) -> None:
    status = admin_pb2.RequestStatus.Value(f"REQUEST_STATUS_{name}")
    (row,) = live_rows(picture(None, running("a", 9000, status=status, status_text="word", last_token_age_ms=4000)))
    assert (row.status, row.place, row.waiting_ms, row.queued_ms) == ("word", place, 4000, 5)


def test_a_scheduler_that_has_no_word_for_a_state_has_a_name_for_it() -> None:
    rows = live_rows(picture(None, running("a", status_text=""), running("b", status_text="", status=77)))
    assert [row.status for row in rows] == ["running", "77"]


def test_what_clients_write_cannot_steer_the_terminal() -> None:
    (row,) = live_rows(picture(None, running("a\x1b]0;x\x07", tenant="red\n")))
    assert (row.shown_id, row.tenant) == ("a�]0;x�", "red�")


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
        running("a", 9000, tenant="green", last_token_age_ms=1, queue_ms=1, num_blocks=2),
        running("b", 8000, tenant="Blue", last_token_age_ms=300, queue_ms=9, num_output_tokens=99),
        running("c", 7000, tenant="green", last_token_age_ms=200, queue_ms=500, num_output_tokens=1),
        running("d", 400, tenant="", last_token_age_ms=399, queue_ms=20, num_output_tokens=9, num_blocks=7),
    ]
    rows = live_rows(picture(None, *reversed(requests)))
    assert " ".join(row.state.request_id for row in in_order(rows, order)) == expected


def test_filters_look_at_ids_and_tenants() -> None:
    (row,) = live_rows(picture(None, running("Chat-17", tenant="Red")))
    assert [row.matches(text) for text in ("chat", "T-1", "red", "blue", "")] == [True, True, True, False, True]
