"""The port that Prometheus reads: what it answers, and that it never sees half of anything."""

import asyncio
import socket
import threading
import urllib.error
from collections.abc import Iterable
from contextlib import ExitStack

import pytest

from octavo_shared.errors import UnavailableError
from octavo_shared.process.metric import Family, Metric
from octavo_shared.process.metrics_server import MAX_CONNECTIONS, MetricsServer
from tests.monitoring.live import get, scrape
from tests.support.patience import PATIENCE_S

A, B = Metric("octavo_a_total", "counter", "One."), Metric("octavo_b_total", "counter", "The same.")


def no_metrics() -> Iterable[Family]:
    return []


async def status_of(url: str) -> tuple[int, str]:
    """Return the status and the text of a page that is no answer of 200."""

    def ask() -> tuple[int, str]:
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(url)
        with refused.value as page:
            return page.code, page.read().decode()

    return await asyncio.to_thread(ask)


async def test_metrics_are_at_one_path_and_the_root_links_to_it() -> None:
    server = MetricsServer("127.0.0.1:0", lambda: [A.single(3)])
    address = await server.start()
    assert "octavo_a_total 3.0\n" in await scrape(address)
    assert "href='/metrics'" in await asyncio.to_thread(get, f"http://{address}/")
    assert (await status_of(f"http://{address}/metrics/other"))[0] == 404
    assert (await status_of(f"http://{address}/favicon.ico"))[0] == 404
    await server.stop(0)


async def test_the_process_is_measured_as_well() -> None:
    server = MetricsServer("127.0.0.1:0", no_metrics)
    assert "process_resident_memory_bytes" in await scrape(await server.start())
    await server.stop(0)


async def test_a_port_that_is_taken_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=f"^cannot listen on {address}: .* set --metrics-listen"):
            await MetricsServer(address, no_metrics).start()


async def test_an_address_may_be_ipv6() -> None:
    server = MetricsServer("[::1]:0", lambda: [A.single(3)])
    address = await server.start()
    assert address.startswith("[::1]:")
    assert "octavo_a_total 3.0\n" in await scrape(address)
    await server.stop(0)


async def test_the_port_is_free_after_the_end_and_a_second_end_does_nothing() -> None:
    server = MetricsServer("127.0.0.1:0", no_metrics)
    address = await server.start()
    await server.stop(0)
    await server.stop(0)
    again = MetricsServer(address, no_metrics)
    assert await again.start() == address
    await again.stop(0)


async def test_metrics_are_collected_on_the_event_loop_between_two_callbacks() -> None:
    counts, threads = [0, 0], set()

    def collect() -> Iterable[Family]:
        threads.add(threading.get_ident())
        return [A.single(counts[0]), B.single(counts[1])]

    server = MetricsServer("127.0.0.1:0", collect)
    address = await server.start()
    scraping = asyncio.gather(*(scrape(address) for _ in range(20)))
    while not scraping.done():
        counts[0] += 1
        sum(range(1000))
        counts[1] += 1
        await asyncio.sleep(0)
    await server.stop(0)
    for page in await scraping:
        values = dict(line.split() for line in page.splitlines() if line.startswith("octavo_"))
        assert values["octavo_a_total"] == values["octavo_b_total"]
    assert threads == {threading.get_ident()}


async def test_an_event_loop_that_does_not_answer_is_told() -> None:
    server = MetricsServer("127.0.0.1:0", no_metrics, collect_timeout_s=0.05)
    address = await server.start()
    answers: list[tuple[int, str]] = []

    def ask() -> None:
        answers.append(asyncio.run(status_of(f"http://{address}/metrics")))

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()  # this thread is the event loop's
    assert answers == [(503, "the event loop does not answer\n")]
    await server.stop(0)


async def test_who_hangs_up_leaves_no_trace(capfd: pytest.CaptureFixture[str]) -> None:
    server = MetricsServer("127.0.0.1:0", lambda: [A.single(3)])
    address = await server.start()
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"GET /metr")
    assert "octavo_a_total" in await scrape(address)
    await server.stop(0)
    assert capfd.readouterr() == ("", "")


def num_threads() -> int:
    """Return how many there are, but for those in which asyncio runs what blocks: these come and go with the load."""
    return sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate())


async def test_idle_connections_have_so_many_threads_and_make_way_for_a_scrape() -> None:
    server = MetricsServer("127.0.0.1:0", lambda: [A.single(3)])
    address = await server.start()
    host, port = address.split(":")
    before = num_threads()
    with ExitStack() as stack:
        idle = [
            stack.enter_context(await asyncio.to_thread(socket.create_connection, (host, int(port))))
            for _ in range(3 * MAX_CONNECTIONS)
        ]
        assert "octavo_a_total 3.0\n" in await scrape(address)
        assert MAX_CONNECTIONS // 2 < num_threads() - before <= MAX_CONNECTIONS + 1
        idle[0].settimeout(PATIENCE_S)
        assert await asyncio.to_thread(idle[0].recv, 1) == b""  # the oldest one was closed
        idle[-1].sendall(b"GET / HTTP/1.0\r\n\r\n")
        idle[-1].settimeout(PATIENCE_S)
        assert (await asyncio.to_thread(idle[-1].recv, 15)).endswith(b"200 OK")
    await server.stop(0)
