"""The tokenizer's files of the served model, kept by the core for its fronts."""

from collections.abc import Awaitable, Callable, Sequence

from shared.errors import UnavailableError
from shared.executor_info import ExecutorInfo, TokenizerFile


class TokenizerFiles:
    """Keeps the files that the first executor of the fleet has, and reads none of them."""

    def __init__(self) -> None:
        self._files: tuple[TokenizerFile, ...] | None = None

    async def load(self, info: ExecutorInfo, fetch: Callable[[], Awaitable[Sequence[TokenizerFile]]]) -> None:
        """Another executor process is the first one of the fleet: its model is about to be served."""
        self._files = tuple(await fetch())

    def files(self) -> tuple[TokenizerFile, ...]:
        """Return them. Raises UnavailableError: no executor has been attached yet."""
        if self._files is None:
            raise UnavailableError("no executor has been attached yet; retry in a moment")
        return self._files
