"""A model's tokenizer as the matcher of grammars loads it: which types it can read, and the id of the result.

Read next: `matcher.py`. Nothing is loaded here until it is needed: the functions that use llguidance and tokenizers
import them.
"""

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from octavo.values.wording import how_to_install
from octavo_shared.errors import OctavoServiceError
from octavo_shared.rust_panic import words_of
from octavo_shared.step_wire.executor_info import TokenizerFile

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Raise it with every change of the tokens that a grammar allows: of the limits of `matcher.py`, or of what they cause.
_RULES_VERSION = 1

# llguidance marks special tokens by this byte, which no UTF-8 text has, and leaves it out of a token's bytes.
_MARKER = b"\xff"


class UnsupportedTokenizerError(OctavoServiceError):
    """No grammar can be followed with this tokenizer; the message is one sentence."""


class MatcherTokenizer:
    """A tokenizer that llguidance has loaded. Any number of matchers share it, on any thread.

    Attributes:
        matcher_id: Matchers of equal ids allow the same tokens.
        vocab_size: Width of the logits.
        eos_token_ids: The tokens that end an output, ascending.
        loaded: llguidance's tokenizer.
    """

    def __init__(self, matcher_id: str, vocab_size: int, eos_token_ids: tuple[int, ...], loaded: "LLTokenizer") -> None:
        self.matcher_id = matcher_id
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.loaded = loaded

    @property
    def num_mask_words(self) -> int:
        """Words of a mask, of 32 bits each."""
        return -(-self.vocab_size // 32)

    @classmethod
    def load(cls, tokenizer_files: Sequence[TokenizerFile], eos_token_ids: Sequence[int], vocab_size: int) -> Self:
        """Load a tokenizer; it takes half a second, and 61 MiB, at 49,152 tokens.

        Args:
            tokenizer_files: The model's.
            eos_token_ids: The tokens that end an output.
            vocab_size: Width of the logits.

        Raises: UnsupportedTokenizerError: llguidance is missing, cannot read it, or reads other bytes than we do.
        """
        matcher_id = matcher_id_of(tokenizer_files, eos_token_ids, vocab_size)
        from llguidance import LLTokenizer

        text = _tokenizer_json(tokenizer_files)
        eos = sorted({*eos_token_ids})
        try:
            loaded = LLTokenizer(text, n_vocab=vocab_size, eos_token=eos)
        except BaseException as error:
            raise UnsupportedTokenizerError(f"grammars cannot use this tokenizer: {words_of(error)}") from error
        _require_same_bytes(loaded, text, vocab_size)
        return cls(matcher_id, vocab_size, tuple(eos), loaded)


def matcher_id_of(tokenizer_files: Sequence[TokenizerFile], eos_token_ids: Sequence[int], vocab_size: int) -> str:
    """Return the id of the matchers of a tokenizer, which need not be loaded for this.

    Raises: UnsupportedTokenizerError: there can be none; see `MatcherTokenizer.load`.
    """
    version = _llguidance_version()
    if version is None:
        raise UnsupportedTokenizerError(
            f"grammars need llguidance, which is not installed: {how_to_install('scheduler')}, or '.[executor]'"
        )
    text = _tokenizer_json(tokenizer_files)
    _require_known_kind(text, vocab_size)
    if not eos_token_ids:
        raise UnsupportedTokenizerError("grammars need an end-of-sequence token, and the model has none")
    outside = [token_id for token_id in eos_token_ids if not 0 <= token_id < vocab_size]
    if outside:
        raise UnsupportedTokenizerError(
            f"the end-of-sequence token {outside[0]} is not in the vocabulary of {vocab_size} tokens"
        )
    parts = json.dumps([_RULES_VERSION, sorted({*eos_token_ids}), vocab_size]).encode()
    digest = hashlib.sha256(parts + hashlib.sha256(text.encode()).digest()).hexdigest()
    return f"llguidance-{version}-{digest[:32]}"


@functools.cache
def _llguidance_version() -> str | None:
    try:
        return importlib.metadata.version("llguidance")
    except importlib.metadata.PackageNotFoundError:
        return None


def _tokenizer_json(tokenizer_files: Sequence[TokenizerFile]) -> str:
    content = next((file.content for file in tokenizer_files if file.name == "tokenizer.json"), None)
    if content is None:
        raise UnsupportedTokenizerError("grammars need a tokenizer.json, and the model has none")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UnsupportedTokenizerError(f"tokenizer.json is not UTF-8: {error}") from error


def _require_known_kind(text: str, vocab_size: int) -> None:
    """Raise UnsupportedTokenizerError for types whose tokens have no bytes of their own, and for too many tokens."""
    try:
        described = json.loads(text)
        model, decoder = _kind(described["model"]), described.get("decoder") or {}
        decoders = {_kind(part) for part in [decoder, *decoder.get("decoders", ())]}
        vocab = described["model"]["vocab"]
        added = [token["id"] for token in described.get("added_tokens") or ()]
        largest = max([len(vocab) - 1, *added, *(vocab.values() if isinstance(vocab, dict) else ())])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnsupportedTokenizerError(f"tokenizer.json cannot be read ({type(error).__name__})") from error
    refused = {model} & {"WordPiece", "WordLevel"} or decoders & {"Metaspace", "WordPiece"}
    if refused:
        raise UnsupportedTokenizerError(
            f"grammars cannot use a {refused.pop()} tokenizer; byte-level ones and those with byte fallback work"
        )
    if largest >= vocab_size:
        raise UnsupportedTokenizerError(
            f"grammars cannot use this tokenizer: it has a token {largest}, but the model only {vocab_size} tokens"
        )


def _kind(part: Mapping[str, Any]) -> str:
    # Old files do not name the type of a model; those with merges are BPE.
    return str(part.get("type") or ("BPE" if "merges" in part else ""))


def _require_same_bytes(loaded: "LLTokenizer", text: str, vocab_size: int) -> None:
    """Raise UnsupportedTokenizerError unless every token stands for the text that our detokenizer makes of it."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(text)
    num_tokens = min(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
    # A decoder may drop the first space of a text, so each token stands behind another one.
    anchor = next(token_id for token_id in range(num_tokens) if loaded.decode_bytes([token_id]).strip(b" ").isalpha())
    before = tokenizer.decode([anchor], skip_special_tokens=False)
    texts = tokenizer.decode_batch([[anchor, token_id] for token_id in range(num_tokens)], skip_special_tokens=False)
    for token_id, decoded in enumerate(texts):
        own, theirs = decoded.removeprefix(before), loaded.decode_bytes([token_id])
        if own.encode() == theirs or ("\ufffd" in own and not _is_text(theirs or _MARKER)):
            continue
        raise UnsupportedTokenizerError(
            f"grammars cannot use this tokenizer: its token {token_id} is {own[:20]!r}, but the grammar library reads "
            f"{theirs[:20]!r}"
        )


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
