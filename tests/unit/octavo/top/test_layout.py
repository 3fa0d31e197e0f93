"""Lines fit into every width that a terminal may have, and say what matters first."""

import itertools
import json
from pathlib import Path

from rich.cells import cell_len

from octavo.admin.v1 import admin_pb2
from octavo.admin.v1 import admin_service_pb2 as pb
from octavo.top.as_json import to_values
from octavo.top.overview import block_bar, executor_lines, overview_lines
from octavo.top.polling import Answers
from octavo.top.rates import Picture, Rates
from octavo.top.rows import Order, RequestRow, cell_texts, columns, ended_rows, head_texts, joined, live_rows
from octavo.top.snapshot import requests_title, snapshot_json, snapshot_text
from tests.support.each_row import each_row
from tests.unit.octavo.top.figure import FIGURE, without_fonts
from tests.unit.octavo.top.scripted import ended, executor, lost_executor, picture, running, state, waiting

WIDTHS = [*range(78, 122), *range(122, 241, 9)]
LONG_ID = "chatcmpl-0b6f2a3e-93b1-4f3a-8a53-0a8e6ad6e0b7"


def busy_picture() -> Picture:
    """Return a picture with large numbers everywhere."""
    scheduler = state(
        executor("scheduler-executor-7.executors.default.svc.cluster.local:50061", oldest_step_age_ms=12_345),
        executor(
            num_running_requests=256, num_steps_in_flight=2, oldest_step_age_ms=31, num_losses=12, num_draft_tokens=9
        ),
        lost_executor(),
        num_waiting_requests=123_456,
        max_waiting_requests=200_000,
        num_refused_requests=70,
        num_parked_requests=17,
        num_running_requests=512,
        num_swapped_requests=99,
        num_preempted_requests=12,
        num_preemptions=9_999_999,
        num_queried_tokens=1000,
        num_hit_tokens=431,
        uptime_ms=90_000_000,
    )
    live = [
        running(LONG_ID, 3_600_000, tenant="a tenant with a long name", num_output_tokens=99_999),
        waiting("日本語のリクエスト日本語のリクエスト", 50_000, tenant="東京"),
    ]
    rates = Rates(
        12_345.6, 99_999.0, 1234.5, 0.4, 17.3, {"127.0.0.1:50061": 54_321.0}, {LONG_ID: 123.4}, 5.0, 50_000.0, 30_000.0
    )
    shown = picture(scheduler, *live, rates=rates, reasons={live[1].request_id: "needs 12 blocks, 8 free" * 4})
    return Picture(shown.answers, rates, tuple(map(float, range(200))), (0.0,) * 200)


@each_row(*WIDTHS)
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    shown = busy_picture()
    lines = [
        *overview_lines(shown, "127.0.0.1:50052", width),
        *executor_lines(shown, width, max_lines=9),
    ]
    assert max(line.cell_len for line in lines) <= width
    ended_ones = ended_rows(picture(ended=(ended(LONG_ID, "RESOURCE_EXHAUSTED: too long " * 9),)))
    for rows, shows_ended in ((live_rows(shown), False), (ended_ones, True)):
        chosen = columns(width, rows, shows_ended=shows_ended)
        texts = [head_texts(chosen, Order.AGE), *(cell_texts(chosen, row) for row in rows)]
        assert {cell_len(text) for row in texts for text, c in zip(row, chosen, strict=True)} <= {
            c.width for c in chosen
        }
        assert all(cell_len(joined(row, width)) <= width for row in texts)
        assert chosen[-1].width >= 12  # of the reason, enough to begin to read


def titles(width: int, rows: list[RequestRow] | None = None) -> list[str]:
    return [column.title for column in columns(width, rows or [], shows_ended=False)]


def test_a_narrow_table_keeps_what_tells_slow_requests_apart() -> None:
    always = ["REQUEST", "STATUS", "TOKENS", "TOK/S", "AGE", "SILENT", "LOCATION OR REASON FOR WAITING"]
    assert titles(78) == always
    assert titles(200) == ["REQUEST", "STATUS", "TENANT", *always[2:6], "WAITS", "QUEUED", "BLOCKS", "PREE", always[6]]
    for narrow, wide in itertools.pairwise(WIDTHS):
        assert set(titles(narrow)) <= set(titles(wide))


def test_priorities_are_shown_where_there_are_any() -> None:
    rows = live_rows(picture(None, running("a"), running("b", priority=-3)))
    assert "PRIORITY" not in titles(200, rows[:1]) + titles(93, rows)
    for width in (width for width in WIDTHS if width >= 94):
        chosen = columns(width, rows, shows_ended=False)
        place = [column.title for column in chosen].index("PRIORITY")
        assert [cell_texts(chosen, row)[place].strip() for row in rows] == ["0", "-3"]
        assert chosen[-1].width >= 12


