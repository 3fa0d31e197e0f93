"""The model's tokenizer: text to token ids and back, and conversations to prompts.

Built on `tokenizers` and `chat_template.py` alone: transformers would bring torch into the
scheduler. `detokenizer.py` handles text that grows token by token.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import jinja2
import numpy as np
import tokenizers

from octavo_shared.errors import InvalidFieldError, TokenizerFailedError, TokenizerFileError
from octavo_shared.rust_panic import words_of
from octavo_shared.step_wire.executor_info import TokenizerFile
from octavo_shared.step_wire.model_file import read_model_file
from octavo_shared.step_wire.step import Int32Array
from scheduler_svc.front.text.chat_template import ChatTemplate
from scheduler_svc.front.text.conversation import Conversation, SpecialTokenBreaker
from scheduler_svc.front.text.embedding_config import MODEL_CONFIG, SENTENCE_TRANSFORMERS_CONFIG, EmbeddingConfig

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"

# The files that are read in a directory.
FILE_NAMES = (TOKENIZER, CONFIG, SPECIAL_TOKENS_MAP, CHAT_TEMPLATE, SENTENCE_TRANSFORMERS_CONFIG, MODEL_CONFIG)

# The variables that a chat template gets, as far as the model has such a token.
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Classes whose pairs have token types if `model_input_names` is missing; the first is that of a file without a class.
# Source: the classes of transformers 5, in which PreTrainedTokenizerFast is not one of them.
_BERT = "BertTokenizer"
_WITH_TOKEN_TYPES = frozenset(
    f"{name}Tokenizer"
    for name in ("Bert", "ConvBert", "Deberta", "DebertaV2", "Electra", "FNet", "LayoutLM", "MobileBert")
)

NO_LIMIT = sys.maxsize


class TooManyTokensError(Exception):
    """A text has `num_tokens`, more than were allowed."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        super().__init__(f"{num_tokens} tokens")


# A text, or a pair of texts.
PoolingText: TypeAlias = str | tuple[str, str]


class TokenizedInput(NamedTuple):
    """A text or a pair as an encoder takes it.

    Attributes:
        token_ids: Its tokens, [num_tokens].
        token_type_ids: Which text each token belongs to, a byte for each; empty: all to the first.
    """

    token_ids: Int32Array
    token_type_ids: bytes = b""


