"""The page when something is in its way: no scheduler, no token, a hidden tab, a hostile name."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Browser, expect

from octavo.admin.v1 import admin_pb2
from tests.page.browser import PATIENCE_MS, Watched, watched_page
from tests.page.fake_admin import FakeAdmin, state_with

pytestmark = pytest.mark.asyncio(loop_scope="session")

# A tab that tests can hide.
HIDEABLE = """
    let isHidden = false;
    Object.defineProperty(document, "hidden", { get: () => isHidden });
    window.hide = (value) => { isHidden = value; document.dispatchEvent(new Event("visibilitychange")); };
"""


@asynccontextmanager
async def opened(browser: Browser, admin: FakeAdmin, path: str = "/", **options: object) -> AsyncIterator[Watched]:
    """Serve a fake and open the page that it serves, for the length of a block; its clock stands still."""
    await admin.start()
    try:
        async with watched_page(browser, admin.address, **options) as watched:
            await watched.page.add_init_script(HIDEABLE)
            await watched.page.clock.install(time=0)
            await watched.page.clock.pause_at(1000)
            await watched.open(path)
            yield watched
    finally:
        await admin.stop()


async def next_round(watched: Watched) -> None:
    """Let time pass until the page has asked for everything once more, and has shown the answers."""
    await watched.settled()
    num_rounds = watched.num_rounds
    async with asyncio.timeout(PATIENCE_MS / 1000):
        while watched.num_rounds == num_rounds:
            await watched.page.clock.run_for(100)
    await watched.settled()


async def rounds_until(watched: Watched, condition: Callable[[], bool]) -> None:
    """Let the page ask again until a condition of the fake holds."""
    async with asyncio.timeout(PATIENCE_MS / 1000):
        while not condition():
            await next_round(watched)


async def test_a_scheduler_that_is_gone_is_said_once_asked_for_less_and_less_and_found_again(browser: Browser) -> None:
    admin = FakeAdmin(state_with(1))
    async with opened(browser, admin) as watched:
        page = watched.page
        await rounds_until(watched, lambda: bool(admin.maps))
        await admin.stop()
        num_calls_before = 0
        for wait in ("1 second", "2 seconds", "4 seconds", "8 seconds"):
            await next_round(watched)
            await expect(page.locator("#notice")).to_contain_text(f"does not respond. The next try is in {wait}.")
            num_calls = len(watched.methods)
            await page.clock.run_for(1000 * int(wait[0]) - 200)
            assert len(watched.methods) == num_calls
            num_calls_before = num_calls_before or num_calls  # the browser may tell late of calls that were answered
        assert watched.methods[num_calls_before:] == ["GetSchedulerState"] * 3
        await admin.start()
        await next_round(watched)

        await expect(page.locator("#notice")).to_be_hidden()
        await expect(page.locator("#data-age")).to_have_text("live")
        assert watched.num_failed_loads == 4


async def test_a_token_is_asked_for_sent_and_kept_in_this_tab_only(browser: Browser) -> None:
    admin = FakeAdmin(state_with(1), token="right")
    async with opened(browser, admin) as watched:
        page = watched.page
        await expect(page.locator("#token")).to_be_focused()

        await page.keyboard.type("wrong")
        await page.keyboard.press("Enter")
        await expect(page.locator("#token-error")).to_have_text("unknown bearer token")
        await page.locator("#token").fill("right")
        await page.keyboard.press("Enter")

        await expect(page.locator("#token-form")).to_be_hidden()
        await expect(page.locator("#readiness")).to_have_text("ready")
        assert await page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        assert await page.evaluate("Object.values(sessionStorage)") == ["right"]


async def test_a_hidden_tab_and_a_paused_page_ask_nothing(browser: Browser) -> None:
    admin = FakeAdmin(state_with(1))
    async with opened(browser, admin) as watched:
        page = watched.page
        await rounds_until(watched, lambda: bool(admin.maps))
        for stop, go_on in (("hide(true)", "hide(false)"), ("pause.click()", "pause.click()")):
            await next_round(watched)
            num_calls = len(watched.methods)
            await page.evaluate(stop)
            await page.clock.run_for(60_000)
            assert len(watched.methods) == num_calls

            await page.evaluate(go_on)
            await next_round(watched)


async def test_only_maps_near_the_screen_are_fetched(browser: Browser) -> None:
    admin = FakeAdmin(state_with(16))
    async with opened(browser, admin, viewport={"width": 500, "height": 600}) as watched:
        await rounds_until(watched, lambda: bool(admin.maps))
        near = set(admin.maps)
        await watched.page.locator(".card").last.scroll_into_view_if_needed()
        await rounds_until(watched, lambda: "executor-15:50061" in admin.maps)

        assert 0 < len(near) < 16
        assert "executor-15:50061" not in near


async def test_what_is_wrong_with_an_executor_is_text_whatever_it_says(browser: Browser) -> None:
    state = state_with(0)
    trouble = "<img src=x onerror='window.wasRun=1'> is not an executor"
    state.executors.append(
        admin_pb2.ExecutorState(address="<b>a</b>", status_text="not attached", last_error=trouble, num_losses=2)
    )
    async with opened(browser, FakeAdmin(state)) as watched:
        card = watched.page.locator(".card")
        await expect(card.locator(".trouble")).to_have_text(trouble)
        await expect(card.locator("h3")).to_have_text("<b>a</b>")
        await expect(card.locator(".chip")).to_have_text("not attached, lost 2 times")
        await expect(watched.page.locator("#readiness")).to_have_text("not ready: no executor is attached")
        assert await watched.page.evaluate("[window.wasRun, document.images.length]") == [None, 0]


async def test_fronts_are_a_row_each_and_nothing_where_there_are_none(browser: Browser) -> None:
    state = state_with(1)
    async with opened(browser, FakeAdmin(state, front_tokens_per_s=250)) as watched:
        await expect(watched.page.locator("#fronts")).to_be_hidden()
        busy = state.fronts.add(front_id="0", pid=71, is_ready=True, num_requests=1200, num_restarts=2)
        busy.MergeFrom(admin_pb2.FrontState(num_sessions=3, num_credits=0, loop_lag_us=45_600))
        state.fronts.add(front_id="1")
        await next_round(watched)
        await next_round(watched)

        rows = watched.page.locator("#front-rows tr")
        await expect(rows.nth(0).locator("td")).to_have_text(
            ["Front 0 accepting callsprocess 71; restarted 2 times", "1,200", "250", "45.6 ms", "3", "0"]
        )
        await expect(rows.nth(1).locator("td")).to_have_text(["Front 1 exited", "0", "0", "–", "0", "–"])
        await expect(watched.page.locator("#fronts-summary")).to_have_text("1 of 2 accept calls")
        await expect(rows.locator(".chip.bad")).to_have_count(1)
        await watched.page.set_viewport_size({"width": 360, "height": 800})
        assert await watched.page.evaluate("document.documentElement.scrollWidth") <= 360


async def test_a_request_that_is_gone_gets_one_sentence_and_is_not_asked_for_again(browser: Browser) -> None:
    async with opened(browser, FakeAdmin(state_with(1)), "/#request=100%25%20gone") as watched:
        await expect(watched.page.locator("#request-title")).to_have_text("100% gone")
        await expect(watched.page.locator("#explanation")).to_have_text("No request has this id.")
        await expect(watched.page.locator("#request-body")).to_be_hidden()
        await next_round(watched)

        assert watched.methods.count("GetRequest") == 1


async def test_nothing_is_wider_than_the_window(browser: Browser) -> None:
    async with opened(browser, FakeAdmin(state_with(3))) as watched:
        await watched.page.locator(".card canvas").first.wait_for()
        for width in (360, 1000, 1440):
            await watched.page.set_viewport_size({"width": width, "height": 800})
            assert await watched.page.evaluate("document.documentElement.scrollWidth") <= width
