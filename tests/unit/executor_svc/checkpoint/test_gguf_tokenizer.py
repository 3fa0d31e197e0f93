"""The tokenizer of a GGUF file is the one that the file was made of: the same ids and the same text."""

from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from executor_svc.checkpoint.gguf.model import GGUFModel
from tests.support.each_row import each_row
from tests.support.gguf_tokenizers import BYTE_LEVEL, MERGES, SPECIAL, TOKENS, write_tokenizer

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
