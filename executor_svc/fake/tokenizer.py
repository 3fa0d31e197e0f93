"""The tokenizer of the fake executor: one token a byte, three special tokens, no merges.

Token id b is the byte b. The files are as in an ordinary Hugging Face model, written as plain
JSON, so that the fake needs no tokenizer library.
"""

import functools
import json

from octavo_shared.step_wire.executor_info import TokenizerFile

IM_START_TOKEN_ID = 256
EOS_TOKEN_ID = 257
VOCAB_SIZE = 259

_SPECIAL_TOKENS = {"<|im_start|>": IM_START_TOKEN_ID, "<|im_end|>": EOS_TOKEN_ID, "<|endoftext|>": 258}

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def fake_tokenizer_files() -> tuple[TokenizerFile, ...]:
    """Return tokenizer.json, tokenizer_config.json and generation_config.json."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],  # for pairs that are scored
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "additional_special_tokens": list(_SPECIAL_TOKENS),
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    return (
        _json_file("tokenizer.json", _tokenizer()),
        _json_file("tokenizer_config.json", config),
        _json_file("generation_config.json", {"eos_token_id": EOS_TOKEN_ID}),
    )


def _tokenizer() -> dict[str, object]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token_id, "content": text, **flags} for text, token_id in _SPECIAL_TOKENS.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {**vocab, **_SPECIAL_TOKENS},
            "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    """Return the printable character that stands for each byte in byte-level vocabularies.

    Printable Latin-1 bytes stand for themselves, the others for characters from U+0100 on.
    Source: Radford et al. 2019 (GPT-2), byte-level byte-pair encoding.
    """
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in own else next(others)) for byte in range(256)]


def _json_file(name: str, content: object) -> TokenizerFile:
    return TokenizerFile(name, json.dumps(content, ensure_ascii=False, indent=1).encode())
