"""A front in a process of its own: `python -m scheduler_svc.front_process LINK NUMBER`, started by `fronts.py`.

It reads the scheduler's settings as one line of JSON from stdin, and ends when stdin does: its core is gone then.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc.aio

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.front.front import Front, client_services
from scheduler_svc.front.text.text_model import ModelTokenizer
from scheduler_svc.link.remote_core import RemoteCore
from shared.errors import OctavoServiceError
from shared.events import configure_logging
from shared.file_limit import raise_file_limit
from shared.garbage_collection import IdleCollection, settle
from shared.grpc_metrics import CallMetrics, service_families
from shared.grpc_server import Port, Ports, shut_down
from shared.health import Health
from shared.loop_lag import LoopLag
from shared.metric import Family
from shared.stop_request import StopRequest


def main() -> int:
    """Serve until SIGTERM, or until the core's process ends; return the exit code."""
    link, name = sys.argv[1:]
    config = SchedulerConfig.model_validate_json(sys.stdin.readline())
    configure_logging(config.log_level, config.log_format)
    raise_file_limit()
    settle()
    try:
        asyncio.run(serve(config, link, name, lambda: StopRequest(exit_on_stdin_close=True).wait()))
    except OctavoServiceError as error:
        print(f"octavo scheduler: front {name}: {error}", file=sys.stderr)
        return 1
    return 0


async def serve(config: SchedulerConfig, link: str, name: str, wait_for_stop: Callable[[], Awaitable[str]]) -> None:
    """Run the front until somebody wants it to stop.

    Raises: OctavoServiceError: it cannot start.
    """
    stopping = asyncio.ensure_future(wait_for_stop())
    health = Health(client_services(config))
    tokenizer = ModelTokenizer(config.tokenizer)
    calls = CallMetrics()

    def collect() -> list[Family]:
        return [*service_families(calls, front.tls), *([] if front.openai is None else front.openai.families())]

    lag = LoopLag()
    core = RemoteCore(
        lambda: open_link(link, config.max_message_bytes),
        name,
        tokenizer.load,
        health.set_ready,
        collect,
        lambda: lag.longest_s,
    )
    front = Front(config, core, tokenizer, health, collect, call_metrics=calls, is_shared=True)
    others: dict[str, Port] = {} if front.openai is None else {"openai": front.openai}
    ports = Ports(front.main, others)

    async def open_ports() -> None:
        await core.wait_until_told()  # who connects to one that was started again finds what the others have
        await ports.start()
        await core.take_calls()

    opening = asyncio.create_task(open_ports(), name="ports")
    tasks = [
        opening,
        asyncio.create_task(core.run(), name="link"),
        asyncio.create_task(front.pace.watch(), name="pace"),
        asyncio.create_task(lag.watch(), name="loop-lag"),
        asyncio.create_task(IdleCollection(lambda: core.num_requests == 0).run(), name="collector"),
    ]

    async def drain() -> None:
        await core.leave()
        front.generation.shut_down()

    try:
        reason = await why_to_stop(stopping, tasks)
        if opening.done():
            await shut_down(ports, reason, drain=drain, grace_s=config.shutdown_grace_s)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not opening.cancelled():
            await ports.stop(0)
        await front.close(config.shutdown_grace_s)


async def why_to_stop(stopping: asyncio.Future[str], tasks: Iterable[asyncio.Task[None]]) -> str:
    """Return the reason once somebody wants us to stop. Raises: what ended a task before; we are started again then."""
    pending: set[asyncio.Future[Any]] = {stopping, *tasks}
    while not stopping.done():
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for ended in done:
            ended.result()
    return stopping.result()


def open_link(link: str, max_message_bytes: int) -> grpc.aio.Channel:
    """Open a channel to the core."""
    options = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
    return grpc.aio.insecure_channel(link, options=options)


if __name__ == "__main__":
    sys.exit(main())
