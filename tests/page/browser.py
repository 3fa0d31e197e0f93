"""Chromium for the tests of the live page: where it is, how it is started, and what a page must never do."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from playwright.async_api import Browser, Page, Playwright, async_playwright

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE_MS = 15_000

# What browsers print for an answer with an error status; the page cannot prevent it.
FAILED_LOAD = "Failed to load resource"


def find_chromium(playwright: Playwright) -> str:
    """Return the path of a browser: CHROMIUM, else one in PATH, else the one that playwright has installed.

    Raises: AssertionError: there is none.
    """
    named = [os.environ.get("CHROMIUM"), *(shutil.which(name) for name in ("chromium", "google-chrome"))]
    found = next((path for path in named if path), playwright.chromium.executable_path)
    assert Path(found).exists(), "Chromium is missing: run `tests/page/fetch_chromium`, or set CHROMIUM to its path"
    return found


@asynccontextmanager
async def running_browser() -> AsyncIterator[Browser]:
    """Run a headless browser for the length of a block."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=find_chromium(playwright), args=list(FLAGS))
        try:
            yield browser
        finally:
            await browser.close()


@dataclass(slots=True)
class Watched:
    """A page, and all that it did which it must not do.

    Attributes:
        page: The page.
        origin: Where it comes from, such as http://127.0.0.1:50052.
        methods: The methods of AdminService that it called, in order.
        foreign_urls: What it asked of others.
        complaints: Errors of its script, violations of its policy, and what else the console got; what the browser
            prints about answers with an error status is not among them.
        num_failed_loads: How often the browser printed that.
    """

    page: Page
    origin: str
    methods: list[str] = field(default_factory=list)
    foreign_urls: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    num_failed_loads: int = 0

    def watch(self) -> None:
        """Begin."""
        self.page.on("request", lambda request: self._on_request(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda message: self._on_message(message.type, message.text))

    async def open(self, path: str = "/") -> None:
        """Load the page."""
        await self.page.goto(self.origin + path)

    async def settled(self) -> None:
        """Return once the page has shown the answers of every round of questions that it has begun."""
        async with asyncio.timeout(PATIENCE_MS / 1000):
            while await self.page.evaluate("Number(document.body.dataset.rounds)") != self.num_rounds:
                await self.page.evaluate("0")

    @property
    def num_rounds(self) -> int:
        """Rounds of questions that the page has begun."""
        return self.methods.count("GetSchedulerState")

    def check(self) -> None:
        """Raise if the page did what it must not do."""
        assert self.complaints == []
        assert self.foreign_urls == []

    def _on_request(self, url: str) -> None:
        if not url.startswith((f"{self.origin}/", "data:")):
            self.foreign_urls.append(url)
        elif "AdminService/" in url:
            self.methods.append(url.rpartition("/")[2])

    def _on_message(self, kind: str, text: str) -> None:
        if text.startswith(FAILED_LOAD):
            self.num_failed_loads += 1
        elif kind in ("error", "warning"):
            self.complaints.append(f"{kind}: {text}")


@asynccontextmanager
async def watched_page(browser: Browser, address: str, **options: object) -> AsyncIterator[Watched]:
    """Give a page of its own profile for the length of a block, and check in the end what it did.

    Args:
        browser: Whose page.
        address: Where the scheduler serves operators, host:port.
        options: Of playwright's `new_context`, such as `viewport`.
    """
    context = await browser.new_context(**options)  # type: ignore[arg-type]
    try:
        page = await context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        watched = Watched(page, f"http://{address}")
        watched.watch()
        yield watched
        watched.check()
    finally:
        await context.close()
