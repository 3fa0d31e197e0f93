"""The page beside a large fleet: 16 executors with 10,000 blocks each, all on the screen, at one refresh a second."""

import pytest
from playwright.async_api import Browser, Page

from tests.page.browser import watched_page
from tests.page.fake_admin import FakeAdmin, state_with

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_EXECUTORS = 16
NUM_BLOCKS = 10_000

# Each refresh, for every executor. A busy executor changes some blocks of hundreds a second.
SHARE_CHANGED = 0.2

# The page's own work for a refresh, all maps together, in units of REFERENCE: 6 to 17 were measured (docs/page.md), and
# 50 to 100 with a CPU ten times slower, by Emulation.setCPUThrottlingRate of Chromium's debugging protocol.
MAX_REFRESH = 35.0
NUM_REFRESHES = 5
# So often, while all of them are slow: other processes may have the CPU for a while.
MAX_ROUNDS = 6

# The time, in milliseconds, in which this browser on this machine compares as many states and paints as many cells as a
# refresh does, without a canvas and without anything that the page does besides. The shortest of a few, as below.
REFERENCE = """([numBlocks, numChanged]) => {
    const states = new Uint8Array(numBlocks).fill(1), painted = new Uint8Array(numBlocks);
    const pixels = new Uint32Array(9 * numBlocks);
    const durations = [];
    for (let round = 0; round < 50; round++) {
        painted.set(states);
        for (let block = 0; block < numChanged; block++) painted[Math.floor(block * numBlocks / numChanged)] = 0;
        const startMs = performance.now();
        for (let block = 0; block < numBlocks; block++) {
            if (states[block] === painted[block]) continue;
            for (let pixel = 0; pixel < 9; pixel++) pixels[9 * block + pixel] = block;
        }
        durations.push(performance.now() - startMs);
    }
    return Math.min(...durations);
}"""

# Keeps how long the page worked for each refresh, in milliseconds, and how long the tasks were that kept it from
# anything else for more than 50 ms. `whenRefreshed` resolves to both once so many refreshes had so many maps.
RECORD = """
    let refreshes = [], longTasks = [], check = () => {};
    new PerformanceObserver((list) => {
        for (const { name, duration } of list.getEntries()) {
            if (name === "octavo-state") refreshes.push({ ms: 0, numMaps: 0 });
            if (!refreshes.length) continue;
            refreshes.at(-1).ms += duration;
            refreshes.at(-1).numMaps += name === "octavo-block-map";
        }
        check();
    }).observe({ type: "measure" });
    new PerformanceObserver((list) => longTasks.push(...list.getEntries().map((task) => task.duration)))
        .observe({ type: "longtask" });
    window.whenRefreshed = (number, numMaps) => new Promise((resolve) => {
        [refreshes, longTasks] = [[], []];
        check = () => {
            const whole = refreshes.filter((refresh) => refresh.numMaps === numMaps).map((refresh) => refresh.ms);
            if (whole.length >= number) resolve([whole, longTasks]);
        };
    });
"""


async def test_drawing_160000_blocks_leaves_the_page_smooth(browser: Browser) -> None:
    admin = FakeAdmin(state_with(NUM_EXECUTORS, NUM_BLOCKS), num_blocks=NUM_BLOCKS, share_changed=SHARE_CHANGED)
    await admin.start()
    try:
        async with watched_page(browser, admin.address, viewport={"width": 1800, "height": 3000}) as watched:
            await watched.page.add_init_script(RECORD)
            await watched.open()
            await watched.page.locator("#interval").select_option("500")
            num_blocks = NUM_EXECUTORS * NUM_BLOCKS
            reference_ms = await watched.page.evaluate(REFERENCE, [num_blocks, int(SHARE_CHANGED * num_blocks)])
            max_ms = MAX_REFRESH * reference_ms
            print(f"reference {reference_ms:.2f} ms")
            fastest_ms = [await refresh_ms(watched.page)]
            while min(fastest_ms) >= max_ms and len(fastest_ms) < MAX_ROUNDS:
                fastest_ms.append(await refresh_ms(watched.page))
            assert min(fastest_ms) < max_ms
    finally:
        await admin.stop()


async def refresh_ms(page: Page) -> float:
    """Return how long the page works for a refresh with all maps, in milliseconds.

    It is the shortest of a few, so that what other processes take of the CPU does not count.
    """
    refreshes: list[float]
    refreshes, long_tasks = await page.evaluate(f"whenRefreshed({NUM_REFRESHES}, {NUM_EXECUTORS})")
    print(f"refreshes: {[round(ms, 1) for ms in refreshes]} ms; long tasks: {long_tasks} ms")  # for docs/page.md
    return min(refreshes)