class Tokenizer:
    """Tokenizes, detokenizes and renders conversations for one model. Threads may share one.

    Args:
        files: The model's tokenizer files; only tokenizer.json is required. They are kept as `files`. None at
            all: the model has no tokenizer, every output is the empty text, and nothing may be encoded.
        escapes_special_tokens: Whether special tokens in a conversation become ordinary text.

    Attributes:
        embedding_config: What the files say of the model's vectors.
        special_tokens: The tokens that the model names, such as `eos_token`, by name.
        special_token_ids: The tokens that `decode` leaves out with `skip_special_tokens`.
        largest_id: The largest id that `encode` may return, -1: none; the model may have fewer ids, mostly more.
        max_token_length: Characters of the longest token: a text has at least its length divided by this many tokens.
        chat_template: The template of conversations without tools, if there is one.
        tool_template: That of conversations with tools; few models have another one for those.

    Raises: TokenizerFileError: a file is missing or broken.
    """

    def __init__(self, files: Iterable[TokenizerFile], *, escapes_special_tokens: bool = False) -> None:
        self.files = tuple(files)
        contents = {file.name: file.content for file in self.files}
        self._tokenizer = _load_tokenizer(contents) if self.files else tokenizers.Tokenizer(tokenizers.models.BPE())
        config = _load_json_object(contents, CONFIG)
        self.special_tokens = _special_tokens(_load_json_object(contents, SPECIAL_TOKENS_MAP) | config)
        self.chat_template = _load_chat_template(contents, config, self.special_tokens, "default")
        self.tool_template = self.chat_template
        if CHAT_TEMPLATE not in contents and isinstance(config.get("chat_template"), list):
            own = _load_chat_template(contents, config, self.special_tokens, "tool_use")
            self.tool_template = own or self.chat_template
        self.embedding_config = EmbeddingConfig.of(
            _load_json_object(contents, SENTENCE_TRANSFORMERS_CONFIG), _load_json_object(contents, MODEL_CONFIG)
        )
        inputs, name = config.get("model_input_names"), str(config.get("tokenizer_class") or _BERT).removesuffix("Fast")
        self._has_token_types = "token_type_ids" in inputs if isinstance(inputs, list) else name in _WITH_TOKEN_TYPES
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.max_token_length = max(map(len, vocab), default=1)
        self.largest_id = max(vocab.values(), default=-1)
        special = {
            token_id: token.content
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self.special_token_ids = frozenset(special)
        self._breaker = SpecialTokenBreaker(special.values()) if escapes_special_tokens else None

    @classmethod
    def from_directory(cls, path: Path | str, *, escapes_special_tokens: bool = False) -> "Tokenizer":
        """Read the files of a model directory. Raises TokenizerFileError: a file is missing, unreadable or broken."""
        files = []
        for name in FILE_NAMES:
            file = Path(path) / name
            try:
                files.append(TokenizerFile(name, read_model_file(file)))
            except FileNotFoundError as error:
                if name == TOKENIZER:
                    raise TokenizerFileError(str(file), "does not exist") from error
            except OSError as error:
                raise TokenizerFileError(str(file), f"cannot be read: {error.strerror}") from error
        return cls(files, escapes_special_tokens=escapes_special_tokens)

    @property
    def is_absent(self) -> bool:
        """Whether the model has no tokenizer, so that it takes token ids only."""
        return not self.files

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` works."""
        return self.chat_template is not None

    def id_of(self, token: str) -> int | None:
        """Return the id of a token written as in the vocabulary, if there is one."""
        return self._tokenizer.token_to_id(token)

    def token_of(self, token_id: int) -> str:
        """Return a token as it is written in the vocabulary; empty: there is none with this id."""
        return self._tokenizer.id_to_token(token_id) or ""

    def has_id(self, token_id: int) -> bool:
        """Return whether a token with this id exists; `decode` skips ids without one."""
        return self._tokenizer.id_to_token(token_id) is not None

    def encode(self, text: str, max_tokens: int = NO_LIMIT, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize a prompt, by default with the special tokens that the tokenizer adds (often a BOS token).

        Raises:
            TooManyTokensError: there are more than `max_tokens`.
            TokenizerFailedError: the library fails.
        """
        return self._encode(text, max_tokens, add_special_tokens=add_special_tokens)

    def encode_part(self, text: str) -> list[int]:
        """Tokenize a piece of text as it is, without the special tokens of a prompt."""
        return self._encode_all([text], add_special_tokens=False)[0].ids

    def encode_inputs(self, inputs: Sequence[PoolingText], cut_to: int | None = None) -> list[TokenizedInput]:
        """Tokenize texts or pairs of texts for an encoder, with the special tokens of the tokenizer's template.

        Args:
            inputs: The texts, or the pairs: all of one kind.
            cut_to: Longer inputs are cut to this many tokens: a text at its end, of a pair the longer text; enough for
                the special tokens and one more of each text. None: nothing is cut.

        Raises: TokenizerFailedError: the library fails.
        """
        encodings = self._encode_all(inputs, add_special_tokens=True)
        return [
            self._tokenized(encoding if cut_to is None or len(encoding) <= cut_to else self._cut(each, cut_to))
            for each, encoding in zip(inputs, encodings, strict=True)
        ]

    def num_special_tokens(self, *, is_pair: bool) -> int:
        """Return how many tokens the template adds to a text, or to a pair."""
        return self._tokenizer.num_special_tokens_to_add(is_pair=is_pair)

    def _cut(self, text: PoolingText, num_tokens: int) -> tokenizers.Encoding:
        """Tokenize a text or a pair that is longer than `num_tokens`, and cut it to that."""
        parts = self._encode_all([text] if isinstance(text, str) else text, add_special_tokens=False)
        room = num_tokens - self.num_special_tokens(is_pair=len(parts) == 2)
        if len(parts) == 2:
            shorter = min(room // 2, *map(len, parts))
            lengths = [shorter, room - shorter] if len(parts[0]) <= len(parts[1]) else [room - shorter, shorter]
        else:
            lengths = [room]
        for part, length in zip(parts, lengths, strict=True):
            part.truncate(length)
        return self._tokenizer.post_process(parts[0], parts[1] if len(parts) == 2 else None)

    def _tokenized(self, encoding: tokenizers.Encoding) -> TokenizedInput:
        types = encoding.type_ids if self._has_token_types else ()
        return TokenizedInput(np.array(encoding.ids, np.int32), bytes(types) if any(types) else b"")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of a whole token sequence; bytes that are no UTF-8 become U+FFFD.

        Raises: TokenizerFailedError: the library fails.
        """
        try:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:  # a panic is no Exception
            raise TokenizerFailedError(
                f"the tokenizer failed to decode the request's tokens: {words_of(error)}"
            ) from error

    def render_chat(self, conversation: Conversation, max_tokens: int = NO_LIMIT) -> list[int]:
        """Turn a conversation into the prompt for the assistant's next turn.

        No special tokens are added, as the template writes them itself. Special tokens in a message's
        content are recognised too, as they are in transformers, unless they are escaped: a client can imitate turns.

        Raises:
            InvalidFieldError: the model has no chat template, or it refuses the messages.
            TooManyTokensError: there are more than `max_tokens`.
            TokenizerFailedError: the library fails.
        """
        template = self.tool_template if conversation.tools else self.chat_template
        if template is None:
            raise InvalidFieldError("messages", "set", "unset: this model has no chat template; send text or token_ids")
        if self._breaker is None:
            return self._encode(template.render(conversation), max_tokens, add_special_tokens=False)
        broken, mark = self._breaker.break_up(conversation)
        pieces = template.render(broken).split(mark)
        if len(pieces) == 1:
            return self._encode(pieces[0], max_tokens, add_special_tokens=False)
        encodings = self._encode_all(pieces, add_special_tokens=False)
        num_tokens = sum(map(len, encodings))
        if num_tokens > max_tokens:
            raise TooManyTokensError(num_tokens)
        return [token_id for encoding in encodings for token_id in encoding.ids]

    def _encode(self, text: str, max_tokens: int, *, add_special_tokens: bool) -> list[int]:
        [encoding] = self._encode_all([text], add_special_tokens=add_special_tokens)
        if len(encoding) > max_tokens:  # checked first, as making a list of them takes long
            raise TooManyTokensError(len(encoding))
        return encoding.ids

    def _encode_all(self, texts: Sequence[PoolingText], *, add_special_tokens: bool) -> list[tokenizers.Encoding]:
        """Tokenize texts. Unlike `encode` this lets other threads run, however long it takes."""
        try:
            return self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except BaseException as error:  # a panic is no Exception
            raise TokenizerFailedError(
                f"the tokenizer failed to encode the request's text: {words_of(error)}"
            ) from error


def _load_tokenizer(contents: dict[str, bytes]) -> tokenizers.Tokenizer:
    if TOKENIZER not in contents:
        raise TokenizerFileError(TOKENIZER, "is missing")
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(contents[TOKENIZER])
    except BaseException as error:  # the library has no narrower class, and may panic
        raise TokenizerFileError(TOKENIZER, f"is not a valid tokenizer: {words_of(error)}") from error
    # Settings from the model's training; a prompt must never be cut or padded silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _load_json_object(contents: dict[str, bytes], name: str) -> dict[str, object]:
    try:
        value = json.loads(contents.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise TokenizerFileError(name, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerFileError(name, "is not a JSON object")
    return value


def _special_tokens(config: dict[str, object]) -> dict[str, str]:
    """Return the named special tokens; a token is its text, or an object with its `content`."""
    found = {}
    for name in SPECIAL_TOKEN_NAMES:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found


def _load_chat_template(
    contents: dict[str, bytes], config: dict[str, object], special_tokens: dict[str, str], kind: str
) -> ChatTemplate | None:
    """Return the template of a kind, "default" or "tool_use"."""
    name = CHAT_TEMPLATE if CHAT_TEMPLATE in contents else CONFIG
    try:
        source = contents[name].decode() if name == CHAT_TEMPLATE else _configured_template(config, kind)
        return None if source is None else ChatTemplate(source, special_tokens)
    except UnicodeDecodeError as error:
        raise TokenizerFileError(name, f"is not UTF-8: {error}") from error
    except jinja2.TemplateError as error:
        raise TokenizerFileError(name, f"contains no valid chat template: {error}") from error


def _configured_template(config: dict[str, object], kind: str) -> str | None:
    """Return the template in tokenizer_config.json: a string, or the item `kind` of a list."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get(kind)
    if template is None or isinstance(template, str):
        return template
    raise TokenizerFileError(CONFIG, "has a chat_template that is neither a string nor a list of named templates")
