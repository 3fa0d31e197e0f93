"""Draws docs/figures/top.svg anew: `octavo top` on a scheduler with two fake executors and more load than they take.

python -m tests.unit.octavo.top.figure
"""

import asyncio
import re
from pathlib import Path

from executor_svc.fake.worker import FakeWorker
from octavo.admin_client import AdminClient
from octavo.top.app import TopApp
from octavo.top.polling import Poller
from tests.support.stack import Stack, running_stack, token_request

FIGURE = Path("docs/figures/top.svg")
SIZE = (132, 38)
SECONDS = 10
TENANTS = ("research", "search", "chat", "batch")


def without_fonts(svg: str) -> str:
    """Return a drawing that takes the monospaced font of whoever looks at it, and fetches nothing."""
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    return re.sub(
        r"font-family: ?[^;]*;", "font-family: ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace;", svg
    )


async def one_client(stack: Stack, number: int) -> None:
    """Send one request after another, as one of the tenants."""
    for turn in range(1000):
        tenant = TENANTS[number % len(TENANTS)]
        request = token_request(
            60 + 97 * (number * 7 + turn * 3) % 700,
            120 + 53 * (number + turn) % 500,
            request_id=f"{tenant}-{1000 + number * 37 + turn * 211}",
            first_id=number * 5 + turn,
            n=1 + number % 2,
            temperature=1.0,
        )
        request.tenant = tenant
        async for _ in stack.generation.Generate(request):
            pass


async def screenshot() -> str:
    """Run it for a while, open a request that waits, and return the screen as SVG."""
    workers = [
        FakeWorker(num_device_blocks=blocks, num_host_blocks=256, max_model_len=2048, step_ms=25)
        for blocks in (512, 768)
    ]
    async with running_stack(*workers) as stack:
        clients = [asyncio.create_task(one_client(stack, number)) for number in range(40)]
        async with AdminClient(stack.service.other_addresses["admin"]) as client:
            app = TopApp(Poller(client), 0.5)
            async with app.run_test(size=SIZE) as pilot:
                await asyncio.sleep(SECONDS)
                statuses = [app.table.get_row_at(i)[1].plain.strip() for i in range(app.table.row_count)]
                waiting = [i for i, status in enumerate(statuses) if status == "waiting"]
                app.table.move_cursor(row=waiting[len(waiting) // 2])  # the first ones run in a moment
                await pilot.press("enter")
                await asyncio.sleep(0.6)
                svg = app.export_screenshot(title="octavo top")
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return without_fonts(svg)


if __name__ == "__main__":
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    FIGURE.write_text(asyncio.run(screenshot()), encoding="utf-8")
