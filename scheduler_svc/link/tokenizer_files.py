"""The tokenizer's files of the served model, kept by the engine for its fronts."""

from collections.abc import Awaitable, Callable, Sequence

from octavo_shared.errors import UnavailableError
from octavo_shared.step_wire.executor_info import ExecutorInfo, TokenizerFile
from scheduler_svc.executors.fleet_model import LoadTokenizer


class TokenizerFiles:
    """Keeps the files that the first executor of the fleet has, and reads none of them.

    Args:
        load: Reads them for a front in the engine's own process; None: there is none.
    """

    def __init__(self, load: LoadTokenizer | None = None) -> None:
        self._load = load
        self._files: tuple[TokenizerFile, ...] | None = None

    async def load(self, info: ExecutorInfo, fetch: Callable[[], Awaitable[Sequence[TokenizerFile]]]) -> None:
        """Another executor process is the first one of the fleet: its model is about to be served."""
        files = tuple(await fetch())
        if self._load is not None:
            await self._load(info, _given(files))
        self._files = files

    def files(self) -> tuple[TokenizerFile, ...]:
        """Return them. Raises UnavailableError: no executor has been attached yet."""
        if self._files is None:
            raise UnavailableError("no executor has been attached yet; retry in a moment")
        return self._files


def _given(files: tuple[TokenizerFile, ...]) -> Callable[[], Awaitable[tuple[TokenizerFile, ...]]]:
    async def fetch() -> tuple[TokenizerFile, ...]:
        return files

    return fetch
