"""The services on this machine: an executor and a scheduler as child processes, and maybe a gateway.

`octavo up`, `octavo demo` and `octavo.LLM` start here. One child is octavo/child_process.py.
"""

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Self, TypeVar

from octavo.child_process import ChildProcess
from octavo.errors import LocalServiceError
from octavo.gateway import check_gateway, gateway_command
from octavo.models.names import resolve_model

_Result = TypeVar("_Result")

# A large model may have to be fetched and loaded first; a child that fails ends the wait at once.
_START_TIMEOUT_S = 1800.0

# A little more than the services give the streams in flight.
_STOP_GRACE_S = 25.0
_FAILURE_GRACE_S = 1.0


class LocalOptions:
    """What the services are started with: checked, before anything is started.

    Args:
        model: Name of a demo model, a Hugging Face directory, or a hub id.
        settings: Settings of the services by name, as octavo/service_settings.py says; a text may stand for any value.
        executor: Settings of the executor only.
        scheduler: Settings of the scheduler only. Both listen on free ports of this machine unless told otherwise.
        openai: HOST:PORT of OpenAI's API, by a gateway; port 0: the system chooses; None: there is none.
        is_private: Whether only this process calls the services, in plaintext and without a token.
        spell: How the caller's user calls a setting, for the sentence about a wrong value.

    Attributes:
        executor: What the executor will run with.
        scheduler: What the scheduler will run with.
        openai: As above.

    Raises:
        SettingsError: a setting is wrong.
        LocalServiceError: packages of the services are missing, the gateway cannot listen there, or two things do not
            go together.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        settings: Mapping[str, object] = MappingProxyType({}),
        *,
        executor: Mapping[str, object] = MappingProxyType({}),
        scheduler: Mapping[str, object] = MappingProxyType({}),
        openai: str | None = None,
        is_private: bool = False,
        spell: Callable[[str], str] = str,
    ) -> None:
        try:
            from octavo.service_settings import check_settings, settings_by_service
            from shared.config import Setting
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            raise LocalServiceError(
                f"the services need the package {package}: pip install 'octavo[scheduler,executor]'"
            ) from error
        given = settings_by_service(settings, spell=spell, executor=executor, scheduler=scheduler)
        free_port = Setting("127.0.0.1:0", "listen")
        fixed = {"exit_on_stdin_close": Setting(True, "exit_on_stdin_close")}
        of_executor = {"listen": free_port, **fixed, **given["executor"]}
        of_scheduler = {"listen": free_port, "admin_listen": free_port, **fixed, **given["scheduler"]}
        if openai is not None:
            of_scheduler["vllm_engine"] = Setting(True, "vllm_engine")
        of_executor["model"] = Setting(os.fspath(model), "model")
        self.openai = openai
        self.executor, self.scheduler = check_settings(of_executor, of_scheduler, os.environ)
        self._check_together(is_private=is_private)

    def prepare_model(self, *, progress: bool = True) -> None:
        """Make the demo model if that is what is served and it is missing, which takes minutes.

        Args:
            progress: Whether to show on stderr how that goes.

        Raises:
            LocalServiceError: it cannot be made, or OpenAI's API is asked for and a directory has no tokenizer.json.
                Other models are the executor's to judge.
        """
        config = self.executor.config
        if not config.model:
            raise LocalServiceError("the name of the model is empty; name a demo model, a directory, or a hub id")
        model = resolve_model(config.model, progress=progress)
        self.executor = replace(self.executor, config=config.model_copy(update={"model": model}))
        if self.openai is not None and self.lacks_tokenizer:
            raise LocalServiceError(f"{Path(model, 'tokenizer.json')} is missing; OpenAI's API needs it")

    @property
    def lacks_tokenizer(self) -> bool:
        """Whether the model is a directory without a tokenizer, and no other is named: served for token ids only."""
        directory = Path(self.executor.config.model)
        has_one = self.scheduler.config.tokenizer is not None or (directory / "tokenizer.json").is_file()
        return not has_one and (directory / "config.json").is_file()

    def executor_command(self) -> list[str]:
        """Return the command that starts the executor."""
        return [*_service_command("executor_svc"), *self.executor.arguments()]

    def scheduler_command(self) -> list[str]:
        """Return the command that starts the scheduler, but for the executor's address."""
        return [*_service_command("scheduler_svc"), *self.scheduler.arguments()]

    def gateway_command(self) -> list[str] | None:
        """Return the command that starts the gateway, but for the scheduler's address; None: there is none."""
        return None if self.openai is None else gateway_command(self.openai)

    def _check_together(self, *, is_private: bool) -> None:
        """Refuse what each service by itself would take, and wait with, or fail at, for ever."""
        scheduler = self.scheduler.config
        if self.openai is not None:
            check_gateway(self.openai)
        if not is_private and self.openai is None:
            return
        for name in ("tls_cert", "tokens_file"):
            if getattr(scheduler, name) is not None:
                who = "the gateway" if self.openai is not None else "what calls the scheduler here"
                raise LocalServiceError(
                    f"scheduler.{name} is set, but {who} speaks plaintext with it and has no token; leave it out"
                )


