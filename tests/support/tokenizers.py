"""Small tokenizers made on the spot, as the files that a model directory would hold."""

import json
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from octavo_shared.step_wire.executor_info import TokenizerFile
from scheduler_svc.front.text.tokenizer import Tokenizer

BOS, EOS = "<|start|>", "<|end|>"


def byte_level_alphabet() -> list[str]:
    """The character that stands for each of the 256 bytes (as GPT-2 does it)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]


def byte_level_backend(pieces: Iterable[bytes] = ()) -> tokenizers.Tokenizer:
    """Tokens: the 256 bytes (id = byte), then `pieces`, which may be any bytes, then BOS and EOS."""
    alphabet = byte_level_alphabet()
    vocab = {character: byte for byte, character in enumerate(alphabet)}
    for piece in pieces:
        vocab.setdefault("".join(alphabet[byte] for byte in piece), len(vocab))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    return tokenizer


def byte_fallback_backend(words: Iterable[str]) -> tokenizers.Tokenizer:
    """Tokens as sentencepiece makes them: words with a leading "▁", and <0x00> to <0xFF>."""
    scores = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    scores += [(word, -1.0) for word in dict.fromkeys(["▁", *words])]
    tokenizer = tokenizers.Tokenizer(models.Unigram(scores, 0, byte_fallback=True))
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.add_special_tokens([BOS, EOS])
    return tokenizer


def tokenizer_files(backend: tokenizers.Tokenizer, chat_template: str | None = None) -> tuple[TokenizerFile, ...]:
    """Return tokenizer.json and tokenizer_config.json."""
    eos = {"__type": "AddedToken", "content": EOS, "special": True}
    config: dict[str, object] = {"bos_token": BOS, "eos_token": eos}
    if chat_template is not None:
        config["chat_template"] = chat_template
    return (
        TokenizerFile("tokenizer.json", backend.to_str().encode()),
        TokenizerFile("tokenizer_config.json", json.dumps(config).encode()),
    )


def make_tokenizer(backend: tokenizers.Tokenizer, chat_template: str | None = None) -> Tokenizer:
    """Return the service's tokenizer over `backend`."""
    return Tokenizer(tokenizer_files(backend, chat_template))


def byte_level_ids(tokenizer: Tokenizer, pieces: Iterable[bytes]) -> list[int]:
    """Return the tokens that stand for `pieces`."""
    alphabet = byte_level_alphabet()
    token_ids = [tokenizer.id_of("".join(alphabet[byte] for byte in piece)) for piece in pieces]
    assert None not in token_ids
    return [token_id for token_id in token_ids if token_id is not None]