def test_an_id_is_whole_where_there_is_room() -> None:
    rows = live_rows(picture(None, running("c62cbb8e-5c4d-4e0e-a1c7-6e3b8d4f9a10")))
    assert cell_texts(columns(200, rows, shows_ended=False), rows[0])[0] == rows[0].state.request_id
    assert cell_texts(columns(80, rows, shows_ended=False), rows[0])[0].strip() == "c62cbb8e…d4f9a10"


def test_the_order_is_marked() -> None:
    heads = head_texts(columns(120, [], shows_ended=False), Order.TOKENS)
    assert [head.strip() for head in heads if "▾" in head] == ["▾TOKENS"]


def test_the_overview_says_what_the_scheduler_does() -> None:
    lines = [line.plain for line in overview_lines(busy_picture(), "127.0.0.1:50052", 110)]
    assert lines[0].startswith("octavo 0.1.0   smollm2   ready   up 1d 1h   2 of 3 executors")
    assert lines[0].endswith(" 127.0.0.1:50052")
    assert lines[1].startswith("tokens/s    in  12,346 ")
    assert lines[2] == (
        "requests    123k of at most 200k waiting (17 quarantined)   512 running   99 swapped   12 preempted"
    )
    assert lines[3].startswith("per second  1,234 finished   0.4 failed   5.0 refused   17 preemptions (10.00M in all)")
    assert lines[3].endswith("cache hits 43 %")
    assert lines[4] == "drafts      30,000 of 50,000 right per second   2.2 tokens a step of a sequence"


def test_blocks_of_an_encoder_are_counted_over_all_executors() -> None:
    shown = picture(state(executor(num_encoder_blocks=24, num_used_encoder_blocks=5), executor("b:1")))
    assert overview_lines(shown, "a:1", 120)[3].plain.endswith(", 5 of 24 encoder blocks used")


@each_row(
    (state(), "   ready   "),
    (
        state(is_draining=True, status_text="not ready: the scheduler is draining"),
        "   not ready: the scheduler is draining   ",
    ),
    (state(is_draining=True, status_text=""), "   draining   "),  # of an older scheduler
    (state(has_mixed_numerics=True), "   1 of 1 executor   several numerics ids"),
    (state(step_log_trouble="No space left on device"), "   1 of 1 executor   step log stopped"),
    (
        state(lost_executor(), status_text="not ready: no executor is attached"),
        "   no model yet   not ready: no executor is attached   ",
    ),
)
def test_it_says_whether_it_takes_requests(scheduler: object, text: str) -> None:
    shown = picture(scheduler)  # type: ignore[arg-type]
    assert text in overview_lines(shown, "a:1", 120)[0].plain


def test_an_executor_that_is_missing_says_why() -> None:
    _, missing, _ = executor_lines(picture(state(executor(), lost_executor())), 110, max_lines=9)
    expected = "not attached (lost 2 times): cannot connect to 127.0.0.1:50062: connection refused"
    assert missing.plain == f"127.0.0.1:50062       {expected}"


def test_slots_are_those_in_use_of_all() -> None:
    shown = picture(state(executor(num_slots=256, num_free_slots=244, num_running_requests=6)))
    for width, begin in ((110, "EXECUTOR STATUS RUN SLOTS SWAP"), (80, "EXECUTOR SLOTS SWAP")):
        head, line = (line.plain for line in executor_lines(shown, width, max_lines=5))
        assert " ".join(head.split()).startswith(begin)
        assert head.index("SLOTS") + len("SLOTS") == line.index("12/256") + len("12/256")
    assert " – " in executor_lines(picture(), 110, max_lines=5)[1].plain


@each_row(80, 110, 200)
def test_what_is_wrong_with_an_attached_executor_is_in_its_line(width: int) -> None:
    warning = "a step has been running for 12.3 s"
    shown = picture(state(executor(warning=warning, num_slots=256), lost_executor()))
    line = executor_lines(shown, width, max_lines=5)[2]
    assert line.plain.startswith("127.0.0.1:50061 ")
    assert line.plain.endswith(f"  {warning}")
    assert line.cell_len <= width
    assert any(span.style == "yellow" and warning in line.plain[span.start : span.end] for span in line.spans)


def test_the_state_of_an_executor_is_in_the_words_of_the_scheduler_if_it_says_it() -> None:
    shown = picture(state(executor(status_text="draining"), executor("b:1", status_text="")))
    assert [line.plain.split()[1] for line in executor_lines(shown, 110, max_lines=5)[1:]] == ["draining", "attached"]


