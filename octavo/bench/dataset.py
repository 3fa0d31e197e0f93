"""Prompts from a file: a JSON object a line, `{"prompt": "...", "max_tokens": 64}`."""

import json
from dataclasses import dataclass
from pathlib import Path

from octavo.bench.errors import BenchError


@dataclass(frozen=True, slots=True)
class DatasetEntry:
    """A prompt, and the output tokens to ask for; None: those of --output-len."""

    prompt: str
    max_tokens: int | None


def load_dataset(path: Path) -> list[DatasetEntry]:
    """Return the entries of a file, in its order; other fields and empty lines are passed over.

    Raises:
        BenchError: the file cannot be read, or a line is no entry; with its number.
    """
    try:
        # Not splitlines(): JSON may have other line separators, such as U+2028, inside of a text.
        lines = path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BenchError(f"the dataset {path} cannot be read: {reason}") from error
    entries = [_to_entry(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not entries:
        raise BenchError(f"the dataset {path} has no prompt")
    return entries


def _to_entry(line: str, place: str) -> DatasetEntry:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise BenchError(f"{place} is not JSON: {error}") from error
    prompt = fields.get("prompt") if isinstance(fields, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise BenchError(f'{place}: no object with a text as "prompt", such as {{"prompt": "Why?"}}')
    max_tokens = fields.get("max_tokens")
    if max_tokens is not None and (isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1):
        raise BenchError(f'{place}: "max_tokens" is {max_tokens!r}; it must be a whole number, at least 1')
    return DatasetEntry(prompt, max_tokens)
