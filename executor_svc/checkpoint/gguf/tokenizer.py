"""The tokenizer of a GGUF file, as tokenizer.json: made by transformers' converter, and what that leaves out.

A file has vocabulary, merges and scores, but names how text is cut before (`tokenizer.ggml.pre`). A name that is not
known here is refused: another cut gives other tokens, without any error.

The conversion takes seconds, so `tokenizer_cache.py` keeps its result.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from executor_svc.checkpoint.gguf.metadata import Metadata
from executor_svc.checkpoint.gguf.tokenizer_cache import cached_conversion
from octavo.values.rust_panic import words_of
from octavo.values.wording import shown
from octavo_shared.errors import ModelLoadError
from octavo_shared.step_wire.executor_info import TokenizerFile

_TOKENIZER = "tokenizer.ggml."

# Tokens that end a turn; llama.cpp knows them by their text too.
_ENDS: Final = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<EOT>")
)
_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type

# Cuts that transformers' converter does not know, or that are those of its GPT-2.
_DIGITS_APART = {"type": "Digits", "individual_digits": True}
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_OWN_CUTS: Final[Mapping[str, object]] = {
    "gpt-2": _BYTE_LEVEL,
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS_APART, _BYTE_LEVEL]},
}
# These take a word that is a token whole, whatever their merges say, and begin with a token.
_LLAMA3: Final = frozenset(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"))


def tokenizer_files(metadata: Metadata) -> tuple[TokenizerFile, ...]:
    """Return tokenizer.json, tokenizer_config.json and the chat template; empty: the file has no tokenizer.

    Raises: ModelLoadError: it cannot be expressed as tokenizer.json, or it is damaged.
    """
    kind = metadata.values.get(f"{_TOKENIZER}model")
    if kind is None or kind == "no_vocab":
        return ()
    content = cached_conversion(
        (metadata.architecture.encode(), metadata.tokenizer_digest, Path(__file__).read_bytes()),
        lambda: json.dumps(_tokenizer(metadata), ensure_ascii=False).encode(),
    )
    files = [TokenizerFile("tokenizer.json", content), TokenizerFile("tokenizer_config.json", _settings(metadata))]
    if "tokenizer.chat_template" in metadata.values:
        template = metadata.text("tokenizer.chat_template")
        files.append(TokenizerFile("chat_template.jinja", template.encode()))
    return tuple(files)


def end_token_ids(metadata: Metadata) -> tuple[int, ...]:
    """Return the ids that end a sequence: those that the file names, and the control tokens that end a turn."""
    named = [metadata.values.get(f"{_TOKENIZER}{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = [token_id for token_id in named if isinstance(token_id, int)]
    if f"{_TOKENIZER}token_type" in metadata.values and f"{_TOKENIZER}tokens" in metadata.values:
        pairs = zip(metadata.texts(f"{_TOKENIZER}tokens"), metadata.numbers(f"{_TOKENIZER}token_type"), strict=False)
        ids += [index for index, (token, kind) in enumerate(pairs) if kind == _CONTROL and token in _ENDS]
    return tuple(dict.fromkeys(ids))


def _tokenizer(metadata: Metadata) -> dict[str, object]:
    # Seconds, which a model in a directory need not wait.
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, convert_gguf_tokenizer

    kind, tokens = metadata.text(f"{_TOKENIZER}model"), metadata.texts(f"{_TOKENIZER}tokens")
    given: dict[str, object] = {"tokenizer_type": kind, "tokens": tokens}
    cut = metadata.text(f"{_TOKENIZER}pre", "default")
    if kind == "gpt2":
        if cut not in _OWN_CUTS and cut not in GGUF_PRE_TOKENIZER_SPLITS:
            supported = ", ".join(sorted({*_OWN_CUTS, *GGUF_PRE_TOKENIZER_SPLITS}))
            raise ModelLoadError(
                f"{metadata.path} has {_TOKENIZER}pre {shown(cut)}, which is not supported; supported are {supported}"
            )
        given |= {"pre_tokenizer_type": cut, "merges": metadata.texts(f"{_TOKENIZER}merges")}
    elif kind == "llama":
        given["scores"] = metadata.numbers(f"{_TOKENIZER}scores")
    else:
        raise ModelLoadError(f"{metadata.path} has {_TOKENIZER}model {shown(kind)}; supported are gpt2 and llama")
    if f"{_TOKENIZER}token_type" in metadata.values:
        given["token_type"] = metadata.numbers(f"{_TOKENIZER}token_type")
    for name in ("scores", "token_type"):
        values = given.get(name)
        if isinstance(values, list) and len(values) != len(tokens):
            raise ModelLoadError(f"{metadata.path} has {_TOKENIZER}{name} for {len(values)} of {len(tokens)} tokens")
    try:
        made, _ = convert_gguf_tokenizer(metadata.architecture, given)
        tokenizer: dict[str, object] = json.loads(made.to_str())
    except BaseException as error:  # the library may panic
        raise ModelLoadError(f"{metadata.path} has a tokenizer that is not valid: {words_of(error)}") from error
    if kind == "llama":
        _add_user_defined(tokenizer, tokens, given.get("token_type"))
    if kind == "gpt2" and cut in _OWN_CUTS:
        tokenizer["pre_tokenizer"] = _OWN_CUTS[cut]
    if kind == "llama" and not metadata.architecture.startswith("gemma"):
        # transformers' cut loses a space in front of a text that begins with one.
        has_prefix = metadata.flag(f"{_TOKENIZER}add_space_prefix", True)
        steps = [{"type": "Prepend", "prepend": "\u2581"}] if has_prefix else []
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
        tokenizer |= {"normalizer": {"type": "Sequence", "normalizers": [*steps, replace]}, "pre_tokenizer": None}
    if cut in _LLAMA3:
        model = tokenizer["model"]
        assert isinstance(model, dict)
        model["ignore_merges"] = True
    tokenizer["post_processor"] = _first_token(metadata, tokens, is_added_by_default=kind == "llama" or cut in _LLAMA3)
    return tokenizer


def _add_user_defined(tokenizer: dict[str, object], tokens: list[str], kinds: object) -> None:
    """Add what SentencePiece takes whole before it merges: transformers leaves out runs of spaces."""
    added = tokenizer["added_tokens"]
    assert isinstance(added, list)
    known = {token["id"] for token in added}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    for token_id, (token, kind) in enumerate(zip(tokens, kinds if isinstance(kinds, list) else (), strict=False)):
        if kind == _USER_DEFINED and token_id not in known:
            added.append({"id": token_id, "content": token.replace(" ", "\u2581"), **flags})
    added.sort(key=lambda token: int(token["id"]))


def _first_token(metadata: Metadata, tokens: list[str], *, is_added_by_default: bool) -> dict[str, object] | None:
    """Return what puts a token before every text; None: nothing does."""
    if not metadata.flag(f"{_TOKENIZER}add_bos_token", is_added_by_default):
        return None
    token = _special_tokens(metadata, tokens).get("bos_token")
    if token is None:
        return None
    text = {"Sequence": {"id": "A", "type_id": 0}}
    special = {"id": token, "ids": [metadata.whole_number(f"{_TOKENIZER}bos_token_id")], "tokens": [token]}
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    pair = [first, text, {"SpecialToken": {"id": token, "type_id": 1}}, second]
    return {"type": "TemplateProcessing", "single": [first, text], "pair": pair, "special_tokens": {token: special}}


def _special_tokens(metadata: Metadata, tokens: list[str]) -> dict[str, str]:
    """Return the tokens that the file gives a part, by the names of tokenizer_config.json."""
    parts = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    found = {}
    for ours, theirs in parts.items():
        key = f"{_TOKENIZER}{theirs}_token_id"
        if key not in metadata.values:
            continue
        token_id = metadata.whole_number(key)
        if token_id >= len(tokens):
            raise metadata.wrong(key, token_id, f"below the number of tokens, {len(tokens)}")
        found[f"{ours}_token"] = tokens[token_id]
    return found


def _settings(metadata: Metadata) -> bytes:
    """Return tokenizer_config.json."""
    settings: dict[str, object] = {
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.integer("context_length"),
        "tokenizer_class": "PreTrainedTokenizerFast",
        **_special_tokens(metadata, metadata.texts(f"{_TOKENIZER}tokens")),
    }
    return json.dumps(settings, ensure_ascii=False, indent=2).encode()
