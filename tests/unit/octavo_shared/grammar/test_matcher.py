"""A matcher's state is a function of the output's tokens, and where it fails there is no mask."""

import contextlib
import itertools
import json
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher, LLParserLimits
from tokenizers import decoders, models

from executor_svc.fake.tokenizer import EOS_TOKEN_ID, VOCAB_SIZE, fake_tokenizer_files
from octavo_shared.grammar import matcher as matcher_module
from octavo_shared.grammar import matcher_tokenizer
from octavo_shared.grammar.grammar import MAX_GRAMMAR_BYTES, Grammar
from octavo_shared.grammar.matcher import (
    GrammarError,
    GrammarFailedError,
    GrammarLimitError,
    MatcherTokenizer,
    NoTokenAllowedError,
    OutputMatcher,
    UnsupportedTokenizerError,
    check_grammar,
    matcher_id_of,
)
from octavo_shared.step_wire.executor_info import TokenizerFile
from tests.support.each_row import each_row
from tests.support.grammars import byte_matcher
from tests.support.tokenizers import byte_fallback_backend, byte_level_backend, tokenizer_files

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 3, "maximum": 4000},
        "tags": {"type": "array", "items": {"enum": ["röd", "grön", "blå"]}, "minItems": 1, "maxItems": 3},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "size", "tags", "next"],
    "additionalProperties": False,
}
SLOW = "(a|b)*a(a|b){12}"  # its lexer has thousands of states


def lark(text: str) -> Grammar:
    return Grammar(text.encode())


def schema_grammar(schema: object = SCHEMA) -> Grammar:
    return Grammar(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False}).encode())  # type: ignore[arg-type]


def regex(pattern: str) -> Grammar:
    return Grammar(LLMatcher.grammar_from_regex(pattern).encode())


@pytest.fixture(scope="module")
def fake() -> MatcherTokenizer:
    return MatcherTokenizer.load(fake_tokenizer_files(), (EOS_TOKEN_ID,), VOCAB_SIZE)


