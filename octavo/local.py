"""The services on this machine: an executor and a scheduler as child processes, and maybe a gateway.

`octavo up`, `octavo demo` and `octavo.LLM` start here. One child is octavo/child_process.py.
"""

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from octavo.child_process import ChildProcess
from octavo.client import Client
from octavo.errors import LocalServiceError
from octavo.gateway import check_gateway, gateway_command

_Result = TypeVar("_Result")

# A large model may have to be fetched and loaded first; a child that fails ends the wait at once.
_START_TIMEOUT_S = 1800.0

# A little more than the services give the streams in flight.
_STOP_GRACE_S = 25.0
_FAILURE_GRACE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """What the services are started with; None leaves a service its own default.

    Attributes:
        model: Hugging Face directory or hub id, for the executor.
        listen: HOST:PORT of the scheduler; port 0: the system chooses.
        admin_listen: The same for its operators.
        dtype: Number format of weights and cache, such as "float32".
        quantization: "none" or "int8".
        attention_backend: "auto", "triton", "flash_attn", "xformers" or "torch".
        device: "cpu" or "cuda".
        tp: Ranks that share the model, each a process.
        kv_cache_gib: Size of the KV cache, in GiB.
        host_cache_gib: Size of the pool of host memory that preempted sequences are swapped to, in GiB; 0: none.
        max_model_len: Longest sequence, prompt and output together, in tokens.
        max_num_batched_tokens: Token budget of a step.
        max_num_seqs: Most sequences in the batch.
        max_waiting_requests: Most requests that wait; more are refused.
        openai: HOST:PORT of OpenAI's API, by a gateway; port 0: the system chooses; None: there is none.
    """

    model: str
    listen: str = "127.0.0.1:0"
    admin_listen: str = "127.0.0.1:0"
    dtype: str | None = None
    quantization: str | None = None
    attention_backend: str | None = None
    device: str | None = None
    tp: int | None = None
    kv_cache_gib: float | None = None
    host_cache_gib: float | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_waiting_requests: int | None = None
    openai: str | None = None

    def __post_init__(self) -> None:
        """Refuse a directory that the executor could load and the scheduler would wait on for ever.

        Refuse as well what a gateway would only find out when the model is loaded.

        Raises:
            LocalServiceError: it has no tokenizer.json. Other models are the executor's to judge. Or `openai` is
                set, and the gateway is not installed or cannot listen there.
        """
        if self.openai is not None:
            check_gateway(self.openai)
        tokenizer = Path(self.model, "tokenizer.json")
        if tokenizer.parent.is_dir() and not tokenizer.is_file():
            raise LocalServiceError(f"{tokenizer} is missing; the scheduler needs it")

    def executor_command(self) -> list[str]:
        """Return the command that starts the executor; its port is chosen by the system."""
        flags = {
            "dtype": self.dtype,
            "quantization": self.quantization,
            "attention-backend": self.attention_backend,
            "device": self.device,
            "tp": self.tp,
            "kv-cache-gib": self.kv_cache_gib,
            "host-cache-gib": self.host_cache_gib,
            "max-model-len": self.max_model_len,
            # The limits of a step are the executor's to say; a scheduler follows what it is told.
            "max-num-batched-tokens": self.max_num_batched_tokens,
            "max-num-seqs": self.max_num_seqs,
        }
        return [*_service_command("executor_svc", "127.0.0.1:0"), "--model", self.model, *_to_arguments(flags)]

    def scheduler_command(self) -> list[str]:
        """Return the command that starts the scheduler, but for the executor's address."""
        flags = {"admin-listen": self.admin_listen, "max-waiting-requests": self.max_waiting_requests}
        command = [*_service_command("scheduler_svc", self.listen), *_to_arguments(flags)]
        return command if self.openai is None else [*command, "--vllm-engine"]

    def gateway_command(self) -> list[str] | None:
        """Return the command that starts the gateway, but for the scheduler's address; None: there is none."""
        return None if self.openai is None else gateway_command(self.openai)


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
        async with Client(self._address) as client:
            await self.run_beside(client.wait_until_ready())
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


def _service_command(module: str, listen: str) -> list[str]:
    # -P: a folder in the user's working directory must not shadow a package of ours.
    return [sys.executable, "-P", "-m", module, "--listen", listen, "--exit-on-stdin-close"]


def _to_arguments(flags: Mapping[str, object]) -> list[str]:
    return [argument for flag, value in flags.items() if value is not None for argument in (f"--{flag}", str(value))]
