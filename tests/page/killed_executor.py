"""`python -m tests.page.killed_executor` makes the pictures and the texts of docs/killed-executor.md anew.

Real processes: `octavo up --executors 2` with the demo model, some streams, and a SIGKILL in the middle of one. The
ports of `octavo up` (50051, 50052, 50055) must be free.
"""

import asyncio
import io
import itertools
import os
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from playwright.async_api import Page

from octavo.admin.v1 import admin_pb2
from octavo.admin_client import AdminClient, NotFoundError
from octavo.client import Client
from octavo.commands.up import DEFAULT_PAGE_ADDRESS
from octavo.top.app import TopApp
from octavo.top.polling import Poller
from octavo.values.sampling_params import SamplingParams
from tests.page.browser import running_browser, watched_page
from tests.page.terminal_text import terminal_text
from tests.unit.octavo.top.figure import without_fonts
from tests.unit.octavo.top.terminal import Terminal, terminal

DOCUMENT = Path(__file__).parents[2] / "docs" / "killed-executor.md"
FIGURES = DOCUMENT.parent / "figures"
REQUEST_ID = "sky-1"
QUESTION = "Why is the sky blue? Explain it in detail."

# By the names of the blocks in the document. Small caches: large cells in the block maps.
COMMANDS = {
    "up": "octavo up --executors 2 --num-device-blocks 160 --num-host-blocks 0",
    "generate": f'octavo generate "{QUESTION}" --temperature 0 --request-id {REQUEST_ID}',
    "explain": f"octavo explain {REQUEST_ID}",
}
NUM_OTHER_CLIENTS = 3
NUM_TOKENS_BEFORE_PICTURE = 10
NUM_COLUMNS = 112
TOP_SIZE = (112, 20)
VIEWPORT = {"width": 1180, "height": 880}
PIXELS_PER_CSS_PIXEL = 1.5
NUM_COLOURS = 256
PATIENCE_S = 120


@dataclass(slots=True)
class Running:
    """A command that runs in a terminal of its own."""

    tty: Terminal
    process: asyncio.subprocess.Process

    def text(self) -> str:
        """What the terminal shows."""
        return terminal_text(self.tty.seen, NUM_COLUMNS)

    async def shows(self, text: str) -> None:
        """Return once the terminal has shown a text. Raises: AssertionError: the command ends before."""
        shown, end = asyncio.create_task(self.tty.shows(text.encode())), asyncio.create_task(self.process.wait())
        await asyncio.wait([shown, end], return_when=asyncio.FIRST_COMPLETED)
        end.cancel()
        if not shown.done():
            shown.cancel()
            raise AssertionError(f"it ended without {text!r}: {self.text()}")
        await shown

    def child_pids(self) -> list[int]:
        """Its children, in the order in which they were started."""
        pid = self.process.pid
        return sorted(int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


@asynccontextmanager
async def running(name: str) -> AsyncIterator[Running]:
    """Run one of the commands; what still runs at the end of the block gets a Ctrl-C."""
    async with terminal(NUM_COLUMNS, 40) as tty:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "octavo.cli", *shlex.split(COMMANDS[name])[1:]),
            stdin=tty.theirs,
            stdout=tty.theirs,
            stderr=tty.theirs,
            env={**os.environ, "TERM": "xterm-256color"},
        )
        try:
            yield Running(tty, process)
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGINT)
                await process.wait()


async def one_other_client(number: int) -> None:
    """Send one request after another."""
    async with Client() as client:
        for turn in itertools.count(1):
            params = SamplingParams(temperature=0.8, max_tokens=160, seed=100 * number + turn)
            await client.generate("Once upon a time", params, request_id=f"story-{number}-{turn}")