def test_executors_that_have_no_room_are_counted() -> None:
    executors = [lost_executor("a:1"), *(executor(f"b:{i}") for i in range(40))]
    lines = executor_lines(picture(state(*executors)), 110, max_lines=5)
    assert len(lines) == 5
    assert lines[1].plain.startswith("a:1")
    assert lines[-1].plain == "38 more executors, 38 of them attached"


def test_no_executor_at_all_is_said() -> None:
    lines = executor_lines(Picture(Answers(0.0, pb.GetSchedulerStateResponse())), 110, max_lines=5)
    assert "no executor found" in lines[1].plain


def test_a_bar_shows_shared_used_cached_and_free_blocks() -> None:
    assert block_bar(executor(), 16).plain == "█▓▓▓░░··········"


# One picture as text and as JSON -----------------------------------------------------------------


def test_a_snapshot_has_executors_and_the_oldest_requests_first() -> None:
    shown = picture(
        state(executor(), num_running_requests=1, num_waiting_requests=1),
        waiting("young", 10),
        running("old", 9000),
        reasons={"young": "next"},
    )
    lines = snapshot_text(shown, "127.0.0.1:50052", 110).splitlines()
    assert lines[4] == ""
    assert lines[5].startswith("EXECUTOR")
    assert lines[6].endswith("25 % of 4,096")
    assert lines[7] == "blocks: ██ shared   ▓▓ used   ░░ cached   ·· free"
    assert lines[9] == "2 live requests"
    assert [line.split()[0] for line in lines[10:]] == ["REQUEST", "old", "young"]
    assert lines[-1].endswith(" next")
    assert not any("\x1b" in line for line in lines)


@each_row(
    ((0, 0), "no live requests"), ((1, 1), "1 live request"), ((200, 3412), "the 200 oldest of 3,412 live requests")
)
def test_it_says_how_many_requests_are_listed(numbers: tuple[int, int], text: str) -> None:
    assert requests_title(*numbers) == text


def test_json_has_numbers_words_and_what_is_absent() -> None:
    shown = picture(
        state(num_output_tokens=2**60),
        waiting("w", 10, sequences=[admin_pb2.SequenceState(output_index=0, status=admin_pb2.SEQUENCE_STATUS_WAITING)]),
        rates=Rates(output_tokens=12.5, executor_output_tokens={"127.0.0.1:50061": 12.5}),
        reasons={"w": "next in the queue"},
    )
    values = json.loads(snapshot_json(shown, "127.0.0.1:50052"))
    assert values["address"] == "127.0.0.1:50052"
    assert values["state"]["num_output_tokens"] == 2**60
    assert values["state"]["executors"][0]["status"] == "attached"
    assert values["state"]["executors"][0]["oldest_step_age_ms"] is None
    assert values["rates_per_s"]["output_tokens"] == 12.5
    assert values["rates_per_s"]["prompt_tokens"] is None
    (request,) = values["requests"]
    assert (request["status"], request["reason"], request["queue_ms"]) == ("waiting", "next in the queue", None)
    assert request["sequences"][0] == {
        "output_index": 0,
        "status": "waiting",
        "slot": None,
        "num_tokens": 0,
        "num_computed_tokens": 0,
        "num_late_tokens": 0,
        "block_table": [],
        "host_block_table": [],
    }


def test_json_has_times_and_events_of_every_kind() -> None:
    done = ended("d", events=[admin_pb2.RequestEvent(kind=admin_pb2.REQUEST_EVENT_KIND_DROPPED)])
    assert to_values(done)["ended_at"] is None
    done.ended_at.FromJsonString("2026-11-21T23:59:58.750Z")
    values = json.loads(json.dumps(to_values(done)))
    assert values["ended_at"] == "2026-11-21T23:59:58.750Z"
    assert values["events"][0]["kind"] == "dropped"


def test_json_of_a_status_of_a_later_release_is_its_number() -> None:
    values = json.loads(snapshot_json(picture(None, running("r", status=77)), "a:1"))
    assert values["requests"][0]["status"] == "77"


def test_the_figure_of_the_documentation_fetches_nothing() -> None:
    figure = (Path(__file__).parents[4] / FIGURE).read_text(encoding="utf-8")
    assert len(figure) < 150_000
    assert "@font-face" not in figure
    assert "url(http" not in figure
    assert without_fonts("a { font-family: Fira Code; } @font-face { src: url(http://x) } b") == (
        "a { font-family: ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; } b"
    )
