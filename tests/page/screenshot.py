"""`python -m tests.page.screenshot` writes docs/figures/page.png anew: the live page of a scheduler at work."""

import argparse
import asyncio
from pathlib import Path
from typing import Literal

from playwright.async_api import Browser, Page

from tests.page.browser import running_browser, watched_page
from tests.page.lively import lively_stack

PICTURE = Path(__file__).parents[2] / "docs" / "figures" / "page.png"


async def take_picture(
    browser: Browser,
    path: Path,
    *,
    width: int = 1440,
    height: int = 900,
    scheme: Literal["light", "dark"] = "light",
    step_ms: float = 24.0,
) -> None:
    """Write a picture of the page of a lively scheduler.

    Args:
        browser: Who draws it.
        path: The file, PNG.
        width: Of the window, CSS pixels.
        height: The same.
        scheme: Of the colours.
        step_ms: Time that a step takes, in milliseconds.
    """
    async with (
        lively_stack(step_ms) as stack,
        watched_page(
            browser,
            stack.service.other_addresses["page"],
            viewport={"width": width, "height": height},
            color_scheme=scheme,
        ) as watched,
    ):
        await watched.open()
        await fill(watched.page)
        await watched.page.screenshot(path=path)


async def fill(page: Page) -> None:
    """Wait until every part of the page has something to show, and select a request that was preempted."""
    await page.locator("#tab-running").click()
    row = page.locator("#rows tr", has_text="preempted").first
    await row.locator("button").click()
    await page.locator("#events .event").nth(3).wait_for()
    await page.locator("#tab-waiting").click()
    await page.locator("#rows tr").nth(5).wait_for()
    await page.locator(".card .chip", has_text="not attached").wait_for()


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=PICTURE, help="the file; by default the one in docs/")
    parser.add_argument("--width", type=int, default=1440, help="of the window, in CSS pixels")
    parser.add_argument("--height", type=int, default=900, help="of the window, in CSS pixels")
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    async with running_browser() as browser:
        await take_picture(
            browser, arguments.output, width=arguments.width, height=arguments.height, scheme=arguments.scheme
        )


if __name__ == "__main__":
    asyncio.run(_main())
