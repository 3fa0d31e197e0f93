"""Rebuilds a Hugging Face tokenizer from the metadata of a GGUF file.

GGUF keeps vocabulary, merges and token types, and names the pre-tokenizer instead of describing it
(`tokenizer.ggml.pre`). Only the one of SmolLM2 is known here; any other is refused, since a wrong pre-tokenizer gives
other token ids without any error.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.models.gguf_metadata import GGUFMetadata
from octavo.models.progress import ModelPrepareError
from octavo.values.rust_panic import is_panic, words_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTROL_TOKEN = 3  # a value of tokenizer.ggml.token_type


def write_tokenizer_files(metadata: GGUFMetadata, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `directory`.

    Raises:
        ModelPrepareError: The file has another kind of tokenizer, or lacks a part of it.
    """
    tokens = metadata.texts("tokenizer.ggml.tokens")
    try:
        build_tokenizer(metadata, tokens).save(str(directory / "tokenizer.json"))
    except BaseException as error:
        if not is_panic(error):
            raise
        raise ModelPrepareError(f"the GGUF file's tokenizer is invalid: {words_of(error)}") from error
    special_tokens = {
        f"{role}_token": tokens[metadata.integer(key)]
        for role, key in (
            ("bos", "tokenizer.ggml.bos_token_id"),
            ("eos", "tokenizer.ggml.eos_token_id"),
            ("pad", "tokenizer.ggml.padding_token_id"),
            ("unk", "tokenizer.ggml.unknown_token_id"),
        )
        if metadata.has(key)
    }
    tokenizer_config = {
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.integer("llama.context_length"),
        # Not GPT2Tokenizer: transformers 5 would rebuild that one without the digit rule of tokenizer.json.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special_tokens,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n", encoding="utf-8")
    chat_template = metadata.text("tokenizer.chat_template")
    (directory / "chat_template.jinja").write_text(chat_template, encoding="utf-8")


def build_tokenizer(metadata: GGUFMetadata, tokens: list[str]) -> "Tokenizer":
    """Build the byte-level BPE tokenizer.

    Args:
        metadata: Where the merges and the token types are read.
        tokens: The vocabulary; the position is the token id.

    Raises:
        ModelPrepareError: The tokenizer is not byte-level BPE with SmolLM's pre-tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = metadata.text("tokenizer.ggml.model"), metadata.text("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise ModelPrepareError(f"the tokenizer of the GGUF file is {'/'.join(kind)}; only gpt2/smollm is supported")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    # Byte-level BPE writes a space as another character, so the one space parts the two halves of a merge.
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in metadata.texts("tokenizer.ggml.merges"))]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    token_types = metadata.integers("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, token_type in zip(tokens, token_types, strict=True)
            if token_type == _CONTROL_TOKEN
        ]
    )
    return tokenizer
