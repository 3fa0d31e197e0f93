"""The tokenizer of a GGUF file is the one that the file was made of: the same ids and the same text."""

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from executor_svc.checkpoint.gguf.model import GGUFModel
from executor_svc.checkpoint.pooling_modules import PoolingMode, PoolingModules
from octavo_shared.errors import ModelLoadError
from tests.support.each_row import each_row
from tests.support.gguf_tokenizers import BYTE_LEVEL, MERGES, SPECIAL, TOKENS, write_tokenizer

# What llama.cpp (build 11549) makes of texts with a small vocabulary, by the names of its cuts. Where it departs from
# a model's own tokenizer, with marks behind letters in GPT-4o's and Tekken's cut, there is no text, and null for Kimi's
# where it leaves a lower and an upper case letter together.
RECORDED = json.loads(Path(__file__).with_name("llama_cpp_ids.json").read_text(encoding="utf-8"))
TEXTS = (
    "hello he 12 1212\n\n\n12. x",
    "  12",
    "He's he'll 3,000\tyes\r\n",
    "d\u00e9j\u00e0 \u65e5\u672c\u8a9e \U0001f642",
    "<s>a</s> <|im_end|>\n",
)
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "he", "\u2581he", "ll", "hell", "hello"]
PIECES += ["\u2581", *"helo12.x,3ays"]
# Of Llama 3, as its tokenizer.json has it.
LLAMA3_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(*, first: bool = False, takes_words_whole: bool = False, cut: Any = None) -> tokenizers.Tokenizer:
    """Return an original: byte-level BPE with a cut of its own."""
    vocab = {token: index for index, token in enumerate(TOKENS)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, MERGES, ignore_merges=takes_words_whole))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not isinstance(cut, pre_tokenizers.Split))
    tokenizer.pre_tokenizer = level if cut is None else pre_tokenizers.Sequence([cut, level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    if first:
        bos = ("<s>", TOKENS.index("<s>"))
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s>:1 $B:1", [bos])
    return tokenizer


def sentencepiece() -> tokenizers.Tokenizer:
    """Return an original as those of Llama 2: BPE on spaces that are written, with bytes for what is unknown."""
    merges = [("h", "e"), ("\u2581", "he"), ("l", "l"), ("he", "ll"), ("hell", "o")]
    vocab = {token: index for index, token in enumerate(PIECES)}
    model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s>:1 $B:1", [("<s>", 1)])
    return tokenizer


SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": PIECES,
    "tokenizer.ggml.scores": [-float(index) for index in range(len(PIECES))],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(PIECES) - 259),
    "tokenizer.ggml.bos_token_id": 1,
}
DIGITS = pre_tokenizers.Digits(individual_digits=True)
SPLIT = pre_tokenizers.Split(Regex(LLAMA3_CUT), "isolated")


def tokenizer_of(path: Path, values: dict[str, Any], architecture: str = "llama") -> tokenizers.Tokenizer:
    """Return what is made of a file with these values."""
    write_tokenizer(path, values, architecture)
    return tokenizers.Tokenizer.from_buffer(GGUFModel(path).tokenizer_files()[0].content)


@each_row(
    (BYTE_LEVEL | {"tokenizer.ggml.pre": "gpt-2"}, byte_level()),
    (BYTE_LEVEL | {"tokenizer.ggml.pre": "smollm"}, byte_level(cut=DIGITS)),
    (BYTE_LEVEL | {"tokenizer.ggml.pre": "llama-bpe"}, byte_level(first=True, takes_words_whole=True, cut=SPLIT)),
    (
        BYTE_LEVEL | {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False},
        byte_level(takes_words_whole=True, cut=SPLIT),
    ),
    (SENTENCEPIECE, sentencepiece()),
)
def test_it_is_the_original(values: dict[str, Any], original: tokenizers.Tokenizer, *, tmp_path: Path) -> None:
    made = tokenizer_of(tmp_path / "m.gguf", values)

    for text in TEXTS:
        ids = original.encode(text).ids
        assert made.encode(text).ids == ids, text
        assert made.decode(ids, skip_special_tokens=True) == original.decode(ids, skip_special_tokens=True)