async def request_with(admin: AdminClient, num_output_tokens: int) -> admin_pb2.RequestState:
    """Return the request as soon as it has so many tokens."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                request = await admin.get_request(REQUEST_ID)
            except NotFoundError:
                request = admin_pb2.RequestState()
            if request.num_output_tokens >= num_output_tokens:
                return request
            await asyncio.sleep(0.05)


async def take_picture(page: Page, name: str) -> None:
    """Write what the window shows, with few colours, so that the file is small."""
    with Image.open(io.BytesIO(await page.screenshot())) as picture:
        few_colours = picture.convert("RGB").quantize(
            NUM_COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=5, dither=Image.Dither.NONE
        )
        few_colours.save(FIGURES / f"killed-executor-{name}.png", optimize=True)


async def draw_top(app: TopApp) -> None:
    """Write the screen of `octavo top`, with the cursor on the request."""
    ids = [app.table.get_row_at(row)[0].plain.strip() for row in range(app.table.row_count)]
    app.table.move_cursor(row=ids.index(REQUEST_ID))
    await app.refresh_picture()
    svg = without_fonts(app.export_screenshot(title="octavo top"))
    (FIGURES / "killed-executor-top.svg").write_text(svg, encoding="utf-8")


async def play(up: Running, admin: AdminClient, page: Page, app: TopApp) -> dict[str, str]:
    """Kill the executor in the middle of the stream; return the texts of terminals by the names of their blocks."""
    await page.goto(f"http://{DEFAULT_PAGE_ADDRESS}/")
    await page.locator("#interval").select_option("500")
    await page.locator("#tab-running").click()
    async with running("generate") as generate:
        executor = (await request_with(admin, NUM_TOKENS_BEFORE_PICTURE)).executor
        addresses = [state.address for state in (await admin.get_state()).executors]  # in the order of their start
        await page.goto(f"http://{DEFAULT_PAGE_ADDRESS}/#request={REQUEST_ID}")
        await page.locator("#steps-executor").select_option(next(each for each in addresses if each != executor))
        await page.locator("#events .event").nth(2).wait_for()
        await page.locator("#rows tr", has_text=REQUEST_ID).wait_for()
        await page.locator("dl.numbers dd", has_text=re.compile(r"\d\.\d")).nth(1).wait_for()
        await take_picture(page, "before")

        os.kill(up.child_pids()[addresses.index(executor)], signal.SIGKILL)
        await page.locator(".card .chip", has_text="not attached").wait_for()
        num_tokens = (await admin.get_request(REQUEST_ID)).num_output_tokens
        await request_with(admin, num_tokens + 1)
        await draw_top(app)
        await page.locator("#events .event", has_text="admitted").nth(1).wait_for()
        await take_picture(page, "after")
        await generate.process.wait()
        finished = generate.text()
    async with running("explain") as explain:
        await explain.process.wait()
    await up.shows(" is back after ")
    return {"up": up.text(), "generate": finished, "explain": explain.text()}


def with_block(document: str, name: str, lines: str) -> str:
    """Return the document with other lines in the block of a name; its first line, the command, stays."""
    pattern = re.compile(rf"(<!-- {name} -->\n```console\n\$ [^\n]*\n).*?\n```", re.DOTALL)
    written, number = pattern.subn(lambda found: f"{found[1]}{lines}\n```", document)
    assert number == 1, f"{DOCUMENT.name} has {number} blocks {name!r}"
    return written


async def main() -> None:
    """Play it, and write what was seen."""
    async with running("up") as up:
        await up.shows("try: octavo generate")
        async with (
            running_browser() as browser,
            watched_page(
                browser, DEFAULT_PAGE_ADDRESS, viewport=VIEWPORT, device_scale_factor=PIXELS_PER_CSS_PIXEL
            ) as watched,
            AdminClient() as admin,
            asyncio.TaskGroup() as tasks,
        ):
            clients = [tasks.create_task(one_other_client(number)) for number in range(1, NUM_OTHER_CLIENTS + 1)]
            app = TopApp(Poller(admin), 0.5)
            async with app.run_test(size=TOP_SIZE):
                texts = await play(up, admin, watched.page, app)
            for client in clients:
                client.cancel()
    document = DOCUMENT.read_text(encoding="utf-8")
    for name, lines in texts.items():
        document = with_block(document, name, lines)
    DOCUMENT.write_text(document, encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(main())
