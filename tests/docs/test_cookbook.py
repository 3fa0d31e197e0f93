"""Sessions of the documentation: every command is typed, with the real grpcurl, and prints what the page says."""

import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from executor_svc.config import FakeConfig
from executor_svc.fake.worker import FakeWorker
from octavo_shared.process.config import load_config
from octavo_shared.process.service_config import ServiceConfig
from scheduler_svc.config.scheduler_config import SchedulerConfig
from tests.docs.shell import Shell
from tests.support.certificates import Authority
from tests.support.sessions import Typed, console_sessions, is_as_printed
from tests.support.stack import Stack, running_stack, until

REPOSITORY = Path(__file__).parents[2]
# Pages whose sessions begin with the command of a fake executor and that of a scheduler.
PAGES = ("docs/grpcurl.md", "docs/how-it-works.md")
START_EXECUTOR, START_SCHEDULER = "python -m executor_svc.fake", "python -m scheduler_svc"


def typed(page: str) -> list[Typed]:
    """Return all that a page types, in its order."""
    sessions = console_sessions((REPOSITORY / page).read_text(encoding="utf-8"))
    return [line for session in sessions for line in session]


def parts(page: str) -> list[list[Typed]]:
    """Return what a page types to each scheduler: the start of its executor, its own start, and what follows."""
    found: list[list[Typed]] = []
    executor: Typed | None = None
    for line in typed(page):
        if line.command.startswith(START_EXECUTOR):
            executor = line
        elif line.command.startswith(START_SCHEDULER):
            assert executor is not None, f"{page} starts a scheduler before an executor"
            found.append([executor, line])
        else:
            assert found, f"{page} types {line.command!r} before it starts a scheduler"
            found[-1].append(line)
    return found


def settings(config_class: type[ServiceConfig], command: str, prefix: str) -> dict[str, Any]:
    """Return the settings that a command gives a service."""
    config = load_config(config_class, shlex.split(command.removeprefix(prefix)), {})
    return {name: getattr(config, name) for name in config.model_fields_set}


@asynccontextmanager
async def services(executor: Typed, scheduler: Typed, directory: Path) -> AsyncIterator[tuple[Stack, Shell]]:
    """Run what two commands of the page start, and a shell beside them."""
    worker = FakeWorker(**settings(FakeConfig, executor.command, START_EXECUTOR))
    chosen = settings(SchedulerConfig, scheduler.command, START_SCHEDULER)
    paths = {name: directory / value for name, value in chosen.items() if isinstance(value, Path)}
    async with running_stack(worker, **{**chosen, **paths}) as stack:
        addresses = {
            "127.0.0.1:50051": stack.address,
            "127.0.0.1:50052": stack.service.other_addresses["admin"],
            "127.0.0.1:50061": stack.executor.address,
        }
        await stack.executor.server.set_ready(True)
        shell = Shell(directory, addresses)
        yield stack, shell
    await shell.close()


async def settled(stack: Stack) -> None:
    """Return once as many of the live requests as fit have their first token."""
    core = stack.driver.planner
    assert core is not None
    requests, max_num_seqs = stack.engine.requests, core.limits.max_num_seqs

    def is_settled() -> bool:
        num_running = sum(request.times.first_token_at_s is not None for request in requests.values())
        return num_running == min(len(requests), max_num_seqs)

    await until(is_settled)


async def check(stack: Stack, shell: Shell, line: Typed) -> None:
    """Type a command of the page and compare what it prints, if the page has that."""
    num_arrivals = stack.engine._num_arrivals
    output = await shell.type(line.command)
    if line.command.endswith("&"):
        await until(lambda: stack.engine._num_arrivals > num_arrivals)  # others may end meanwhile
    await settled(stack)
    assert not line.output or is_as_printed(line.output, output, join_deltas=True), f"$ {line.command}\n{output}"


def make_certificates_and_tokens(directory: Path) -> None:
    """Write what the bash blocks of docs/security.md write, as far as the sessions use it."""
    authority = Authority()
    authority.write(directory / "tls" / "ca.crt")
    pair = authority.issue("localhost", "127.0.0.1")
    (directory / "tls" / "scheduler.crt").write_bytes(pair.cert)
    (directory / "tls" / "scheduler.key").write_bytes(pair.key)
    (directory / "tokens").write_text(f"blue {'b' * 64}\n* {'c' * 64}\n", encoding="utf-8")


@pytest.mark.parametrize(("page", "part"), [(page, part) for page in PAGES for part in range(len(parts(page)))])
async def test_the_sessions_of_a_page_work_as_printed(page: str, part: int, tmp_path: Path) -> None:
    make_certificates_and_tokens(tmp_path)
    executor, scheduler, *lines = parts(page)[part]
    async with services(executor, scheduler, tmp_path) as (stack, shell):
        for line in lines:
            await check(stack, shell, line)


def test_the_cookbook_says_what_each_command_prints() -> None:
    silent = [line.command for line in typed("docs/grpcurl.md") if not line.output]
    assert [command for command in silent if command.startswith("grpcurl ") and not command.endswith("&")] == []
