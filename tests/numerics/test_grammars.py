"""Outputs that follow a grammar: only allowed tokens, the same bits alone and in any batch, and neighbours unchanged.

By the fake worker, by models in C and in torch, by one whose steps are launched ahead as on a GPU, and by two ranks.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from llguidance import LLMatcher

from executor_svc.config import ExecutorConfig
from executor_svc.drafts.drafting import RowCost
from executor_svc.drafts.proposer import PromptLookup
from executor_svc.fake.tokenizer import EOS_TOKEN_ID, VOCAB_SIZE, fake_tokenizer_files
from executor_svc.fake.worker import FakeWorker
from executor_svc.models.decoder import Decoder
from executor_svc.worker.interface import RunningStep, Worker
from executor_svc.worker.loading import load_worker
from executor_svc.worker.step_timer import HostTimer
from octavo_shared.errors import InvalidStepError
from octavo_shared.grammar import matcher as matcher_module
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.grammar.matcher import MatcherTokenizer, OutputMatcher
from octavo_shared.step_wire.step import (
    Admission,
    Fork,
    GrammarLoad,
    Resources,
    RowFlag,
    SamplingRow,
    Step,
    StepResult,
    TableDelta,
    pairs,
)
from octavo_shared.step_wire.token_rules import TokenRules, pack_mask
from tests.numerics.driver import StepDriver
from tests.numerics.launch_ahead import draw_in_torch
from tests.numerics.threaded_group import ThreadedRanks
from tests.numerics.tiny_models import save_tiny_model
from tests.support.knowing import Knowing

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 99},
        "word": {"type": "string", "pattern": "^[a-f]{1,4}$"},
        "kind": {"enum": ["röd", "blå"]},
    },
    "required": ["id", "word", "kind"],
    "additionalProperties": False,
}
OBJECT = Grammar(LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False}).encode())
LETTERS = Grammar(LLMatcher.grammar_from_regex("[a-z]+").encode())
BROKEN, NOTHING = Grammar(b"nonsense"), Grammar(b'{"grammars":[{"json_schema":{"$ref":"#"}}]}')
SLOW = Grammar(LLMatcher.grammar_from_regex("(a|b)*a(a|b){12}").encode())  # its lexer has thousands of states
GRAMMARS = (OBJECT, LETTERS, BROKEN, NOTHING, SLOW)
NUM_TOKENS = 60


@pytest.fixture(params=["fake", "fake with threads", "one call", "torch", "as on a GPU", "two ranks"])
def worker(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    if request.param.startswith("fake"):
        yield FakeWorker(has_grammar_threads=request.param != "fake", eos_probability=0.01)
        return
    if request.param == "as on a GPU":
        monkeypatch.setattr("executor_svc.worker.assembly.device_sampling", lambda _: draw_in_torch)
    save_tiny_model(tmp_path, vocab_size=VOCAB_SIZE + 6, eos_token_id=EOS_TOKEN_ID, max_position_embeddings=256)
    for file in fake_tokenizer_files():
        (tmp_path / file.name).write_bytes(file.content)
    kernels = "torch" if request.param in ("torch", "as on a GPU") else "auto"
    config = ExecutorConfig(
        model=str(tmp_path), block_size_tokens=4, num_device_blocks=600, max_num_seqs=16, cpu_kernels=kernels
    )
    if request.param == "two ranks":
        ranks = ThreadedRanks(config, 2)
        yield ranks
        ranks.close()
    else:
        yield load_worker(config)


@dataclass(eq=False)
class Output:
    """An output of a play: where it begins, and what came of it."""

    prompt: bytes
    grammar: Grammar | None = None
    sampling: SamplingRow = field(default_factory=SamplingRow)
    output: list[int] = field(default_factory=list)
    rules: TokenRules | None = None
    logprobs: list[float] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)


class Play:
    """Runs sequences side by side on a worker; slots in their order."""

    def __init__(self, worker: Worker, grammars: Sequence[Grammar] = GRAMMARS) -> None:
        worker.reset()
        self.driver = StepDriver(worker)
        self.launched: list[tuple[RunningStep, list[Output]]] = []
        self.decoding: list[Output] = []
        self.num_in_runs = 0  # tokens that came in the same step as the one before
        loads = tuple(GrammarLoad(slot, grammar) for slot, grammar in enumerate(grammars))
        self.launch(TableDelta(grammar_loads=loads), [])

    def launch(self, delta: TableDelta, sampled: Sequence[Output]) -> None:
        self.driver.last_step_id += 1
        step = self.driver.worker.launch(Step(1, self.driver.last_step_id, delta))
        self.launched.append((step, list(sampled)))

    def finish(self) -> None:
        for step, sampled in self.launched:
            self._take(step.finish(), sampled)
        self.launched.clear()

    def _take(self, result: StepResult, sampled: list[Output]) -> None:
        counts = [1] * len(sampled) if result.token_counts is None else result.token_counts.tolist()
        assert len(result.sampled_token_ids) == sum(counts)
        token_ids = iter(result.sampled_token_ids.tolist())
        logprobs = repeat(0.0) if result.logprobs is None else iter(result.logprobs.tolist())
        for row, (sequence, count) in enumerate(zip(sampled, counts, strict=True)):
            sequence.output += islice(token_ids, count)
            sequence.logprobs += islice(logprobs, count)
            flag = 0 if result.row_flags is None else int(result.row_flags[row])
            sequence.flags += [0] * (count - 1) + [flag] if count else [flag]
            self.num_in_runs += max(0, count - 1)

    def admission(self, slot: int, sequence: Output) -> Admission:
        entry = self.driver.admission(
            slot, [*sequence.prompt, *sequence.output], NUM_TOKENS + 8, sequence.sampling, len(sequence.prompt)
        )
        entry.token_rules = sequence.rules
        if sequence.grammar is not None:
            entry.resources = Resources(GRAMMARS.index(sequence.grammar))
        return entry

    def admit(self, sequences: Sequence[Output], first_slot: int = 0, forks: tuple[Fork, ...] = ()) -> None:
        """Run all that is known of sequences in one step, which samples them behind those that decode."""
        entries = tuple(self.admission(first_slot + index, sequence) for index, sequence in enumerate(sequences))
        chunks = pairs(*[(entry.slot, len(entry.token_ids)) for entry in entries])
        self.launch(TableDelta(admissions=entries, prefill_chunks=chunks, forks=forks), [*self.decoding, *sequences])
        self.decoding += sequences

    def decode(self, num_steps: int, num_ahead: int = 1) -> None:
        for index in range(num_steps):
            self.launch(TableDelta(), self.decoding)
            if index % num_ahead == num_ahead - 1:
                self.finish()
        self.finish()


def alone(worker: Worker, sequence: Output, num_tokens: int = NUM_TOKENS) -> Output:
    """Return the sequence as it is when nothing runs beside it."""
    own = replace(sequence, output=[*sequence.output], logprobs=[], flags=[])
    play = Play(worker)
    play.admit([own])
    play.decode(num_tokens - 1 - len(sequence.output))
    return own


def assert_same(worker: Worker, found: Output, expected: Output) -> None:
    assert (found.output, found.flags) == (expected.output, expected.flags)
    if worker.info.is_invariant:
        assert found.logprobs == expected.logprobs
    else:
        np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-4)


def assert_follows(sequence: Output) -> None:
    """Fail unless each token was allowed, and what is finished is what its schema says."""
    assert sequence.grammar is not None
    tokenizer = MatcherTokenizer.load(fake_tokenizer_files(), (EOS_TOKEN_ID,), VOCAB_SIZE)
    matcher, row = OutputMatcher(tokenizer, sequence.grammar), np.zeros(9, np.uint32)
    for length, token_id in enumerate(sequence.output):
        matcher.follow(sequence.output[:length])
        matcher.fill_mask(row)
        assert row[token_id // 32] >> token_id % 32 & 1, (length, token_id)
    if sequence.grammar is OBJECT:
        end = sequence.output.index(EOS_TOKEN_ID)
        Draft202012Validator(SCHEMA).validate(json.loads(bytes(sequence.output[:end]).decode()))
        assert {*sequence.output[end:]} == {EOS_TOKEN_ID}


def eight(vocab_size: int) -> list[Output]:
    """Return guided and plain outputs of many kinds."""
    hot = SamplingRow(temperature=1.5, seed=7, num_logprobs=0)
    allowed = TokenRules(allowed_mask=pack_mask(np.arange(0x61, 0x70, dtype=np.int32), vocab_size))
    return [
        Output(b"greedy", OBJECT),
        Output(b"plain greedy"),
        Output(b"hot", OBJECT, hot),
        Output(b"plain hot", None, hot),
        Output(b"letters", LETTERS, SamplingRow(temperature=0.8, top_k=5, top_p=0.9, seed=3)),
        Output(b"penalties", OBJECT, SamplingRow(presence_penalty=0.5, repetition_penalty=1.3, num_logprobs=2)),
        Output(b"plain with penalties", None, SamplingRow(frequency_penalty=0.5)),
        Output(b"two masks", LETTERS, SamplingRow(temperature=1.0, seed=9), rules=allowed),
    ]


@pytest.mark.parametrize("worker", ["as on a GPU"], indirect=True)
def test_a_guided_row_waits_once_when_the_forward_pass_is_launched(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    play, events = Play(worker), list[str]()
    play.finish()
    forward, wait = Decoder.forward, HostTimer.wait

    def watched_forward(*arguments: Any) -> torch.Tensor:
        events.append("forward")
        return forward(*arguments)

    def watched_wait(timer: HostTimer) -> None:
        events.append("wait")
        wait(timer)

    monkeypatch.setattr(Decoder, "forward", watched_forward)
    monkeypatch.setattr(HostTimer, "wait", watched_wait)
    play.admit([Output(b"plain"), Output(b"penalties", None, SamplingRow(frequency_penalty=0.5))])
    play.launch(TableDelta(), play.decoding)
    play.launch(TableDelta(), play.decoding)
    assert events == ["forward"] * 3
    play.admit([Output(b"guided", LETTERS)], first_slot=2)
    play.launch(TableDelta(), play.decoding)
    assert events[3:] == ["forward", "wait"] * 2


def test_every_token_is_allowed_with_the_same_bits_alone_and_beside_others(worker: Worker) -> None:
    sequences = eight(worker.info.vocab_size)
    lone = [alone(worker, sequence) for sequence in sequences]
    play = Play(worker)
    play.admit(sequences[:3])
    play.finish()
    play.decode(5, num_ahead=3)
    play.admit(sequences[3:], first_slot=3)
    play.decode(NUM_TOKENS - 7, num_ahead=4)
    for sequence, expected in zip(sequences, lone, strict=True):
        length = len(sequence.output)
        assert length >= NUM_TOKENS - 6
        shorter = replace(expected, output=expected.output[:length], flags=[0] * length)
        shorter.logprobs = expected.logprobs[:length]
        if sequence.sampling.num_logprobs < 0:
            sequence.logprobs = shorter.logprobs  # others of the step may have asked
        assert_same(worker, sequence, shorter)
        if sequence.grammar is not None:
            assert_follows(expected)


@pytest.mark.parametrize("worker", ["one call", "two ranks"], indirect=True)
@pytest.mark.parametrize("proposes", [True, False], ids=["drafts that are often right", "forced tokens alone"])
def test_drafts_leave_what_follows_a_grammar_as_it_is(
    worker: Worker, proposes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matcher_module, "_STEP_LEXER_FUEL", 300)
    monkeypatch.setattr(matcher_module, "_TIGHTER", 2)
    slow = Output(b"slow", SLOW, SamplingRow(temperature=1.0, seed=2))
    sequences = [*eight(worker.info.vocab_size), slow, Output(b"slow too", SLOW), Output(b"two", NOTHING)]
    lone = [alone(worker, sequence) for sequence in sequences]
    texts = [[*sequence.prompt, *sequence.output] for sequence in lone] if proposes else []
    knowing = Knowing(texts, lambda token_id: token_id ^ 3)  # which a grammar often allows too
    monkeypatch.setattr(PromptLookup, "propose", knowing.propose)
    monkeypatch.setattr(RowCost, "share", lambda *_: 0.001)

    play = Play(worker)
    play.admit(sequences)
    delta = TableDelta(allowances=pairs(*((slot, 8) for slot in range(len(sequences)))))
    while play.decoding:
        play.launch(delta, play.decoding)
        play.finish()
        ended = [each for each in play.decoding if any(each.flags) or len(each.output) > NUM_TOKENS - 8]
        delta = TableDelta(released_slots=np.array([sequences.index(each) for each in ended], np.int32))
        play.decoding = [each for each in play.decoding if each not in ended]

    assert play.num_in_runs > (100 if proposes else 20)
    for sequence, expected in zip(sequences, lone, strict=True):
        length = sum(flag == 0 for flag in sequence.flags)
        assert sequence.output[:length] == expected.output[:length]
        assert sequence.flags == expected.flags[: len(sequence.flags)]
        if sequence.sampling.num_logprobs >= 0 and worker.info.is_invariant:
            assert sequence.logprobs[:length] == expected.logprobs[:length]
    assert RowFlag.GRAMMAR_LIMIT in slow.flags


def test_what_goes_on_elsewhere_and_what_is_forked_has_the_same_tokens(worker: Worker) -> None:
    sampling = SamplingRow(temperature=1.0, seed=5, num_logprobs=0)
    whole = alone(worker, Output(b"prompt", OBJECT, sampling))
    assert_follows(whole)
    for length in (1, 5, 17, NUM_TOKENS - 2):  # after a preemption, on another executor, behind the end
        rest = alone(worker, Output(b"prompt", OBJECT, sampling, whole.output[:length]))
        rest.logprobs, rest.flags = whole.logprobs[:length] + rest.logprobs, whole.flags[:length] + rest.flags
        assert_same(worker, rest, whole)

    play = Play(worker)
    outputs = [Output(b"prompt", OBJECT, replace(sampling, output_index=index)) for index in range(3)]
    generation = int(play.driver.worker.table.generation[8]) + 1
    # Two are forked in the step that ends the prompt; they decode in blocks of their own.
    forks = tuple(Fork(0, 8 + index, generation, outputs[index].sampling) for index in (1, 2))
    entry = play.admission(0, outputs[0])
    chunk = pairs((0, len(entry.token_ids)))
    play.launch(TableDelta(admissions=(entry,), prefill_chunks=chunk, forks=forks), outputs)
    copies = [play.driver.take_blocks(len(entry.block_ids) * play.driver.worker.info.block_size_tokens) for _ in forks]
    replaced = [
        (fork.slot, index, int(block))
        for fork, blocks in zip(forks, copies, strict=True)
        for index, block in enumerate(blocks)
    ]
    copied = [
        (int(entry.block_ids[index]), block)
        for _, index, block in replaced
        if index <= len(outputs[0].prompt) // play.driver.worker.info.block_size_tokens
    ]
    play.driver.last_step_id += 1
    step = Step(
        1, play.driver.last_step_id, TableDelta(replaced_blocks=pairs(*replaced)), blocks_to_copy=pairs(*copied)
    )
    play.launched.append((play.driver.worker.launch(step), outputs))
    play.decoding = outputs
    play.decode(NUM_TOKENS - 2, num_ahead=2)
    for sequence in outputs:
        assert_same(worker, sequence, alone(worker, Output(b"prompt", OBJECT, sequence.sampling)))
        assert_follows(sequence)
    assert len({tuple(sequence.output) for sequence in outputs}) == 3


def test_an_output_that_cannot_go_on_has_a_flag_and_its_neighbours_notice_nothing(worker: Worker) -> None:
    a_is_banned = TokenRules(banned_token_ids=np.array([ord("{")], np.int32))
    short = TokenRules(stop_token_ids=np.array([EOS_TOKEN_ID], np.int32))
    broken: list[tuple[Output, list[int]]] = [
        (Output(b"one", BROKEN), [RowFlag.GRAMMAR_FAILED] * 6),
        (Output(b"two", NOTHING), [RowFlag.NO_TOKEN_ALLOWED] * 6),
        (Output(b"three", LETTERS, output=[*b"ab9"]), [RowFlag.GRAMMAR_FAILED] * 6),
        (Output(b"four", OBJECT, rules=a_is_banned), [RowFlag.NO_TOKEN_ALLOWED]),
        (Output(b"five", OBJECT, SamplingRow(temperature=1.0, seed=1, min_tokens=99), rules=short), [0] * 6),
    ]
    neighbours = [Output(b"plain"), Output(b"guided", OBJECT)]
    play = Play(worker)
    play.admit([neighbours[0], *(sequence for sequence, _ in broken), neighbours[1]])
    play.decode(NUM_TOKENS - 1, num_ahead=2)
    for sequence, flags in broken:
        assert sequence.flags[: len(flags)] == flags, sequence.prompt
    # The schema ends before min_tokens: then its end is ruled out, and nothing else may come.
    five = broken[-1][0]
    assert next(flag for flag in five.flags if flag) == RowFlag.NO_TOKEN_ALLOWED
    for sequence in neighbours:
        assert_same(worker, sequence, alone(worker, Output(sequence.prompt, sequence.grammar)))


def test_a_matcher_at_its_limit_is_told(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher_module, "_STEP_LEXER_FUEL", 20)
    sequence = alone(worker, Output(b"prompt", SLOW), 9)
    assert RowFlag.GRAMMAR_LIMIT in sequence.flags
    assert {*sequence.flags[sequence.flags.index(RowFlag.GRAMMAR_LIMIT) :]} == {RowFlag.GRAMMAR_LIMIT}


def test_candidates_of_beams_are_allowed_tokens(worker: Worker) -> None:
    play = Play(worker)
    beam = SamplingRow(num_candidates=4)
    driver = play.driver
    entry = replace(driver.admission(0, list(b"prompt"), 40, beam), resources=Resources(0))
    result = driver.execute(TableDelta(admissions=(entry,), prefill_chunks=pairs((0, 6))))
    output: list[int] = []
    for _ in range(8):
        assert result.candidate_token_ids is not None
        assert result.candidate_logprobs is not None
        found = result.candidate_token_ids[np.isfinite(result.candidate_logprobs)].tolist()
        output.append(found[-1])
        delta = TableDelta(appended_tokens=pairs((0, found[-1])), activated_slots=np.zeros(1, np.int32))
        result = driver.execute(delta)
    assert bytes(output).startswith(b'{"id":')


def test_a_body_above_the_limit_is_refused(worker: Worker) -> None:
    worker.reset()
    load = GrammarLoad(3, Grammar(b"a" * (worker.info.max_grammar_bytes + 1)))
    with pytest.raises(InvalidStepError, match="the grammar for grammar slot 3 has 262145 bytes; the limit is 262144"):
        worker.launch(Step(1, 1, TableDelta(grammar_loads=(load,))))


def test_steps_without_grammars_never_meet_the_library(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MatcherTokenizer, "load", lambda *_: pytest.fail("loaded"))
    play = Play(worker, grammars=())
    play.admit([Output(b"plain")])
    play.decode(3)
