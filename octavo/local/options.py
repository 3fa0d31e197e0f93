"""What the services on this machine are started with, checked before anything is started.

octavo/local/service_settings.py knows the settings; octavo/local/services.py starts the services.
"""

import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from octavo.errors import LocalServiceError
from octavo.models.names import resolve_model
from octavo.models.store import DEMO_MODELS
from octavo.values.wording import how_to_install


class LocalOptions:
    """What the services are started with: checked, before anything is started.

    Args:
        model: Name of a demo model, a Hugging Face directory, a GGUF file, or a hub id.
        settings: Settings of the services by name (octavo/local/service_settings.py); a text may stand for any value.
        executor: Settings of the executor only.
        scheduler: Settings of the scheduler only. Both listen on free ports of this machine unless told otherwise.
        num_executors: How many there are; each loads the weights and has a KV cache of its own.
        is_private: Whether only this process calls the services, in plaintext and without a token.
        spell: How the caller's user calls a setting, for the sentence about a wrong value.

    Attributes:
        executor: What the executor will run with.
        scheduler: What the scheduler will run with.
        num_executors: As above.
        num_shared_cores: That several executors share; None: each has what it was told to.

    Raises:
        SettingsError: a setting is wrong.
        LocalServiceError: packages of the services are missing, there is no such model, or two things do not go
            together.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        settings: Mapping[str, object] = MappingProxyType({}),
        *,
        executor: Mapping[str, object] = MappingProxyType({}),
        scheduler: Mapping[str, object] = MappingProxyType({}),
        num_executors: int = 1,
        is_private: bool = False,
        spell: Callable[[str], str] = str,
    ) -> None:
        try:
            from octavo.local.service_settings import check_settings, settings_by_service
            from octavo_shared.process.config import Setting
        except ModuleNotFoundError as error:
            raise _missing_package(error) from error
        given = settings_by_service(settings, spell=spell, executor=executor, scheduler=scheduler)
        free_port = Setting("127.0.0.1:0", "listen")
        fixed = {"exit_on_stdin_close": Setting(True, "exit_on_stdin_close")}
        of_executor = {"listen": free_port, **fixed, **given["executor"]}
        of_scheduler = {"listen": free_port, "admin_listen": free_port, **fixed, **given["scheduler"]}
        of_executor["model"] = Setting(os.fspath(model), "model")
        self.num_executors = num_executors
        self.num_shared_cores: int | None = None
        self.executor, self.scheduler = check_settings(of_executor, of_scheduler, os.environ)
        _check_model(self.executor.config.model)
        self._name_scheduler()
        self._check_together(is_private=is_private)
        if num_executors > 1:
            self._share_machine()

    def prepare_model(self, *, progress: bool = True) -> str:
        """Download the model if it is not on this machine; return what it needs of its memory.

        Args:
            progress: Whether to show on stderr how that goes.

        Returns:
            Such as "needs 3.1 GB, 21 GB free"; empty: that is not known.

        Raises:
            LocalServiceError: it cannot be had, or memory lacks for it.
        """
        config = self.executor.config
        model = resolve_model(config.model, progress=progress)
        config = config.model_copy(update={"model": model})
        self.executor = replace(self.executor, config=config)
        return "" if config.device != "cpu" else self._memory_needs()

    def _memory_needs(self) -> str:
        """Return what the model needs of this machine's memory.

        Raises: LocalServiceError: memory lacks, or a GGUF file is none that can be served.
        """
        from executor_svc.checkpoint.model_location import find_local_model
        from executor_svc.models.memory_needs import OutOfMemoryError, check_memory
        from octavo_shared.errors import ModelLoadError

        config = self.executor.config
        path: Path | None = None
        try:
            path = find_local_model(config.model)
            return "" if path is None else check_memory(path, config, self.num_executors)
        except ModelLoadError as error:
            if path is not None and path.is_dir() and not isinstance(error, OutOfMemoryError):
                return ""  # of a directory the executor says more
            raise LocalServiceError(str(error)) from error

    @property
    def lacks_tokenizer(self) -> bool:
        """Whether the model is a directory without a tokenizer, and no other is named: served for token ids only."""
        directory = Path(self.executor.config.model)
        has_one = self.scheduler.config.tokenizer is not None or (directory / "tokenizer.json").is_file()
        return not has_one and (directory / "config.json").is_file()

    def executor_command(self) -> list[str]:
        """Return the command that starts an executor."""
        return [*_service_command("executor_svc"), *self.executor.arguments()]

    def executor_environment(self, index: int) -> dict[str, str]:
        """Return the variables of one of several executors, counted from 0: of GPUs, each has its own."""
        config = self.executor.config
        if self.num_executors == 1 or config.device != "cuda":
            return {}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = [str(gpu) for gpu in range(self.num_executors * config.tp)] if visible is None else visible.split(",")
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[index * config.tp : (index + 1) * config.tp])}

    def scheduler_command(self) -> list[str]:
        """Return the command that starts the scheduler, but for the executors' addresses."""
        return [*_service_command("scheduler_svc"), *self.scheduler.arguments()]

    def _check_together(self, *, is_private: bool) -> None:
        """Refuse what each service by itself would take, and wait with, or fail at, for ever."""
        scheduler = self.scheduler.config
        if not is_private:
            return
        for name in ("tls_cert", "tokens_file"):
            if getattr(scheduler, name) is not None:
                raise LocalServiceError(
                    f"scheduler.{name} is set, but this process calls the scheduler in plaintext and without a token; "
                    "remove it"
                )

    def _name_scheduler(self) -> None:
        """Give the scheduler an identity where it would make a new one at each start.

        When it is started again, it takes its executors over at once.
        """
        config = self.scheduler.config
        if config.scheduler_id is None and config.listen.endswith(":0"):
            named = config.model_copy(update={"scheduler_id": f"{socket.gethostname()}/{secrets.token_hex(8)}"})
            self.scheduler = replace(self.scheduler, config=named, given=(*self.scheduler.given, "scheduler_id"))

    def _share_machine(self) -> None:
        """Let several executors share the cores, and refuse a port that all of them would have."""
        config = self.executor.config
        for name in type(config).model_fields:
            address = getattr(config, name)
            if name.endswith("listen") and address is not None and not address.endswith(":0"):
                raise LocalServiceError(
                    f"executor.{name} is {address}, but {self.num_executors} executors cannot share a port; use port "
                    "0, so that each takes a free one"
                )
        if config.num_threads is None and config.device == "cpu":
            from executor_svc.device.cpus import read_cpus

            cpus = read_cpus()
            self.num_shared_cores = cpus.num_threads()
            num_threads = cpus.num_threads(self.num_executors * config.tp)
            shared = config.model_copy(update={"num_threads": num_threads})
            self.executor = replace(self.executor, config=shared, given=(*self.executor.given, "num_threads"))


def _check_model(model: str) -> None:
    """Refuse what neither is a demo model nor looks like a model that an executor could load."""
    if not model:
        raise LocalServiceError("the model name is empty; give a demo model, a directory, or a hub id")
    if model in {demo_model.name for demo_model in DEMO_MODELS}:
        return
    try:
        from executor_svc.checkpoint.model_location import check_model_name
        from octavo_shared.errors import ModelLoadError

        check_model_name(model)
    except ModuleNotFoundError as error:
        raise _missing_package(error) from error
    except ModelLoadError as error:
        raise LocalServiceError(str(error)) from error


def _missing_package(error: ModuleNotFoundError) -> LocalServiceError:
    package = (error.name or "").partition(".")[0]
    return LocalServiceError(f"the services need the package {package}: {how_to_install('scheduler', 'executor')}")


def _service_command(module: str) -> list[str]:
    # -P: a folder in the user's working directory must not shadow a package of ours.
    return [sys.executable, "-P", "-m", module]
