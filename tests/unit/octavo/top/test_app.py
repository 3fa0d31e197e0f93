"""The screen of `octavo top`, its keys, and what it does when the scheduler or the room goes away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.text import Text
from textual.pilot import Pilot
from textual.widgets import Input, Static

from octavo.admin.v1 import admin_pb2
from octavo.admin.v1 import admin_service_pb2 as pb
from octavo.errors import NotConnectedError
from octavo.top.app import INTERVALS_S, HelpScreen, TopApp
from octavo.top.polling import Poller
from tests.unit.octavo.top.scripted import Scripted, ended, executor, lost_executor, running, state, waiting

HOUR_S = 3600.0


def busy_source() -> Scripted:
    return Scripted(
        state=state(executor(), lost_executor(), num_running_requests=2, num_waiting_requests=1),
        live=[
            running("old", 9000, tenant="red", num_output_tokens=1),
            running("middle", 5000, tenant="blue", num_output_tokens=500),
            waiting("young", 100, tenant="red"),
        ],
        queue=[admin_pb2.QueuedRequest(request_id="young", reason="needs 12 blocks, 8 free")],
        ended=[
            ended("done"),
            ended("failed", "INTERNAL: a broken invariant"),
            ended("gone", "ABORTED: the client left", status_text="aborted"),
        ],
        explanations={
            "young": pb.ExplainRequestResponse(
                status=admin_pb2.REQUEST_STATUS_WAITING, explanation="waits: needs 12 blocks, 8 free"
            )
        },
    )


@asynccontextmanager
async def shown(
    source: Scripted, size: tuple[int, int] = (120, 36), interval_s: float = HOUR_S
) -> AsyncIterator[tuple[TopApp, Pilot[None]]]:
    """Run the app with its first picture; it asks again only when it is told to."""
    app = TopApp(Poller(source), interval_s)
    async with app.run_test(size=size) as pilot:
        await settle(source, pilot, 1)
        yield app, pilot


async def settle(source: Scripted, pilot: Pilot[None], num_pictures: int) -> None:
    """Return once so many pictures have been asked for and what is shown is the last of them."""
    while source.num_pictures < num_pictures:
        await pilot.pause()
    await pilot.pause()


async def press(pilot: Pilot[None], *keys: str) -> None:
    """Press keys, and return once the widgets have done what they ask for."""
    for key in keys:
        await pilot.press(key)
        await pilot.pause()


def text_of(app: TopApp, selector: str) -> str:
    content = app.screen_stack[0].query_one(selector, Static).content
    return content.plain if isinstance(content, Text) else str(content)


def ids(app: TopApp) -> list[str]:
    return [app.table.get_row_at(i)[0].plain.strip() for i in range(app.table.row_count)]


# What is shown -----------------------------------------------------------------------------------


async def test_the_screen_has_the_scheduler_its_executors_and_the_oldest_request_first() -> None:
    async with shown(busy_source()) as (app, _):
        assert "ready" in text_of(app, "#overview")
        assert "every 3600 s" in text_of(app, "#overview")
        assert "not attached (lost 2 times): cannot connect" in text_of(app, "#executors")
        assert text_of(app, "#title") == "3 live requests, by age"
        assert ids(app) == ["old", "middle", "young"]
        assert app.table.get_row_at(2)[-1].plain.strip() == "needs 12 blocks, 8 free"


async def test_keys_change_the_order_and_the_cursor_stays_with_its_request() -> None:
    async with shown(busy_source()) as (app, pilot):
        await press(pilot, "down")
        assert app.table.selected_id == "middle"
        for key, order, expected in (
            ("t", "tokens", ["middle", "old", "young"]),
            ("n", "tenant", ["middle", "old", "young"]),
            ("w", "waiting time", ["young", "old", "middle"]),
            ("s", "time since last token", ["young", "old", "middle"]),
            ("b", "blocks", ["old", "middle", "young"]),
            ("a", "age", ["old", "middle", "young"]),
        ):
            await press(pilot, key)
            assert (text_of(app, "#title"), ids(app)) == (f"3 live requests, by {order}", expected)
            assert app.table.selected_id == "middle"
        await press(pilot, "end")
        assert app.table.selected_id == "young"
        await press(pilot, "home")
        assert app.table.selected_id == "old"


async def test_rows_come_and_go_under_the_cursor() -> None:
    source = busy_source()
    async with shown(source) as (app, pilot):
        await press(pilot, "down", "down")
        source.live = [running("older", 10_000), *source.live[1:], *(waiting(f"w{i}", 50 - i) for i in range(9))]
        await app.refresh_picture()
        assert app.table.selected_id == "young"
        assert len(ids(app)) == 12
        source.live = [running("last", 100)]
        await app.refresh_picture()
        assert (ids(app), app.table.selected_id) == (["last"], "last")
        source.live = []
        await app.refresh_picture()
        assert app.table.row_count == 0
        await press(pilot, "enter")
        assert not app.query("#pane.open")


async def test_enter_explains_a_request_until_escape() -> None:
    source = busy_source()
    async with shown(source) as (app, pilot):
        await press(pilot, "end", "enter")
        await settle(source, pilot, 2)
        assert "waits: needs 12 blocks, 8 free" in text_of(app, "#report")
        assert "http://127.0.0.1:50055/#request=young" in text_of(app, "#report")
        source.live.pop()
        await app.refresh_picture()
        assert text_of(app, "#report") == "young has finished and is no longer kept"
        await press(pilot, "escape")
        assert not app.query("#pane.open")
        assert app.focused is app.table


async def test_e_shows_those_that_have_ended() -> None:
    source = busy_source()
    async with shown(source) as (app, pilot):
        await press(pilot, "e")
        await settle(source, pilot, 2)
        assert text_of(app, "#title") == "the last 3 requests that ended, newest first"
        assert ids(app) == ["done", "failed", "gone"]
        how = [app.table.get_row_at(i)[-1] for i in (1, 2)]
        assert [(text.plain.strip(), text.style) for text in how] == [
            ("INTERNAL: a broken invariant", "red"),
            ("ABORTED: the client left", ""),
        ]
        await press(pilot, "down", "enter")
        await settle(source, pilot, 3)
        assert text_of(app, "#report").startswith("failed   failed")
        await press(pilot, "escape", "e")
        await settle(source, pilot, 4)
        assert ids(app) == ["old", "middle", "young"]


async def test_a_filter_looks_further_and_escape_drops_it() -> None:
    source = busy_source()
    async with shown(source) as (app, pilot):
        await press(pilot, "slash", *"red")
        await settle(source, pilot, 2)
        assert ids(app) == ["old", "young"]
        assert text_of(app, "#title") == "3 live requests, by age; 2 with 'red'"
        assert source.limits[-1] == 1000
        await press(pilot, "enter")
        assert app.focused is app.table
        await press(pilot, "t")  # a key again, no letter of the filter
        assert app.query_one("#filter", Input).value == "red"
        await press(pilot, "escape")
        assert ids(app) == ["middle", "old", "young"]
        assert not app.query("#filter.open")


async def test_a_pause_stands_until_p_again() -> None:
    source = busy_source()
    async with shown(source) as (app, pilot):
        await press(pilot, "p")
        assert text_of(app, "#notice") == 'paused; press "p" to resume'
        await press(pilot, "plus")  # wakes the loop, which does not ask
        await pilot.pause()
        assert source.num_pictures == 1
        await press(pilot, "p")
        await settle(source, pilot, 2)
        assert text_of(app, "#notice") == ""


async def test_plus_and_minus_change_the_interval() -> None:
    source = busy_source()
    async with shown(source, interval_s=1.0) as (app, pilot):
        await press(pilot, "p", "plus")
        assert "every 2 s" in text_of(app, "#overview")
        await press(pilot, "minus", "minus")
        assert "every 0.5 s" in text_of(app, "#overview")
        for direction, text in ((-1, "every 0.1 s"), (1, "every 3600 s")):
            for _ in INTERVALS_S:
                app.action_change_interval(direction)
            assert text in text_of(app, "#overview")


async def test_help_is_over_a_picture_that_goes_on() -> None:
    source = busy_source()
    async with shown(source) as (app, pilot):
        await press(pilot, "question_mark")
        assert isinstance(app.screen, HelpScreen)
        source.live = [running("new")]
        await app.refresh_picture()
        await press(pilot, "q")  # closes the help, and nothing else
        assert len(app.screen_stack) == 1
        assert ids(app) == ["new"]


async def test_q_quits() -> None:
    async with shown(busy_source()) as (app, pilot):
        await press(pilot, "q")
        assert not app.is_running
        assert app.return_code == 0


# What goes wrong ---------------------------------------------------------------------------------


async def test_a_scheduler_that_goes_away_leaves_its_last_picture_and_one_line() -> None:
    source = busy_source()
    async with shown(source) as (app, _):
        source.error = NotConnectedError("127.0.0.1:50052")
        await app.refresh_picture()
        first = text_of(app, "#notice")
        assert first.startswith("no response since ")
        assert first.endswith(": no scheduler is reachable at 127.0.0.1:50052")
        assert ids(app) == ["old", "middle", "young"]
        await app.refresh_picture()
        assert text_of(app, "#notice").split(" (")[0] == first.split(" (")[0]
        source.error = None
        await app.refresh_picture()
        assert text_of(app, "#notice") == ""


async def test_a_request_that_is_chosen_while_nobody_answers_says_why_until_somebody_does() -> None:
    source = busy_source()
    async with shown(source) as (app, pilot):
        source.error = NotConnectedError("127.0.0.1:50052")
        await press(pilot, "end", "enter")
        await app.refresh_picture()
        assert text_of(app, "#report") == "no response: no scheduler is reachable at 127.0.0.1:50052"
        source.error = None
        await app.refresh_picture()
        assert "waits: needs 12 blocks" in text_of(app, "#report")
        source.error = NotConnectedError("127.0.0.1:50052")
        await app.refresh_picture()
        assert "waits: needs 12 blocks" in text_of(app, "#report")  # the last answer stays


async def test_a_terminal_that_becomes_too_small_says_which_size_is_needed() -> None:
    async with shown(busy_source()) as (app, pilot):
        for size in ((79, 36), (120, 19), (3, 2)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            assert app.screen.has_class("small")
            expected = f"needs a terminal of 80 columns and 20 lines; this one has {size[0]} and {size[1]}"
            assert expected in text_of(app, "#small")
            assert not app.query_one("#main").display
        await pilot.resize_terminal(80, 20)
        await pilot.pause()
        assert app.query_one("#main").display
        assert not app.screen.has_class("small")
        assert ids(app) == ["old", "middle", "young"]


async def test_the_smallest_terminal_has_room_for_requests_and_for_one_of_them() -> None:
    source = busy_source()
    async with shown(source, size=(80, 20)) as (app, pilot):
        assert app.table.size.height >= 4
        await press(pilot, "enter")
        await settle(source, pilot, 2)
        assert app.table.size.height >= 4
        assert app.query_one("#pane").size.height >= 7
        assert app.query_one("#keys").region.bottom == 20
        await press(pilot, "escape")
        assert app.query_one("#executors").display


async def test_quitting_while_the_scheduler_is_asked_is_no_error() -> None:
    class Slow(Scripted):
        async def list_requests(self, limit: int) -> list[admin_pb2.RequestState]:
            while app.screen_stack and app.screen_stack[0].query("#filter"):
                await asyncio.sleep(0)
            return []

    app = TopApp(Poller(Slow()), HOUR_S)
    async with app.run_test():  # raises what the app raised
        assert app.is_running
    assert not app.is_running