def allowed(matcher: OutputMatcher) -> list[int]:
    """Return the tokens of a matcher's mask."""
    row = np.full(-(-VOCAB_SIZE // 32), 0xDEADBEEF, np.uint32)
    matcher.fill_mask(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def random_output(tokenizer: MatcherTokenizer, grammar: Grammar, rng: random.Random, most: int = 80) -> list[int]:
    """Return an output that follows a grammar, drawn at random."""
    matcher, token_ids = OutputMatcher(tokenizer, grammar), list[int]()
    while len(token_ids) < most and (not token_ids or token_ids[-1] != EOS_TOKEN_ID):
        token_ids.append(rng.choice(allowed(matcher)))
        matcher.follow(token_ids)
    return token_ids


# The state is a function of the tokens


@each_row(
    *itertools.product(
        range(6), [schema_grammar(), regex(r"(\w+ ){3}[a-c]*"), lark('start: "a" x*\nx: "b" | "(" x ")"')]
    )
)
def test_whatever_way_a_matcher_came_to_an_output_its_mask_is_the_same(seed: int, grammar: Grammar) -> None:
    tokenizer = MatcherTokenizer.load(fake_tokenizer_files(), (EOS_TOKEN_ID,), VOCAB_SIZE)
    rng = random.Random(seed)
    output = random_output(tokenizer, grammar, rng)
    step_by_step = OutputMatcher(tokenizer, grammar)
    masks = []
    for length in range(len(output) + 1):
        step_by_step.follow(output[:length])
        masks.append(allowed(step_by_step))
    parts = OutputMatcher(tokenizer, grammar)  # with some masks, in pieces, by copies of copies
    for length in sorted(rng.sample(range(len(output) + 1), min(len(output), 9))):
        at_once = OutputMatcher(tokenizer, grammar)
        at_once.follow(np.array(output[:length], np.int32))
        assert allowed(at_once) == masks[length]
        parts.follow(output[:length])
        copy = parts.fork()
        copy.follow(output)
        assert allowed(copy) == masks[-1]
        assert allowed(parts.fork()) == masks[length]
        if rng.random() < 0.5:
            assert allowed(parts) == masks[length]
    assert all(token_id in mask for token_id, mask in zip(output, masks, strict=False))


def test_a_finished_object_is_json_and_then_only_the_end_may_come(fake: MatcherTokenizer) -> None:
    finished = [
        o
        for o in (random_output(fake, schema_grammar(), random.Random(s), 400) for s in range(20))
        if o[-1] == EOS_TOKEN_ID
    ]
    assert len(finished) > 5
    for output in finished:
        assert sorted(json.loads(bytes(output[:-1]).decode())) == ["name", "next", "size", "tags"]
        matcher = OutputMatcher(fake, schema_grammar())
        matcher.follow(output[:-1])
        assert allowed(matcher) == [EOS_TOKEN_ID]
        for behind in ([EOS_TOKEN_ID], [EOS_TOKEN_ID, 65], [EOS_TOKEN_ID, EOS_TOKEN_ID, 7]):  # with ignore_eos
            matcher.follow([*output[:-1], *behind])
            assert allowed(matcher) == [EOS_TOKEN_ID]


def test_every_end_of_sequence_token_ends_an_output_and_no_other_special_token_comes() -> None:
    tokenizer = MatcherTokenizer.load(fake_tokenizer_files(), (258, 257), VOCAB_SIZE)
    matcher = OutputMatcher(tokenizer, regex("(.|\n)*"))
    assert {257, 258} < {*allowed(matcher)}
    assert not {255, 256} & {*allowed(matcher)}
    matcher.follow([97, 258])
    assert allowed(matcher) == [257, 258]


# Failures


@each_row(
    (lark("nonsense"), "Expected token ':'"),
    (lark('start: "a" missing'), 'unknown name: "missing"'),
    (regex("(a"), "invalid regex"),
    (schema_grammar({"type": "nonsense"}), "nonsense"),
    (schema_grammar({"not": {}}), "not"),
    (schema_grammar({"$ref": "#"}), "no text satisfies it"),
    (Grammar(b"\xff"), "not UTF-8"),
    (Grammar(b"a" * (MAX_GRAMMAR_BYTES + 1)), "it has 262145 bytes; the limit is 262144"),
    (lark("start: " + "(" * 9000), "too deeply nested"),
)
def test_a_grammar_that_cannot_be_used_is_refused_in_words(grammar: Grammar, words: str) -> None:
    why = check_grammar(MatcherTokenizer.load(fake_tokenizer_files(), (EOS_TOKEN_ID,), VOCAB_SIZE), grammar)
    assert words in why
    assert "\n" not in why
    assert "verbose" not in why


@each_row(
    ("start: r0\n" + "\n".join(f"r{index}:r{index + 1}" for index in range(20_000)) + '\nr20000:"a"'),
    ("start: T0\n" + "\n".join(f'T{index}:"a" T{index + 1}' for index in range(15_000)) + '\nT15000:"a"'),
)
def test_the_longest_chain_of_rules_does_not_overflow_the_stack(body: str) -> None:
    tokenizer = MatcherTokenizer.load(fake_tokenizer_files(), (EOS_TOKEN_ID,), VOCAB_SIZE)
    assert MAX_GRAMMAR_BYTES * 0.9 < len(body) < MAX_GRAMMAR_BYTES
    assert check_grammar(tokenizer, lark(body)) == ""


def test_a_grammar_that_can_be_used_has_no_reason_against_it(fake: MatcherTokenizer) -> None:
    assert [check_grammar(fake, grammar) for grammar in (schema_grammar(), regex("a*"), lark('start: ""'))] == [""] * 3


def test_an_output_that_does_not_follow_its_grammar_fails_and_has_no_mask(fake: MatcherTokenizer) -> None:
    for output in ([98], [97, 97], [97, 256], [EOS_TOKEN_ID], [97, 98, 98]):
        matcher = OutputMatcher(fake, regex("ab"))
        for _ in range(2):  # and stays so
            with pytest.raises(GrammarFailedError):
                matcher.follow(output)
                allowed(matcher)


def test_where_nothing_is_allowed_there_is_no_mask(fake: MatcherTokenizer) -> None:
    with pytest.raises(NoTokenAllowedError):
        allowed(OutputMatcher(fake, schema_grammar({"$ref": "#"})))


@each_row(
    (b"", b"", 99, b'{"name":"', 0),
    (b"", b"", 3, b'{"n', 0),
    (b"", b'{"name":"abc', 99, b'{"name":"abc', 12),
    (b'{"na', b"xyz", 99, b'me":"', 0),
    (b'{"name":"', b'ab","color', 99, b'ab","size":', 5),  # allowed up to the key, which is another one
    (b'{"name":"', b'ab","color', 7, b'ab","si', 5),
    (b'{"name":"ab","size":4', b",", 99, b',"tags":["', 1),
    (b'{"name":"', bytes([97, 98]), 1, b"a", 1),
)
def test_likely_are_forced_tokens_behind_what_is_allowed_of_the_proposed_ones(
    output: bytes, proposed: bytes, most: int, likely: bytes, num_proposed: int
) -> None:
    fake = byte_matcher()
    matcher = OutputMatcher(fake, schema_grammar())
    consumed(matcher, output)
    assert matcher.likely(proposed, most) == ([*likely], num_proposed)
    masked_everywhere(matcher, [*output, *likely])
    assert matcher.retract(len(output))
    assert allowed(matcher) == allowed(consumed(OutputMatcher(fake, schema_grammar()), output))


def test_no_draft_ends_an_output(fake: MatcherTokenizer) -> None:
    matcher = consumed(OutputMatcher(fake, regex("[a-z]+")), b"ab")
    assert matcher.likely([99, EOS_TOKEN_ID, 99], 9) == ([99], 1)


def test_a_matcher_that_has_met_a_limit_has_no_drafts_and_does_not_go_back(
    fake: MatcherTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all of its limits it may compute only what the output itself needs."""
    with_fuel(monkeypatch, 300)
    matcher = masked_everywhere(OutputMatcher(fake, regex(SLOW)), b"aaaaa")
    assert matcher.likely(b"ab", 9) == ([], 0)
    matcher.follow(b"aaaaab")
    assert not matcher.retract(5)


def with_fuel(monkeypatch: pytest.MonkeyPatch, fuel: int) -> None:
    monkeypatch.setattr(matcher_module, "_STEP_LEXER_FUEL", fuel)


def masked_everywhere(matcher: OutputMatcher, output: Sequence[int]) -> OutputMatcher:
    for length in range(len(output)):
        allowed(matcher)
        matcher.follow(output[: length + 1])
    return matcher


def consumed(matcher: OutputMatcher, output: Sequence[int]) -> OutputMatcher:
    matcher.follow(output)
    return matcher


def copied(matcher: OutputMatcher, output: Sequence[int]) -> OutputMatcher:
    for sibling in (matcher.fork(), matcher.fork()):
        with contextlib.suppress(GrammarError):
            masked_everywhere(sibling, [98, 97] * 60)  # goes its own way, on what all copies share
    return masked_everywhere(matcher.fork(), output)


@each_row(*itertools.product([40, 100, 200, 300, 450, 600, 1000], [masked_everywhere, consumed, copied], [5, 40, 200]))
def test_a_limit_is_met_by_the_tokens_alone_however_the_matcher_came_to_them(
    fuel: int, way: Callable[[OutputMatcher, Sequence[int]], OutputMatcher], length: int
) -> None:
    tokenizer = MatcherTokenizer.load(fake_tokenizer_files(), (EOS_TOKEN_ID,), VOCAB_SIZE)
    output = list(b"abba" * 60)[:length]

    def outcome(take: Callable[[OutputMatcher, Sequence[int]], OutputMatcher]) -> list[int] | str:
        try:
            return allowed(take(OutputMatcher(tokenizer, regex(SLOW)), output))
        except GrammarError as error:
            return type(error).__name__

    with pytest.MonkeyPatch.context() as patch:
        with_fuel(patch, fuel)
        found, expected = outcome(way), outcome(masked_everywhere)
    if expected == GrammarLimitError.__name__ and way is consumed:
        # It computed less than a mask everywhere takes; what it allows is right all the same.
        assert found in (expected, [97, 98], [97, 98, EOS_TOKEN_ID])
    else:
        assert found == expected


def test_a_matcher_that_consumed_too_much_at_once_is_built_anew_and_goes_on(
    fake: MatcherTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library alone fails here, and then allows exactly the end of the sequence."""
    with_fuel(monkeypatch, 380)
    rng, grammar = random.Random(0), lark('start: x+\nx: /(a|b)*a(a|b){6}/ | /b(a|b)*b(a|b){9}/ | "a"')
    output = [rng.choice(b"ab") for _ in range(10)]
    alone = LLMatcher(fake.loaded, grammar.body.decode(), log_level=0, limits=LLParserLimits(step_lexer_fuel=380))
    alone.consume_tokens(output)
    row = np.zeros(9, np.uint32)
    alone.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    assert alone.is_error()
    assert np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() == [EOS_TOKEN_ID]
    matcher = OutputMatcher(fake, grammar)
    matcher.follow(output)
    assert {97, 98} <= {*allowed(matcher)}


# Tokenizers

WORDS = ("▁one", "two", "▁", "<")


@each_row(
    byte_level_backend([b"one", b" two", "ö".encode(), b"\xc3", b"  ", b"\n\n"]),
    byte_fallback_backend(WORDS),
)
def test_tokenizers_of_these_kinds_stand_for_our_bytes(backend: tokenizers.Tokenizer) -> None:
    num_tokens = backend.get_vocab_size()
    tokenizer = MatcherTokenizer.load(tokenizer_files(backend), (num_tokens - 1,), num_tokens + 30)
    assert tokenizer.num_mask_words == -(-(num_tokens + 30) // 32)
    assert check_grammar(tokenizer, regex("one two")) == ""


def metaspace() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0)], 0, byte_fallback=False))
    backend.decoder = decoders.Metaspace()
    return backend


def of_model(model: models.Model) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(model)


@each_row(
    (metaspace(), "grammars cannot use a Metaspace tokenizer; byte-level ones and those with byte fallback work"),
    (of_model(models.WordLevel({"a": 0}, "a")), "grammars cannot use a WordLevel tokenizer; byte-level ones"),
    (of_model(models.WordPiece({"a": 0}, unk_token="a")), "grammars cannot use a WordPiece tokenizer; byte-level ones"),
    (
        byte_level_backend([bytes([65 + index % 26, 65 + index // 26]) for index in range(60)]),
        "it has a token 317, but the model only 300",
    ),
)
def test_other_tokenizers_are_refused_by_name_before_anything_is_loaded(
    backend: tokenizers.Tokenizer, words: str
) -> None:
    with pytest.raises(UnsupportedTokenizerError, match=words):
        matcher_id_of(tokenizer_files(backend), (0,), 300)


@each_row(
    ((), (0,), "grammars need a tokenizer.json, and the model has none"),
    ((TokenizerFile("tokenizer.json", b"{}"),), (0,), "tokenizer.json cannot be read"),
    ((TokenizerFile("tokenizer.json", b"\xff"),), (0,), "tokenizer.json is not UTF-8"),
    (fake_tokenizer_files(), (), "grammars need an end-of-sequence token, and the model has none"),
    (fake_tokenizer_files(), (259,), "the end-of-sequence token 259 is not in the vocabulary of 259 tokens"),
)
def test_what_lacks_is_said(files: tuple[TokenizerFile, ...], eos: tuple[int, ...], words: str) -> None:
    with pytest.raises(UnsupportedTokenizerError, match=f"^{words}"):
        matcher_id_of(files, eos, VOCAB_SIZE)


def test_a_token_that_the_library_reads_in_another_way_than_we_do_is_refused() -> None:
    backend = byte_level_backend([b"one"])
    backend.decoder = decoders.Sequence([decoders.Replace("one", "two"), decoders.ByteLevel()])
    with pytest.raises(
        UnsupportedTokenizerError, match=r"its token 256 is 'two', but the grammar library reads b'one'"
    ):
        MatcherTokenizer.load(tokenizer_files(backend), (0,), 300)


def test_the_id_tells_what_decides_which_tokens_are_allowed() -> None:
    files = fake_tokenizer_files()
    one = matcher_id_of(files, (257,), 259)
    assert one == matcher_id_of(files[:1], (257, 257), 259) == MatcherTokenizer.load(files, (257,), 259).matcher_id
    assert one.startswith("llguidance-1.")
    others = {
        matcher_id_of(files, (258,), 259),
        matcher_id_of(files, (257, 258), 259),
        matcher_id_of(files, (257,), 260),
        matcher_id_of((TokenizerFile("tokenizer.json", files[0].content + b" "),), (257,), 259),
    }
    assert len({one, *others}) == 5


def test_without_llguidance_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher_tokenizer, "_llguidance_version", lambda: None)
    with pytest.raises(UnsupportedTokenizerError, match=r"^grammars need llguidance, which is not installed: pip"):
        matcher_id_of(fake_tokenizer_files(), (257,), 259)
