"""The services on this machine: executors and a scheduler as child processes.

`octavo up`, `octavo demo` and `octavo.LLM` start here. One child is `child_process.py`; `restarts.py` starts it again;
`options.py` says what they are started with.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Self, TypeVar

from octavo.errors import LocalServiceError
from octavo.local.child_process import ChildProcess
from octavo.local.options import LocalOptions
from octavo.local.restarts import Restarts
from octavo.values.wording import temporary_folder_trouble

_Result = TypeVar("_Result")

# A large model may have to be fetched and loaded first; a child that fails ends the wait at once.
_START_TIMEOUT_S = 1800.0

# A little more than the services give the streams in flight.
_STOP_GRACE_S = 25.0
_FAILURE_GRACE_S = 1.0


class LocalServices:
    """Executors and a scheduler, as long as this object lives: `async with LocalServices(...)`.

    Nothing survives it: leaving the block stops them, and they leave by themselves when this process
    is gone. Their output goes to files in a temporary folder, which stays only when one of them fails.

    Args:
        executor_command: Program and arguments.
        scheduler_command: Program and arguments; `--executor HOST:PORT,...` is appended.
        executor_environments: Variables of each executor; there are as many executors as there are of these.
        on_status: Called with what is being waited for, in a few words.
        on_restart: Called with a sentence when a service that has served ends, and when it is back. None: no service is
            started again, and the first end is a failure.
        on_notice: Called with a sentence that one of them has for people, such as that steps are slow.
        is_verbose: Whether their output goes to this process' stderr instead of files.
    """

    def __init__(
        self,
        executor_command: Sequence[str],
        scheduler_command: Sequence[str],
        *,
        executor_environments: Sequence[Mapping[str, str]] = ({},),
        on_status: Callable[[str], None] = lambda _: None,
        on_restart: Callable[[str], None] | None = None,
        on_notice: Callable[[str], None] = lambda _: None,
        is_verbose: bool = False,
    ) -> None:
        self._executor_command = executor_command
        self._executor_environments = executor_environments
        self._scheduler_command = scheduler_command
        self._on_status = on_status
        self._on_restart = on_restart
        self._on_notice = on_notice
        self._is_verbose = is_verbose
        self._children: list[ChildProcess] = []
        self._log_folder: Path | None = None
        self._are_logs_wanted = False
        self._is_ready = False
        self._restarts: asyncio.Task[LocalServiceError] | None = None
        self._address: str | None = None
        self._admin_address: str | None = None
        self._page_address: str | None = None
        self._openai_address: str | None = None

    @classmethod
    def from_options(
        cls,
        options: LocalOptions,
        *,
        on_status: Callable[[str], None] = lambda _: None,
        on_restart: Callable[[str], None] | None = None,
        on_notice: Callable[[str], None] = lambda _: None,
        is_verbose: bool = False,
    ) -> Self:
        """Make the services that `options` describe."""
        return cls(
            options.executor_command(),
            options.scheduler_command(),
            executor_environments=[options.executor_environment(index) for index in range(options.num_executors)],
            on_status=on_status,
            on_restart=on_restart,
            on_notice=on_notice,
            is_verbose=is_verbose,
        )

    @property
    def address(self) -> str:
        """HOST:PORT of the scheduler."""
        assert self._address is not None, "start() comes first"
        return self._address

    @property
    def admin_address(self) -> str:
        """HOST:PORT where the scheduler serves operators."""
        assert self._admin_address is not None, "start() comes first"
        return self._admin_address

    @property
    def page_address(self) -> str | None:
        """HOST:PORT of the live page; None: it is not served."""
        return self._page_address

    @property
    def openai_address(self) -> str | None:
        """HOST:PORT of OpenAI's API; None: it is not served."""
        return self._openai_address

    @property
    def kernels(self) -> str:
        """What computes the model, in a few words; "": the executor did not say."""
        return next((child.kernels for child in self._executors()), "")

    @property
    def executor_pids(self) -> dict[str, int]:
        """The process of each executor, by its HOST:PORT."""
        return {child.address: child.pid for child in self._executors()}

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start all and wait until they take requests; on any failure stop what runs.

        Raises:
            LocalServiceError: one of them ended, with its last words; or they were not ready in time.
        """
        if not self._is_verbose:
            try:
                self._log_folder = Path(tempfile.mkdtemp(prefix="octavo-"))
            except OSError as error:
                raise LocalServiceError(temporary_folder_trouble(error)) from error
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._start_all()
        except TimeoutError:
            self._are_logs_wanted = True
            where = f" [logs: {self._log_folder}]" if self._log_folder else "; their messages are above"
            raise LocalServiceError(f"the services were not ready within {_START_TIMEOUT_S:g} s{where}") from None
        except LocalServiceError as error:
            # Logs that no message names would only fill the temporary folder.
            self._are_logs_wanted = str(self._log_folder) in str(error)
            raise
        finally:
            if not self._is_ready:
                await self.stop()

    async def wait_for_failure(self) -> LocalServiceError:
        """Return the error as soon as one of them has ended for good; the logs stay."""
        if self._restarts is not None:
            return await asyncio.shield(self._restarts)
        waits = {asyncio.create_task(child.wait_for_end()): child for child in self._children if child.has_started}
        try:
            ended, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._are_logs_wanted = True
        end = ended.pop()
        return waits[end].failure(end.result())

    async def run_beside(self, work: Coroutine[None, None, _Result]) -> _Result:
        """Return the result of `work`, which needs the services.

        Raises:
            LocalServiceError: a service that ran at the start ended for good before the work was done.
        """
        failure = asyncio.create_task(self.wait_for_failure())
        task = asyncio.create_task(work)
        try:
            await asyncio.wait([failure, task], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise failure.result()
        finally:
            for unfinished in (failure, task):
                unfinished.cancel()
            await asyncio.gather(failure, task, return_exceptions=True)

    async def stop(self, *, discard_logs: bool = False) -> None:
        """Stop the scheduler, and with it all streams, then the executors; stopping twice is fine.

        They get time for the streams in flight, unless one of them is gone already: none could end then.

        Args:
            discard_logs: Whether the logs go even if one of them has ended by itself.
        """
        restarts, self._restarts = self._restarts, None
        if restarts is not None:
            restarts.cancel()
            await asyncio.gather(restarts, return_exceptions=True)
        executors = self._executors()
        others = [child for child in self._children if child not in executors]
        is_broken = any(child.has_ended for child in others) or all(child.has_ended for child in executors)
        grace_s = _FAILURE_GRACE_S if is_broken else _STOP_GRACE_S
        while self._children:
            await self._children.pop().stop(grace_s)
        folder, self._log_folder = self._log_folder, None
        if folder is not None and (discard_logs or not self._are_logs_wanted):
            shutil.rmtree(folder, ignore_errors=True)

    async def _start_all(self) -> None:
        are_several = len(self._executor_environments) > 1
        executors = []
        for number, environment in enumerate(self._executor_environments, start=1):
            self._on_status(f"starting executor {number}" if are_several else "starting the executor")
            executor = self._new_child("executor", self._executor_command, number if are_several else None, environment)
            await self._start_child(executor)
            executors.append(executor)
        self._on_status("starting the scheduler")
        addresses = ",".join(executor.address for executor in executors)
        scheduler = self._new_child("scheduler", [*self._scheduler_command, "--executor", addresses])
        await self._start_child(scheduler)
        self._address, self._admin_address = scheduler.address, scheduler.addresses.get("admin")
        self._page_address = scheduler.addresses.get("page")
        self._openai_address = scheduler.addresses.get("openai")
        self._on_status("loading the model")
        for child in (scheduler, *executors):
            await self.run_beside(child.wait_until_serving())
        self._is_ready = True
        if self._on_restart is not None:
            self._restarts = asyncio.create_task(Restarts(self._children, self._tell_of_restart).run())

    def _new_child(
        self,
        service: str,
        command: Sequence[str],
        number: int | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> ChildProcess:
        name = service if number is None else f"{service}-{number}"
        log_path = None if self._log_folder is None else self._log_folder / f"{name}.log"
        return ChildProcess(
            service, command, log_path=log_path, number=number, environment=environment, on_notice=self._on_notice
        )

    async def _start_child(self, child: ChildProcess) -> None:
        """Start a child, unless a running one ends meanwhile."""
        is_first = not self._children
        self._children.append(child)
        await (child.start() if is_first else self.run_beside(child.start()))

    def _executors(self) -> list[ChildProcess]:
        return [child for child in self._children if child.service == "executor"]

    def _tell_of_restart(self, sentence: str) -> None:
        assert self._on_restart is not None
        self._are_logs_wanted = True  # the sentence names one
        self._on_restart(sentence)