def test_gemma_3_from_ollamas_converter_gets_the_chat_template_that_it_lacks(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "m.gguf", SENTENCEPIECE, "gemma3")
    [template] = [
        file.content.decode() for file in GGUFModel(tmp_path / "m.gguf").tokenizer_files() if "template" in file.name
    ]
    chat = [
        {"role": role, "content": f" {words}\n"}
        for role, words in (("system", "be brief"), ("user", "hi"), ("assistant", "yes?"), ("user", "bye"))
    ]
    rendered = [
        jinja2.Template(template).render(bos_token="<bos>", messages=messages, add_generation_prompt=True)
        for messages in (chat, chat[1:2])
    ]
    assert rendered == [
        "<bos><start_of_turn>user\nbe brief\n\nhi<end_of_turn>\n<start_of_turn>model\nyes?<end_of_turn>\n"
        "<start_of_turn>user\nbye<end_of_turn>\n<start_of_turn>model\n",
        "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    ]


def test_runs_of_spaces_are_taken_whole_as_sentencepiece_does(tmp_path: Path) -> None:
    """The longest first, from the left: merges alone would pair equal halves. llama.cpp gives the same for Gemma."""
    runs, kinds = ["  ", "   ", "     "], [2, 3, 3] + [6] * 256 + [1] * (len(PIECES) - 259)
    values = SENTENCEPIECE | {
        "tokenizer.ggml.tokens": [*PIECES, *runs],
        "tokenizer.ggml.scores": [-float(index) for index in range(len(PIECES) + len(runs))],
        "tokenizer.ggml.token_type": [*kinds, *[4] * len(runs)],
    }
    made = tokenizer_of(tmp_path / "m.gguf", values, "gemma3")

    found = made.encode("a" + 12 * " " + "x")
    assert found.tokens == ["<s>", "a", 5 * "\u2581", 5 * "\u2581", 2 * "\u2581", "x"]
    assert made.decode(found.ids) == "a" + 12 * " " + "x"


@each_row(True, False)
def test_gemma_4_merges_on_spaces_that_are_written_and_always_begins(says_so: bool, *, tmp_path: Path) -> None:
    """llama.cpp (build 11434) gives the same ids."""
    merges = [("h", "e"), ("\u2581", "he"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("\n", "\n"), ("\u2581", "\u2581")]
    pieces = [*PIECES, "\n", "\n\n", "\u2581\u2581"]
    values = SENTENCEPIECE | {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [-1000.0] * len(pieces),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": says_so,
        "tokenizer.ggml.add_space_prefix": False,
    }
    made = tokenizer_of(tmp_path / "m.gguf", values, "gemma4")

    assert made.encode("he\n\nhello  \u65e5").tokens == [
        *("<s>", "he", "\n\n", "hello", "\u2581\u2581"),
        *("<0xE6>", "<0x97>", "<0xA5>"),
    ]
    for text in TEXTS:
        assert made.decode(made.encode(text.replace("<s>", "")).ids) == text.replace("<s>", "").replace("</s>", "")


@each_row(*((pre, row["settings"], row["ids"]) for row in RECORDED["rows"] for pre in row["pre"]))
def test_ids_are_those_of_llama_cpp(
    pre: str, settings: dict[str, Any], ids: list[list[int] | None], *, tmp_path: Path
) -> None:
    tokens = RECORDED["tokens"]
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": RECORDED["merges"],
        "token_type": [1] * (len(tokens) - 4) + [3] * 4,
        "bos_token_id": tokens.index("<s>"),
        "eos_token_id": tokens.index("</s>"),
        **settings,
    }
    made = tokenizer_of(tmp_path / "m.gguf", {f"tokenizer.ggml.{key}": value for key, value in values.items()})

    made_ids = [made.encode(text).ids for text in RECORDED["texts"]]
    assert [of_text and own for own, of_text in zip(made_ids, ids, strict=True)] == ids
    assert made.get_vocab_size() == len(tokens)


@each_row((None, None), (0, None), (1, "mean"), (2, "cls"), (3, "last"))
def test_pooling_is_what_the_file_says(kind: int | None, mode: PoolingMode | None, *, tmp_path: Path) -> None:
    """Qwen3-Embedding's files say 3, and a token that ends each text."""
    said = {} if kind is None else {"llama.pooling_type": kind}
    write_tokenizer(tmp_path / "m.gguf", BYTE_LEVEL | said, "llama")

    assert GGUFModel(tmp_path / "m.gguf").pooling() == (mode and PoolingModules(mode, is_normalized=True))


def test_every_cut_that_is_accepted_has_ids_of_llama_cpp(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "m.gguf", BYTE_LEVEL | {"tokenizer.ggml.pre": "?"}, "llama")
    with pytest.raises(ModelLoadError) as refused:
        GGUFModel(tmp_path / "m.gguf").tokenizer_files()

    accepted = str(refused.value).partition("supported are ")[2].split(", ")
    assert accepted == sorted({pre for row in RECORDED["rows"] for pre in row["pre"]})


@each_row(
    ({}, [1], []),
    ({"bos_token_id": None}, [1], []),  # llama.cpp's 1 and 2
    ({"token_type": None}, [1], []),
    ({"add_eos_token": True}, [1], [2]),
    ({"add_eos_token": True, "add_bos_token": False}, [], [2]),
)
def test_sentencepiece_begins_and_ends_as_the_file_says(
    settings: dict[str, Any], first: list[int], last: list[int], *, tmp_path: Path
) -> None:
    changed = SENTENCEPIECE | {f"tokenizer.ggml.{key}": value for key, value in settings.items()}
    made = tokenizer_of(tmp_path / "m.gguf", {key: value for key, value in changed.items() if value is not None})

    inner = sentencepiece().encode("hello he", add_special_tokens=False).ids
    assert made.encode("hello he").ids == [*first, *inner, *last]
    assert made.encode("hello he", "hello he").ids == [*first, *inner, *last, *first, *inner, *last]