class LocalServices:
    """An executor, a scheduler and maybe a gateway, as long as this object lives: `async with LocalServices(...)`.

    Nothing survives it: leaving the block stops them, and they leave by themselves when this process
    is gone. Their output goes to files in a temporary folder, which stays only when one of them fails.

    Args:
        executor_command: Program and arguments.
        scheduler_command: Program and arguments; `--executor HOST:PORT` is appended.
        gateway_command: Program and arguments; `--scheduler HOST:PORT` is appended; None: there is no gateway.
        on_status: Called with what is being waited for, in a few words.
        is_verbose: Whether their output goes to this process' stderr instead of files.
    """

    def __init__(
        self,
        executor_command: Sequence[str],
        scheduler_command: Sequence[str],
        gateway_command: Sequence[str] | None = None,
        *,
        on_status: Callable[[str], None] = lambda _: None,
        is_verbose: bool = False,
    ) -> None:
        self._executor_command = executor_command
        self._scheduler_command = scheduler_command
        self._gateway_command = gateway_command
        self._on_status = on_status
        self._is_verbose = is_verbose
        self._children: list[ChildProcess] = []
        self._log_folder: Path | None = None
        self._are_logs_wanted = False
        self._is_ready = False
        self._address: str | None = None
        self._admin_address: str | None = None
        self._openai_address: str | None = None

    @classmethod
    def from_options(
        cls, options: LocalOptions, *, on_status: Callable[[str], None] = lambda _: None, is_verbose: bool = False
    ) -> Self:
        """Make the services that `options` describe."""
        commands = options.executor_command(), options.scheduler_command(), options.gateway_command()
        return cls(*commands, on_status=on_status, is_verbose=is_verbose)

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
    def openai_address(self) -> str | None:
        """HOST:PORT of OpenAI's API; None: there is no gateway."""
        return self._openai_address

    @property
    def kernels(self) -> str:
        """What computes the model, in a few words; "": the executor did not say."""
        return next((child.kernels for child in self._children if child.name == "executor"), "")

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
            self._log_folder = Path(tempfile.mkdtemp(prefix="octavo-"))
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._start_all()
        except TimeoutError:
            self._are_logs_wanted = True
            where = f" [logs: {self._log_folder}]" if self._log_folder else "; their messages are above"
            raise LocalServiceError(f"the services were not ready within {_START_TIMEOUT_S:g} s{where}") from None
        except LocalServiceError as error:
            # Logs that nobody is told of would only fill the temporary folder.
            self._are_logs_wanted = str(self._log_folder) in str(error)
            raise
        finally:
            if not self._is_ready:
                await self.stop()

    async def wait_for_failure(self) -> LocalServiceError:
        """Return the error as soon as one of them has ended by itself; the logs stay."""
        waits = [asyncio.create_task(child.wait_for_failure()) for child in self._children]
        try:
            ended, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._are_logs_wanted = True
        return ended.pop().result()

    async def run_beside(self, work: Coroutine[None, None, _Result]) -> _Result:
        """Return the result of `work`, which needs the services.

        Raises:
            LocalServiceError: a service that ran at the start ended before the work was done.
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

    async def stop(self) -> None:
        """Stop the scheduler, and with it all streams, then the gateway, then the executor; stopping twice is fine.

        They get time for the streams in flight, unless one of them is gone already: none could end then.
        """
        grace_s = _FAILURE_GRACE_S if any(child.has_ended for child in self._children) else _STOP_GRACE_S
        self._children.sort(key=lambda child: child.name == "scheduler")
        while self._children:
            await self._children.pop().stop(grace_s)
        folder, self._log_folder = self._log_folder, None
        if folder is not None and not self._are_logs_wanted:
            shutil.rmtree(folder, ignore_errors=True)

    async def _start_all(self) -> None:
        self._on_status("starting the executor")
        executor = await self._start_child("executor", self._executor_command)
        self._on_status("starting the scheduler")
        scheduler_command = [*self._scheduler_command, "--executor", executor.address]
        scheduler = await self.run_beside(self._start_child("scheduler", scheduler_command))
        self._address, self._admin_address = scheduler.address, scheduler.addresses.get("admin")
        self._on_status("loading the model")
        await self.run_beside(scheduler.wait_until_serving())
        if self._gateway_command is not None:
            self._on_status("starting the gateway")
            gateway = await self.run_beside(
                self._start_child("gateway", [*self._gateway_command, "--scheduler", self._address])
            )
            self._openai_address = gateway.address
        self._is_ready = True

    async def _start_child(self, name: str, command: Sequence[str]) -> ChildProcess:
        log_path = None if self._log_folder is None else self._log_folder / f"{name}.log"
        child = ChildProcess(name, command, log_path=log_path)
        self._children.append(child)
        await child.start()
        return child


def _service_command(module: str) -> list[str]:
    # -P: a folder in the user's working directory must not shadow a package of ours.
    return [sys.executable, "-P", "-m", module]
