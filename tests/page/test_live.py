"""The page in front of a real scheduler: what it shows is what AdminService says."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import grpc
import pytest
from playwright.async_api import Browser, Page, expect

from octavo.admin.v1 import admin_service_pb2 as pb
from octavo.generation.v1.generation_service_pb2 import GenerateRequest
from tests.page.browser import Watched, watched_page
from tests.page.gate import Gate
from tests.support.stack import Stack, running_stack, token_request, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

# What a block map shows, by the colours of the style: for each cell the number of its BlockState by the colour of its
# middle, and whether its corner has another colour, which is the frame of the selected request.
READ_MAP = """(canvas) => {
    const style = getComputedStyle(document.documentElement);
    const states = {};
    ["free", "cached", "used", "shared"].forEach((name, i) => {
        const hex = style.getPropertyValue(`--block-${name}`).trim();
        states[[1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join()] = i + 1;
    });
    const context = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
    context.drawImage(canvas, 0, 0);
    const cell = Number(canvas.dataset.cell), columns = Number(canvas.dataset.columns);
    const at = (x, y) => [...context.getImageData(x, y, 1, 1).data.slice(0, 3)].join();
    return [...Array(columns * (canvas.height / cell)).keys()].map((block) => {
        const x = (block % columns) * cell, y = Math.floor(block / columns) * cell;
        const middle = at(x + cell / 2, y + cell / 2);
        return [states[middle] ?? 0, at(x, y) !== middle];
    });
}"""

COUNT_COLOURS = """(canvas) => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return new Set(new Uint32Array(data.buffer)).size;
}"""


@asynccontextmanager
async def opened(browser: Browser, stack: Stack, path: str = "/") -> AsyncIterator[Watched]:
    """Open the page of a scheduler for the length of a block."""
    async with watched_page(browser, stack.service.other_addresses["page"]) as watched:
        await watched.open(path)
        await watched.page.locator("#interval").select_option("500")
        yield watched


@asynccontextmanager
async def sent(stack: Stack, *requests: GenerateRequest) -> AsyncIterator[None]:
    """Have requests sent for the length of a block, in this order; what has not ended by then is cancelled."""
    calls = []
    for request in requests:
        calls.append(asyncio.create_task(_read(stack, request)))
        await until(lambda request=request: (request.tenant, request.request_id) in stack.engine.requests)  # type: ignore[misc]
    try:
        yield
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def _read(stack: Stack, request: GenerateRequest) -> None:
    with suppress(grpc.aio.AioRpcError):
        async for _ in stack.generation.Generate(request):
            pass


async def open_request(page: Page, request_id: str, tab: str) -> None:
    """Choose a request in a tab."""
    await page.locator(f"#tab-{tab}").click()
    await page.locator("#rows button", has_text=request_id).click()
    await expect(page.locator("#request-title")).to_have_text(request_id)


async def has_output(stack: Stack, request_id: str, num_tokens: int) -> None:
    """Return once a request has so many tokens, over all outputs."""
    await until(lambda: stack.engine.requests["", request_id].num_output_tokens >= num_tokens)


async def test_the_map_shows_every_block_as_it_is_and_who_has_it(browser: Browser) -> None:
    worker = (gate := Gate()).worker(num_device_blocks=96, max_model_len=1024)
    async with running_stack(worker, steps_in_flight="2", page_listen="127.0.0.1:0") as stack, gate:
        group = token_request(70, 500, request_id="group", n=3, temperature=1.0)
        ended = token_request(90, 2, request_id="ended", first_id=40)
        async with sent(stack, ended), sent(stack, group):
            await until(lambda: ("", "ended") in stack.engine.ended)
            await has_output(stack, "group", 30)
            gate.close()
            await until(lambda: stack.driver.planner is not None and len(stack.driver.planner.in_flight) == 2)
            async with opened(browser, stack) as watched:
                await check_map(watched.page, stack)


async def check_map(page: Page, stack: Stack) -> None:
    canvas = page.locator(".card canvas")
    states = list((await stack.admin.GetBlockMap(pb.GetBlockMapRequest())).states)
    assert set(states) == {1, 2, 3, 4}
    await expect(canvas).to_have_attribute("data-cell", "15")
    await expect(page.locator("#tab-running .badge")).to_have_text("1")
    shown = await canvas.evaluate(READ_MAP)
    assert shown[: len(states)] == [[state, False] for state in states]
    legend = [
        f"{states.count(number)} {name}" for number, name in ((4, "shared"), (3, "used"), (2, "cached"), (1, "free"))
    ]
    assert await page.locator(".bars .legend").first.locator("li").all_inner_texts() == legend

    await open_request(page, "group", "running")
    await expect(page.locator("#legend-selected")).to_be_visible()
    request = (await stack.admin.GetRequest(pb.GetRequestRequest(request_id="group"))).request
    held = {block for sequence in request.sequences for block in sequence.block_table}
    shown = await canvas.evaluate(READ_MAP)
    assert {block for block, (_, is_framed) in enumerate(shown) if is_framed} == held
    await expect(page.locator("#sequences .sequence")).to_have_count(3)

    shared = states.index(4)
    chip = page.locator("#sequences .sequence").first.get_by_text(str(shared), exact=True)
    await chip.click()
    await expect(page.locator("#block-title")).to_have_text(f"Block {shared} of {stack.executor.address}")
    await expect(page.locator("#block-text")).to_contain_text("Shared, referenced by 3 block tables")
    await expect(page.locator("#block-holders li")).to_have_text([f"groupoutput {i}, its block 0" for i in range(3)])

    await page.locator("#request-close").click()
    await expect(page.locator("#request")).to_be_hidden()
    await page.locator("#block-holders button").first.click()
    await expect(page.locator("#request-title")).to_have_text("group")


async def test_the_queue_has_its_order_and_its_reasons(browser: Browser) -> None:
    hostile = "<img src=x onerror='window.wasRun=1'>"
    async with running_stack((gate := Gate()).worker(), max_num_seqs=1, page_listen="127.0.0.1:0") as stack, gate:
        gate.close()
        waiting = token_request(20, 4, request_id=hostile)
        waiting.tenant = "<script>window.wasRun=1</script>"
        last = token_request(20, 4, request_id="last")
        async with (
            sent(stack, token_request(30, 4, request_id="first"), waiting, last),
            opened(browser, stack) as watched,
        ):
            page = watched.page
            queue = (await stack.admin.ListQueue(pb.ListQueueRequest())).requests
            assert {request.request_id for request in queue} == {hostile, "last"}
            await expect(page.locator("#tab-waiting")).to_have_text("Waiting 2")
            rows = [[q.request_id, f"{q.tenant} · {q.reason}" if q.tenant else q.reason] for q in queue]
            for row, (name, about) in zip(await page.locator("#rows tr").all(), rows, strict=True):
                await expect(row.locator("button")).to_have_text(name)
                await expect(row.locator(".about")).to_have_text(about)

            await open_request(page, hostile, "waiting")
            explained = await stack.admin.ExplainRequest(pb.ExplainRequestRequest(request_id=hostile))
            sentence = explained.explanation
            await expect(page.locator("#explanation")).to_have_text(f"{sentence[0].upper()}{sentence[1:]}.")
            await expect(page.locator("#fits tbody tr")).to_contain_text("1 needed, 0 free")
            await page.reload()  # the address of the page names the request
            await expect(page.locator("#request-title")).to_have_text(hostile)
            await expect(page.locator("#request-facts")).to_contain_text("<script>")
            assert await page.evaluate("[window.wasRun, document.images.length, document.scripts.length]") == [
                None,
                0,
                1,
            ]


async def test_a_life_has_preemption_and_loss_and_its_end(browser: Browser) -> None:
    worker = (gate := Gate()).worker(num_device_blocks=12, max_model_len=160)
    async with running_stack(worker, watermark=0.0, prefix_caching=False, page_listen="127.0.0.1:0") as stack, gate:
        older, younger = (
            token_request(48, 100, request_id=name, first_id=i) for i, name in ((3, "older"), (9, "younger"))
        )
        async with AsyncExitStack() as exits:
            page = (await exits.enter_async_context(opened(browser, stack, "/#request=younger"))).page
            await expect(page.locator("#explanation")).to_contain_text("No live request has request_id 'younger'")
            gate.close()  # until both have come
            await exits.enter_async_context(sent(stack, older, younger))
            gate.open()
            await until(lambda: stack.engine.requests["", "younger"].group.num_preemptions == 1)
            gate.close()
            await expect(page.locator(".event.preempted")).to_contain_text("will be recomputed")

            await stack.executor.kill()
            await expect(page.locator(".card .chip")).to_have_text("not attached, lost 1 time")
            await expect(page.locator("#readiness")).to_contain_text("not ready: no executor is attached")
            await open_request(page, "older", "waiting")
            await expect(page.locator(".event.executor-lost")).to_contain_text("the executor was lost")
            gate.open()
            stack.executor.worker = gate.worker(num_device_blocks=12, max_model_len=160)
            await stack.executor.start()

            await expect(page.locator("#request-status")).to_have_text("finished")
            await expect(page.locator(".event.finished")).to_contain_text("finished with 100 output tokens: length")
            explained = await stack.admin.ExplainRequest(pb.ExplainRequestRequest(request_id="older"))
            assert explained.explanation.endswith("ago it finished with 100 output tokens: length")
            await expect(page.locator("#explanation")).to_contain_text("finished with 100 output tokens")
            await page.locator("#tab-ended").click()
            await expect(page.locator("#rows tr", has_text="older")).to_contain_text("length after")


async def test_steps_are_drawn_and_told_and_everything_has_a_key(browser: Browser) -> None:
    async with (
        running_stack(
            (gate := Gate()).worker(num_device_blocks=96, max_model_len=1024), page_listen="127.0.0.1:0"
        ) as stack,
        gate,
        sent(stack, token_request(40, 400, request_id="one")),
    ):
        await has_output(stack, "one", 8)
        gate.close()
        async with opened(browser, stack) as watched:
            page = watched.page
            await expect(page.locator("#steps-summary")).to_contain_text("executing")
            assert await page.locator("#steps").evaluate(COUNT_COLOURS) > 2

            await tab_to(page, "steps")
            await page.keyboard.press("ArrowRight")
            first = (await stack.admin.ListSteps(pb.ListStepsRequest(num_steps=256))).steps[0]
            await expect(page.locator("#tip")).to_contain_text(f"Step {first.step_id}: {first.text}")
            await page.keyboard.press("Enter")
            await expect(page.locator("#step-title")).to_have_text(f"Step {first.step_id}")
            await expect(page.locator("#step-facts")).to_contain_text("slot 0: tokens 0 to 39")

            await tab_to(page, "")
            await page.keyboard.press("ArrowRight")
            await page.keyboard.press("ArrowRight")
            await expect(page.locator("#tip")).to_contain_text("used by one")
            await page.keyboard.press("Enter")
            await expect(page.locator("#block-title")).to_contain_text("Block 1 of")

            await tab_to(page, "tab-running")  # the first that has requests was opened
            await page.keyboard.press("ArrowLeft")
            await expect(page.locator("#rows-empty")).not_to_be_empty()
            await page.keyboard.press("ArrowRight")
            await tab_to(page, "tab-panel")
            await page.keyboard.press("Tab")
            await page.keyboard.press("Enter")
            await expect(page.locator("#request-title")).to_have_text("one")


async def tab_to(page: Page, element_id: str) -> None:
    """Press Tab until the element with this id has the focus; "": the canvas of an executor."""
    for _ in range(30):
        await page.keyboard.press("Tab")
        focused, tag = await page.evaluate("[document.activeElement.id, document.activeElement.tagName]")
        if focused == element_id and (focused or tag == "CANVAS"):
            return
    raise AssertionError(f"30 times Tab do not reach {element_id or 'a map'}")
