"""The directory of a Hugging Face model: its JSON files, its tokenizer files.

`executor_svc/checkpoint/model_location.py` finds it. The weights are read by `executor_svc/checkpoint/weights.py`.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from executor_svc.checkpoint.text_tower import combined_architecture, text_config
from octavo.values.sampling_params_table import SAMPLING_PARAMS
from octavo.values.wording import shown
from octavo_shared.errors import ModelLoadError
from octavo_shared.process.events import Event
from octavo_shared.rust_panic import words_of
from octavo_shared.step_wire.executor_info import TokenizerFile
from octavo_shared.step_wire.model_file import read_model_file
from octavo_shared.step_wire.token_rules import MAX_BANNED_TOKENS

# The weights: one file, or shards with an index.
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

TOKENIZER_FILE_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)

# How texts become vectors, what is put in front of them, and to which sizes vectors may be cut.
POOLING_FILE_NAMES = (
    "config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
)

# What generation_config.json may ask of every output, and the value that asks for nothing.
_NOT_DONE = {
    "encoder_no_repeat_ngram_size": 0,
    **dict.fromkeys(("encoder_repetition_penalty", "num_beams"), 1),
    **dict.fromkeys(("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens")),
}

# Objects and lists in each other. No model comes near it, and Python fails at some hundreds.
_MOST_NESTED = 64


class ModelDirectory:
    """A local directory. Files are read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source = path / "config.json"  # what messages name

    def config(self) -> dict[str, object]:
        """Return config.json, of a model with other towers that of its text model.

        Raises: ModelLoadError: it is missing or damaged.
        """
        return text_config(read_json_object(self.path / "config.json"))

    def left_out(self) -> str | None:
        """Return the architecture of which only the text model is served; None: all is."""
        return combined_architecture(read_json_object(self.path / "config.json"))

    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the ids that end a sequence, of generation_config.json, else of config.json; empty if neither has any.

        Raises: ModelLoadError: a file is damaged, or its eos_token_id is no id and no list of ids.
        """
        for path in (self.path / "generation_config.json", self.path / "config.json"):
            if not path.is_file():
                continue
            value = text_config(read_json_object(path)).get("eos_token_id")
            if value is None:
                continue
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(item, int) for item in ids):
                raise ModelLoadError(f"{path} has eos_token_id {shown(repr(value))}; it must be an id or a list of ids")
            return tuple(ids)
        return ()

    def decoder_start_token_ids(self) -> tuple[int, ...]:
        """Return the ids with which the decoder of a model with an encoder begins: its start, and a forced first token.

        Raises: ModelLoadError: a file is damaged, an id is none, or there is no start token.
        """
        values, found = self._of_generation(), list[int]()
        for names in (("decoder_start_token_id", "bos_token_id", "pad_token_id"), ("forced_bos_token_id",)):
            set_ones = [of[name] for name in names for of in values if of.get(name) is not None]
            if set_ones and not isinstance(set_ones[0], int):
                raise ModelLoadError(f"{self.path} has {names[0]} {shown(repr(set_ones[0]))}; it must be one id")
            found += [one for one in set_ones[:1] if isinstance(one, int)]
            if not found:
                raise ModelLoadError(
                    f"{self.path} says nowhere with which token its decoder begins: {names[0]} is unset"
                )
        return tuple(found)

    def banned_token_ids(self) -> tuple[int, ...]:
        """Return the ids that no output of a model with an encoder has: words of one token in `bad_words_ids`.

        Raises: ModelLoadError: a file is damaged, or there are too many.
        """
        ends = self.eos_token_ids()
        banned = {word[0] for word in self._bad_words() if len(word) == 1}.difference(ends)
        if len(banned) > MAX_BANNED_TOKENS:
            raise ModelLoadError(f"{self.path} bans {len(banned)} tokens in bad_words_ids, at most {MAX_BANNED_TOKENS}")
        return tuple(sorted(banned))

    def ignored_defaults(self) -> str:
        """Return what generation_config.json asks of every output, and nobody does here, in words; empty: nothing.

        Raises: ModelLoadError: the file is damaged.
        """
        path = self.path / "generation_config.json"
        values = read_json_object(path) if path.is_file() else {}
        found = [name for name, nothing in _NOT_DONE.items() if values.get(name) not in (None, [], nothing)]
        if any(len(word) > 1 for word in self._bad_words()):
            found.append("bad_words_ids of several tokens")
        return ", ".join(found)

    def _of_generation(self) -> list[dict[str, object]]:
        """Return generation_config.json, and config.json, which has the same fields in older models."""
        paths = [path for name in ("generation_config.json", "config.json") if (path := self.path / name).is_file()]
        return [read_json_object(path) for path in paths]

    def _bad_words(self) -> list[list[int]]:
        value: Any = next((of["bad_words_ids"] for of in self._of_generation() if of.get("bad_words_ids")), [])
        words: list[list[int]] = value if isinstance(value, list) else [value]
        if not all(isinstance(word, list) and word and all(isinstance(part, int) for part in word) for word in words):
            raise ModelLoadError(
                f"{self.path} has bad_words_ids {shown(repr(value))}; there must be lists of ids in a list"
            )
        return words

    def sampling_defaults(self) -> dict[str, float]:
        """Return the sampling parameters that generation_config.json sets; empty if there is none.

        Raises: ModelLoadError: the file is damaged.
        """
        path = self.path / "generation_config.json"
        return sampling_defaults(read_json_object(path), path) if path.is_file() else {}

    def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
        """Return tokenizer.json and its companions that exist; empty without tokenizer.json.

        The files of sentence-transformers come with them: the scheduler puts their prompts in front of texts.

        Raises: ModelLoadError: a file is damaged. The scheduler would find out too, but only the message of
            an executor that ends reaches the operator.
        """
        if not (self.path / TOKENIZER_FILE_NAMES[0]).is_file():
            return ()
        names = [name for name in (*TOKENIZER_FILE_NAMES, *POOLING_FILE_NAMES) if (self.path / name).is_file()]
        contents = {name: _read(self.path / name) for name in names}
        for name, content in contents.items():
            if name.endswith(".json") and name != "modules.json":  # a list
                _parse_json_object(self.path / name, content)
        _check_tokenizer(self.path / names[0], contents[names[0]])
        return tuple(TokenizerFile(name, content) for name, content in contents.items())


def _check_tokenizer(path: Path, content: bytes) -> None:
    # Imported here: only this check needs it.
    import tokenizers

    try:
        tokenizers.Tokenizer.from_buffer(content)
    except BaseException as error:  # the library has no narrower class, and may panic
        raise ModelLoadError(f"{path} is not a valid tokenizer: {words_of(error)}") from error


def read_json_object(path: Path) -> dict[str, object]:
    """Read a JSON object. Raises: ModelLoadError: the file is missing, unreadable or something else."""
    return json_object(path, _read(path))


def json_object(path: Path, content: bytes) -> dict[str, object]:
    """Return the JSON object of a file with this content. Raises: ModelLoadError: it is something else."""
    value = _parse_json_object(path, content)
    level: list[object] = [value]
    for _ in range(_MOST_NESTED):
        level = [item for each in level if isinstance(each, dict | list) for item in _items(each)]
    if level:
        raise ModelLoadError(f"{path} is nested too deeply")
    return value


def _items(container: dict[str, object] | list[object]) -> Iterable[object]:
    return container.values() if isinstance(container, dict) else container


def _read(path: Path) -> bytes:
    try:
        return read_model_file(path)
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} is missing") from error
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error


def _parse_json_object(path: Path, content: bytes) -> dict[str, object]:
    try:
        value = json.loads(content)
    except ValueError as error:  # bad JSON or bad UTF-8
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ModelLoadError(f"{path} is nested too deeply") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} does not contain a JSON object")
    return value


_logger = logging.getLogger(__name__)


def sampling_defaults(config: Mapping[str, object], path: Path) -> dict[str, float]:
    """Return the parameters that the file sets, by name.

    `do_sample` false means greedy, as in transformers; where it is absent, the file does not say how to decode, and
    its other numbers hold. A value that no request may have is left out, with a line in the log.
    """
    defaults: dict[str, float] = {}
    for parameter in SAMPLING_PARAMS:
        value = config.get(parameter.name) if parameter.may_model_set else None
        if value is None:
            continue
        types = (int,) if parameter.is_whole else (int, float)
        if isinstance(value, types) and not isinstance(value, bool) and parameter.allows(value):
            defaults[parameter.name] = value
        else:
            fields = {"file": str(path), "field": parameter.name, "value": repr(value), "must_be": parameter.limit}
            _logger.warning(Event("model_default_ignored", **fields))
    if config.get("do_sample") is False:
        defaults["temperature"] = 0
    return defaults
