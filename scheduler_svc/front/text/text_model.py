"""The served model as the front sees it: the limits of a request, and the tokenizer."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo_shared.errors import InvalidFieldError
from octavo_shared.process.events import Event
from octavo_shared.step_wire.executor_info import ExecutorInfo, TokenizerFile
from scheduler_svc.front.text.json_text import shown_json
from scheduler_svc.front.text.tokenizer import Tokenizer
from scheduler_svc.request.served_model import Reproducibility, ServedModel

log = logging.getLogger(__name__)

TOKENIZER_FIX = "start the scheduler with --tokenizer DIRECTORY, a directory with a tokenizer.json"


class UnknownModelError(InvalidFieldError):
    """A request names a model that is not served.

    Args:
        asked: The name in the request; "": it names none, and there are several.
    """

    def __init__(self, asked: str, names: Sequence[str]) -> None:
        rule = " or ".join(map(shown_json, names)) + (", the served model" if len(names) == 1 else "")
        super().__init__("model", shown_json(asked), rule)


@dataclass(frozen=True, slots=True)
class TextModel:
    """The served model with its tokenizer."""

    served: ServedModel
    tokenizer: Tokenizer

    @property
    def info(self) -> ExecutorInfo:
        """The model, as described by the executor with the longest sequences."""
        return self.served.info

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.served.name

    @property
    def max_model_len(self) -> int:
        """The longest sequence that is served, in tokens."""
        return self.served.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """The most sequences that run at once on one executor."""
        return self.served.max_num_seqs

    @property
    def reproducibility(self) -> Reproducibility:
        """Whether equal requests get equal outputs."""
        return self.served.reproducibility


def check_model(asked: str, model: TextModel, *, takes_adapters: bool = True) -> None:
    """Raise UnknownModelError if a request names neither this model nor, where that may be, one of its adapters."""
    names = [model.name, *model.served.adapters] if takes_adapters else [model.name]
    if asked not in names:
        raise UnknownModelError(asked, names)


class ModelTokenizer:
    """The tokenizer of the served model: from the operator's own directory, else from the executor's files.

    Args:
        directory: The operator's; None: the executor's files are used.

    Raises: OctavoServiceError: the directory is broken.
    """

    def __init__(self, directory: Path | None = None, *, escapes_special_tokens: bool = False) -> None:
        self._escapes = escapes_special_tokens
        self._own = Tokenizer.from_directory(directory, escapes_special_tokens=self._escapes) if directory else None
        self._current = self._own

    async def load(self, info: ExecutorInfo, fetch: Callable[[], Awaitable[Sequence[TokenizerFile]]]) -> None:
        """Load the tokenizer of the model that is about to be served: the fleet has another first executor.

        Raises: TokenizerFileError: a file is missing or broken. What `fetch` raises.
        """
        tokenizer = self._own
        if tokenizer is None:
            files = tuple(await fetch())
            tokenizer = self._current
            if tokenizer is None or tokenizer.files != files:
                tokenizer = await asyncio.to_thread(Tokenizer, files, escapes_special_tokens=self._escapes)
        if tokenizer.is_absent:
            log.warning(Event("no_tokenizer", model=info.model_id, serves="token ids only", fix=TOKENIZER_FIX))
        elif tokenizer.largest_id >= info.vocab_size:  # texts with unknown tokens are refused one by one
            largest = tokenizer.largest_id
            token = tokenizer.token_of(largest)
            log.warning(Event("tokenizer_larger_than_model", token=token, token_id=largest, vocab_size=info.vocab_size))
        self._current = tokenizer

    def model(self, served: ServedModel) -> TextModel:
        """Return the served model with its tokenizer."""
        assert self._current is not None, "a model is served once its tokenizer is loaded"
        return TextModel(served, self._current)
