"""The tokenizer of a GGUF file, as tokenizer.json: made by transformers' converter, and what that leaves out.

A file has vocabulary, merges and scores, but names how text is cut before (`tokenizer.ggml.pre`). A name that is not
known here is refused: another cut gives other tokens, without any error.

The conversion takes seconds, so `tokenizer_cache.py` keeps its result.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from executor_svc.checkpoint.gguf.metadata import Metadata, is_of_converter, warn_of_key
from executor_svc.checkpoint.gguf.tokenizer_cache import cached_conversion
from octavo.values.wording import shown
from octavo_shared.errors import ModelLoadError
from octavo_shared.rust_panic import words_of
from octavo_shared.step_wire.executor_info import TokenizerFile

_TOKENIZER = "tokenizer.ggml."

# Tokens that end a turn; llama.cpp knows them by their text too.
_ENDS: Final = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<EOT>", "<turn|>")
)
_END_OF_GEMMA4 = "<|tool_response>"  # ends a turn though files show it
# Those of harmony, where <|end|> ends a message, and the next one may follow.
_ENDS_OF_HARMONY: Final = frozenset(("<|return|>", "<|call|>", "<|endoftext|>"))
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # of tokenizer.ggml.token_type

# Cuts that transformers' converter does not know, or that equal its cut of GPT-2.
_DIGITS_APART = {"type": "Digits", "individual_digits": True}
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
# Letters of scripts that have cases, as the first tokenizers of DeepSeek have them.
_CASED: Final = (
    "A-Za-z"
    "\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-"
    "\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-"
    "\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134"
    "\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_OF_DEEPSEEK = (
    *("[\r\n]", rf"\s?[{_CASED}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
    *(r"\s+$", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}+"),
)
_OF_DEEPSEEK3 = (
    *(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_OF_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(*patterns: str) -> dict[str, object]:
    """Return a cut by one pattern after the other."""
    splits = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False} for each in patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, {**_BYTE_LEVEL, "use_regex": False}]}


_OWN_CUTS: Final[Mapping[str, object]] = {
    "deepseek-llm": _split(*_OF_DEEPSEEK),
    "deepseek-v3": _split(*_OF_DEEPSEEK3),
    "gpt-2": _BYTE_LEVEL,
    "kimi-k2": _split(_OF_KIMI),
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS_APART, _BYTE_LEVEL]},
}
# These take a word that is a token whole, whatever their merges say, and begin with a token.
_LLAMA3: Final = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken")
)
_GLM4: Final = "glm4"  # the same cut, and whole words; it begins with no token
# What llama.cpp takes for these where the file does not say.
_SENTENCEPIECE_IDS: Final[Mapping[str, int]] = {"bos": 1, "eos": 2, "unknown": 0}

# Keys that change no token of the two tokenizer types that are read: settings of other types, and ids for infilling or
# for other models.
_WITHOUT_EFFECT: Final = frozenset(
    f"{_TOKENIZER}{name}"
    for name in (
        "add_sep_token",
        "normalizer.lowercase",
        "normalizer.strip_accents",
        "precompiled_charsmap",
        "remove_extra_whitespaces",
        "token_type_count",
        *(f"{name}_token_id" for name in ("cls", "mask", "seperator", "separator", "prefix", "suffix", "middle")),
        *(f"fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")),
    )
)
_READ: Final = frozenset(
    f"{_TOKENIZER}{name}"
    for name in (
        "add_bos_token",
        "add_eos_token",
        "add_space_prefix",
        "eos_token_ids",
        "merges",
        "model",
        "pre",
        "scores",
        "token_type",
        "tokens",
        *(f"{name}_token_id" for name in ("bos", "eos", "eot", "eom", "padding", "unknown")),
    )
)


def tokenizer_files(metadata: Metadata) -> tuple[TokenizerFile, ...]:
    """Return tokenizer.json, tokenizer_config.json and the chat template; empty: the file has no tokenizer.

    Raises: ModelLoadError: it cannot be expressed as tokenizer.json, or it is damaged.
    """
    kind = metadata.values.get(f"{_TOKENIZER}model")
    if kind in (None, "no_vocab", "none"):
        return ()
    for key, value in metadata.values.items():
        if not key.startswith(_TOKENIZER) or key in _READ | _WITHOUT_EFFECT or not np.size(np.asarray(value)):
            continue
        if is_of_converter(key):
            raise ModelLoadError(f"{metadata.path} has {shown(key)}, which is not supported")
        warn_of_key(metadata.path, key)
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
    """Return the ids that end a sequence: the ids that the file names, and the control tokens that end a turn."""
    named = [metadata.values.get(f"{_TOKENIZER}{name}_token_id") for name in ("eos", "eot", "eom")]
    several = metadata.values.get(f"{_TOKENIZER}eos_token_ids")  # of Ollama's converter
    named += several if isinstance(several, list) else []
    ids = [token_id for token_id in named if isinstance(token_id, int)]
    if f"{_TOKENIZER}token_type" in metadata.values and f"{_TOKENIZER}tokens" in metadata.values:
        tokens = metadata.texts(f"{_TOKENIZER}tokens")
        pairs = zip(tokens, metadata.numbers(f"{_TOKENIZER}token_type"), strict=False)
        ends = _ENDS_OF_HARMONY if set(tokens) >= _ENDS_OF_HARMONY else _ENDS
        ids += [
            index
            for index, (token, kind) in enumerate(pairs)
            if (kind == _CONTROL and token in ends) or token == _END_OF_GEMMA4
        ]
    return tuple(dict.fromkeys(ids))


def _tokenizer(metadata: Metadata) -> dict[str, object]:
    # Seconds, which a model in a directory need not wait.
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, convert_gguf_tokenizer

    kind, tokens = metadata.text(f"{_TOKENIZER}model"), metadata.texts(f"{_TOKENIZER}tokens")
    given: dict[str, object] = {"tokenizer_type": kind, "tokens": tokens}
    cut = metadata.text(f"{_TOKENIZER}pre", "default")
    if kind == "gpt2":
        if cut not in (known := {_GLM4, *_OWN_CUTS, *GGUF_PRE_TOKENIZER_SPLITS}):
            supported = ", ".join(sorted(known))
            raise ModelLoadError(
                f"{metadata.path} has {_TOKENIZER}pre {shown(cut)}, which is not supported; supported are {supported}"
            )
        given |= {
            "pre_tokenizer_type": "llama3" if cut == _GLM4 else cut,
            "merges": metadata.texts(f"{_TOKENIZER}merges"),
        }
    elif kind == "gemma4":
        given["merges"] = metadata.texts(f"{_TOKENIZER}merges")
    elif kind == "llama":
        given["scores"] = metadata.numbers(f"{_TOKENIZER}scores")
    else:
        raise ModelLoadError(
            f"{metadata.path} has {_TOKENIZER}model {shown(kind)}; supported are gpt2, llama and gemma4"
        )
    if f"{_TOKENIZER}token_type" in metadata.values:
        given["token_type"] = metadata.numbers(f"{_TOKENIZER}token_type")
    for name in ("scores", "token_type"):
        values = given.get(name)
        if isinstance(values, list) and len(values) != len(tokens):
            raise ModelLoadError(f"{metadata.path} has {_TOKENIZER}{name} for {len(values)} of {len(tokens)} tokens")
    try:
        made, _ = convert_gguf_tokenizer(metadata.architecture, given)
        tokenizer: dict[str, Any] = json.loads(made.to_str())
    except BaseException as error:  # the library may panic
        raise ModelLoadError(f"{metadata.path} has a tokenizer that is not valid: {words_of(error)}") from error
    _take_whole(tokenizer, tokens, given.get("token_type"), is_sentencepiece=kind != "gpt2")
    if kind == "gpt2" and cut in _OWN_CUTS:
        tokenizer["pre_tokenizer"] = _OWN_CUTS[cut]
    if kind == "llama" and not metadata.architecture.startswith("gemma"):
        # transformers' cut loses a space in front of a text that begins with one.
        has_prefix = metadata.flag(f"{_TOKENIZER}add_space_prefix", True)
        steps = [{"type": "Prepend", "prepend": "\u2581"}] if has_prefix else []
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
        tokenizer |= {"normalizer": {"type": "Sequence", "normalizers": [*steps, replace]}, "pre_tokenizer": None}
    if cut in {*_LLAMA3, _GLM4}:
        tokenizer["model"]["ignore_merges"] = True
    tokenizer["post_processor"] = _around_texts(metadata, tokens, has_first=kind != "gpt2" or cut in _LLAMA3)
    return tokenizer


def _take_whole(tokenizer: dict[str, Any], tokens: list[str], kinds: object, *, is_sentencepiece: bool) -> None:
    """Let exactly the tokens that the file sets apart be found in a text before all else.

    transformers adds what its classes usually have, with ids behind the vocabulary's end, leaves out tokens of control
    with letters beyond the byte alphabet, as DeepSeek's, and runs of spaces, which SentencePiece takes whole.
    """
    model, added = tokenizer["model"], {token["id"]: token for token in tokenizer["added_tokens"]}
    vocab = {token: token_id for token, token_id in model["vocab"].items() if token_id < len(tokens)}
    spellings = {token_id: token for token, token_id in vocab.items()}
    if not is_sentencepiece:
        model["unk_token"] = None  # every byte is a token
    for token_id, kind in enumerate(kinds if isinstance(kinds, list) else ()):
        if token_id in added or kind not in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            continue
        is_special, content = kind != _USER_DEFINED, tokens[token_id]
        is_respelled = is_sentencepiece and not is_special
        if is_respelled:
            content = content.replace(" ", "\u2581")
        flags = {"single_word": False, "lstrip": False, "rstrip": False}
        flags |= {"normalized": is_respelled, "special": is_special}
        added[token_id] = {"id": token_id, "content": content, **flags}
        if content not in vocab:
            vocab.pop(spellings.get(token_id, ""), None)
            vocab[content] = token_id
    model["vocab"] = vocab
    tokenizer["added_tokens"] = [added[token_id] for token_id in sorted(added) if token_id < len(tokens)]


def _around_texts(metadata: Metadata, tokens: list[str], *, has_first: bool) -> dict[str, object] | None:
    """Return what puts a token before every text, or behind it; None: nothing does."""
    special: dict[str, object] = {}

    def parts(name: str, *, is_added_by_default: bool) -> tuple[list[object], list[object]]:
        """Return a token as part of the first text, and of the second one of a pair."""
        key = f"{_TOKENIZER}add_{name}_token"
        is_always = name == "bos" and metadata.values[f"{_TOKENIZER}model"] == "gemma4"  # the first files say no
        if not metadata.flag(key, is_added_by_default) and not is_always:
            return [], []
        token = _special_tokens(metadata, tokens).get(f"{name}_token")
        if token is None:
            if key in metadata.values:
                raise ModelLoadError(f"{metadata.path} has {key}, but no {_TOKENIZER}{name}_token_id")
            return [], []
        token_id = metadata.whole_number(f"{_TOKENIZER}{name}_token_id", _SENTENCEPIECE_IDS[name])
        special[token] = {"id": token, "ids": [token_id], "tokens": [token]}
        return [{"SpecialToken": {"id": token, "type_id": 0}}], [{"SpecialToken": {"id": token, "type_id": 1}}]

    first, first_of_second = parts("bos", is_added_by_default=has_first)
    last, last_of_second = parts("eos", is_added_by_default=False)
    if not special:
        return None
    single = [*first, {"Sequence": {"id": "A", "type_id": 0}}, *last]
    second = [*first_of_second, {"Sequence": {"id": "B", "type_id": 1}}, *last_of_second]
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, *second], "special_tokens": special}


def _special_tokens(metadata: Metadata, tokens: list[str]) -> dict[str, str]:
    """Return the tokens that the file gives a part, by the names of tokenizer_config.json."""
    parts = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    defaults = _SENTENCEPIECE_IDS if metadata.values.get(f"{_TOKENIZER}model") == "llama" else {}
    found = {}
    for ours, theirs in parts.items():
        key = f"{_TOKENIZER}{theirs}_token_id"
        default = defaults.get(theirs)
        if key not in metadata.values and (default is None or default >= len(tokens)):
            continue
        token_id = metadata.whole_number(key, default)
        if token_id >= len(tokens):
            raise metadata.wrong(key, token_id, f"below the number of tokens, {len(tokens)}")
        found[f"{ours}_token"] = tokens[token_id]
    return found


def _settings(metadata: Metadata) -> bytes:
    settings: dict[str, object] = {
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.integer("context_length"),
        "tokenizer_class": "PreTrainedTokenizerFast",
        **_special_tokens(metadata, metadata.texts(f"{_TOKENIZER}tokens")),
    }
    return json.dumps(settings, ensure_ascii=False, indent=2).encode()
