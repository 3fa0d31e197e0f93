"""Drafts change no bit: random requests, each alone without drafts, then all together with drafts, by random schedules.

The drafts are those of a proposer that knows what comes and errs on purpose, or those of prompt lookup. A head of the
model's own drafts too, and what it says is compared with what it says of a sequence alone. Whatever a request can ask
for is drawn. The longer campaigns:

    python -m pytest -m slow tests/e2e/test_drafts.py -k tiny

has 200 requests of each tiny model, `-k demo` as many of the demo model; `OCTAVO_TEST_DRAFTED_REQUESTS=5000` before it
has more.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as FileType
from transformers import AutoTokenizer

from executor_svc.drafts.drafting import RowCost
from executor_svc.drafts.mtp import Mtp, MtpRunner
from executor_svc.drafts.proposer import PromptLookup, Proposer
from executor_svc.native.build import find_library
from executor_svc.worker.interface import Worker
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.step import NO_LOGPROBS, Int32Array, SamplingRow, TableDelta, pairs
from octavo_shared.step_wire.token_rules import TokenRules, pack_mask, pad_words
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.request.parameters import BeamSearchParams, StopConditions
from tests.e2e.scenes import (
    ALL_AT_ONCE,
    BLOCK_SIZE,
    BLOCK_SIZES,
    NUM_BLOCKS,
    SECOND_WAVE_ROUND,
    Scene,
    fewest_blocks,
    knowing,
    random_schedule,
)
from tests.numerics.architectures import VOCAB_SIZE, save_tiny_architecture
from tests.numerics.driver import MOST_HOST_BLOCKS, StepDriver
from tests.numerics.family_architectures import FAMILY_ARCHITECTURES
from tests.numerics.mtp_reference import MtpReference
from tests.numerics.real_model import RealModel
from tests.support.gguf_files import of_type, write_gguf_of
from tests.support.knowing import Knowing
from tests.support.schedules import GREEDY, Request, Schedule

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_REQUESTS = int(os.environ.get("OCTAVO_TEST_DRAFTED_REQUESTS", "200"))
REQUESTS_OF_A_PLAY = 20
MOST_DRAFTS = (1, 3, 7)
# A quarter of so few blocks would be hardly a saved state: nothing would be swapped, and few prefixes found.
STATE_CACHE_GIB = 2**-10
EOS = 2

# By what is special to them: the architecture, its settings, those of the executor.
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {}, {}),
    "Gemma 3: windows, soft caps": (
        "Gemma3ForCausalLM",
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0},
        {},
    ),
    "BLOOM: ALiBi, bfloat16": ("BloomForCausalLM", {}, {"compute_dtype": "bfloat16"}),
    "Mixtral: experts, a cache in int8": ("MixtralForCausalLM", {}, {"kv_cache_dtype": "int8"}),
    "Llama in a file of GGUF": ("LlamaForCausalLM", {"intermediate_size": 64}, {}),
    "Qwen 3.5: delta nets, states": ("Qwen3_5ForCausalLM", {}, {}),
    "Qwen 3.5: delta nets, states, a head that drafts": ("Qwen3_5ForCausalLM", {}, {"draft_method": "mtp"}),
    "LFM2: short convolutions, states": ("Lfm2ForCausalLM", {}, {}),
    "Granite 4: Mamba-2, states": ("GraniteMoeHybridForCausalLM", {}, {}),
}


# What is drawn -----------------------------------------------------------------------------------


def random_prompt(random: np.random.Generator, text: list[int]) -> list[int]:
    """Return a piece of a text, often one that others begin with too, sometimes what repeats itself."""
    begin = int(random.choice([0, 0, int(random.integers(len(text) - 50))]))
    if random.random() < 0.4:
        return (text[begin : begin + int(random.integers(2, 7))] * 20)[: int(random.integers(6, 40))]
    return text[begin:][: int(random.integers(1, 50))]


def random_rules(random: np.random.Generator, ids: list[int], stops: set[int]) -> TokenRules:
    """Return rules of all kinds; `ids` are tokens that are worth a rule, as they are likely."""
    some = [np.array(sorted(set(random.choice(ids, size).tolist())), np.int32) for size in (4, 3)]
    words = [random.choice(ids, int(size)).tolist() for size in random.integers(2, 4, 3)]
    is_there = random.random(4) < 0.5
    allowed = np.unique(np.concatenate((random.permutation(ids)[: max(20, len(ids) // 2)], [EOS]))).astype(np.int32)
    return TokenRules(
        biased_token_ids=some[0] if is_there[0] else some[0][:0],
        biases=random.normal(0, 3, len(some[0]) if is_there[0] else 0).astype(np.float32),
        stop_token_ids=np.array(sorted(stops), np.int32),
        banned_token_ids=some[1] if is_there[1] else some[1][:0],
        banned_words=pad_words(words if is_there[2] else []),
        allowed_mask=pack_mask(allowed, int(max(ids)) + 1) if is_there[3] and max(ids) + 1 == VOCAB_SIZE else None,
    )


def random_sampling(random: np.random.Generator) -> SamplingRow:
    """Return parameters of which most are neutral, each now and then."""
    values = {
        "temperature": (0.7, 1.0, 1.5),
        "top_k": (5, 40),
        "top_p": (0.5, 0.9),
        "min_p": (0.02, 0.1),
        "typical_p": (0.4, 0.9),
        "repetition_penalty": (0.8, 1.3),
        "presence_penalty": (-0.7, 1.0),
        "frequency_penalty": (-0.4, 0.8),
        "no_repeat_ngram_size": (2, 3),
        "min_tokens": (3, 9, 30),
        "num_logprobs": (0, 1, 4),
    }
    shares = {"temperature": 0.7, "num_logprobs": 0.6}
    drawn = {name: random.choice(of).item() for name, of in values.items() if random.random() < shares.get(name, 0.25)}
    return SamplingRow(seed=int(random.integers(2**63)), **drawn)


def random_request(random: np.random.Generator, text: list[int]) -> Request:
    """Return a request that asks for anything; `text` are tokens that prompts are pieces of."""
    ids = sorted(set(text))
    prompt = random_prompt(random, text)
    max_tokens = int(random.integers(1, 25))
    if random.random() < 0.5:  # the output fills its last block
        max_tokens += -(len(prompt) + max_tokens) % BLOCK_SIZE
    conditions = StopConditions(
        max_tokens,
        frozenset(random.choice(ids, int(random.choice([0, 0, 2]))).tolist()),
        ignore_eos=bool(random.integers(2)),
    )
    salt = int(random.random() < 0.2)
    if random.random() < 0.05:
        return Request(prompt, conditions, GREEDY, beam_search=BeamSearchParams(2, 2), cache_salt=salt)
    stops = {*conditions.stop_token_ids, *([] if conditions.ignore_eos else [EOS])}
    rules = random_rules(random, ids, stops)
    return Request(
        prompt,
        conditions,
        random_sampling(random),
        num_sequences=int(random.choice([1, 1, 1, 2, 3])),
        cache_salt=salt,
        token_rules=None if rules.is_neutral else rules,
        num_prompt_logprobs=int(random.choice([NO_LOGPROBS, NO_LOGPROBS, 0, 2])),
        stop_string_at=int(random.integers(1, 12)) if random.random() < 0.3 else None,
    )


def random_waves(random: np.random.Generator, scene: Scene, block_size: int) -> Schedule:
    """Return a schedule of two waves: requests come, leave, are preempted, and lose their executor."""
    num_requests = len(scene.requests)
    schedule = random_schedule(int(random.integers(2**31)), fewest_blocks(scene.requests, block_size))
    mode = [None, *PreemptionMode][random.integers(3)]
    first, second = np.array_split(random.integers(0, 12, num_requests), 2)
    leavers = random.choice(num_requests, 2, replace=False).tolist()
    return replace(
        schedule,
        num_host_blocks=MOST_HOST_BLOCKS if mode is PreemptionMode.SWAP else schedule.num_host_blocks,
        settings=replace(schedule.settings, preemption_mode=mode),
        arrival_rounds=[*first.tolist(), *(second + SECOND_WAVE_ROUND).tolist()],
        abort_rounds={leaver: int(random.integers(2, 50)) for leaver in leavers if random.random() < 0.5},
        loss_round=int(random.integers(3, 50)) if random.random() < 0.2 else None,
        uses_groups=bool(random.random() < 0.2),
    )


# What is compared --------------------------------------------------------------------------------


class RecordedHead:
    """A head of a model, whose drafts are written down and give way to those of another proposer."""

    def __init__(self, head: Mtp, proposer: Proposer, drafted: dict[tuple[int, ...], list[int]]) -> None:
        self._head, self._proposer, self._drafted = head, proposer, drafted

    def draft(
        self, runner: MtpRunner, table: BatchTable, slots: Int32Array, num_tokens: Int32Array, most: Int32Array
    ) -> Int32Array:
        drafts = self._head.draft(runner, table, slots, num_tokens, most)
        known, counts = self._proposer.propose(table.token_ids, slots, num_tokens, most)
        for row, (slot, end, count) in enumerate(zip(slots, num_tokens, most, strict=True)):
            if count:
                self._drafted[tuple(table.token_ids[slot, :end].tolist())] = drafts[row, :count].tolist()
            drafts[row, : counts[row]] = known[row, : counts[row]]
        return drafts


@dataclass
class Campaign:
    """Plays of random requests of a model; what came to pass in them is counted."""

    model: RealModel
    lookup: PromptLookup
    text: list[int]
    has_states: bool = False
    num_right: int = 0
    num_wrong: int = 0
    num_cached_tokens: int = 0
    drafted: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # by a head, behind sequences
    preempted: set[PreemptionMode] = field(default_factory=set)

    def scene(self, seed: int, num_requests: int) -> Scene:
        """Return random requests, and what each gets alone: the later half go on where outputs of the others end."""
        random = np.random.default_rng(seed)
        first = Scene.of(self.model, [random_request(random, self.text) for _ in range(num_requests // 2)])
        following = []
        for request, outcome in zip(first.requests, first.alone, strict=True):
            outputs = [output.token_ids for output in outcome.outputs] or [[]]  # a beam search has none
            prompt = [*request.prompt, *outputs[random.integers(len(outputs))], *random.choice(self.text, 2).tolist()]
            asked = random_request(random, self.text)
            following.append(replace(asked, prompt=prompt, cache_salt=request.cache_salt))
        then = Scene.of(self.model, following)
        return Scene(self.model, first.requests + then.requests, first.alone + then.alone)

    def play(self, scene: Scene, seed: int, most_drafts: int, *, share_of_lookup: float = 0.2) -> None:
        """Play a scene by a random schedule with at most so many drafts of a row."""
        random = np.random.default_rng((seed, most_drafts))
        block_size = int(random.choice(BLOCK_SIZES))
        settings: dict[str, float] = {"block_size_tokens": block_size, "num_threads": int(random.choice([1, 2]))}
        proposer = self.lookup if random.random() < share_of_lookup else knowing(scene)
        schedule = random_waves(random, scene, block_size)
        if self.has_states:  # the scheduler counts the blocks of groups as the worker has them
            schedule = replace(schedule, uses_groups=True)
            if schedule.settings.preemption_mode is PreemptionMode.SWAP:  # drafts that are open keep a state from it
                schedule = replace(schedule, num_steps_in_flight=1)
            settings |= {"num_device_blocks": schedule.num_blocks, "num_host_blocks": schedule.num_host_blocks}
            settings |= {"state_cache_gib": STATE_CACHE_GIB}

        def make_worker() -> Worker:
            worker = self.model.worker(max_draft_tokens=most_drafts, **settings)
            assert worker._drafting is not None
            worker._drafting._proposer = proposer
            if (head := worker._drafting.mtp) is not None:
                head = head._head if isinstance(head, RecordedHead) else head
                worker._drafting.mtp = RecordedHead(head, proposer, self.drafted)  # type: ignore[assignment]
            return worker

        play = scene.play(schedule, scene.requests, make_worker)
        self.num_cached_tokens += play.num_cached_tokens
        self.preempted |= {preempted.mode for preempted in play.preemptions if preempted.num_output_tokens}
        if isinstance(proposer, Knowing):
            self.num_right += proposer.num_right
            self.num_wrong += proposer.num_wrong

    def check_head(self) -> None:
        """Compare what a head has said of sequences with what it says of each alone, computed at once."""
        worker = self.model.worker(max_draft_tokens=MOST_DRAFTS[-1])
        assert worker._drafting is not None
        head = worker._drafting.mtp
        assert head is not None
        for token_ids, drafts in self.drafted.items():
            worker.reset(uses_groups=True)
            driver, num_before = StepDriver(worker), len(token_ids) - 1
            admission = driver.admission(0, token_ids, len(drafts) + 1)
            driver.execute(TableDelta(admissions=(admission,), prefill_chunks=pairs((0, num_before))))
            rows = [np.array([number], np.int32) for number in (0, len(token_ids), len(drafts))]
            found = head.draft(worker._runner, worker.table, *rows)
            assert found[0].tolist() == drafts, token_ids

    def run(self, num_requests: int) -> None:
        """Play so many requests with few, some and many drafts of a row."""
        for seed in range(-(-num_requests // REQUESTS_OF_A_PLAY)):
            scene = self.scene(seed, REQUESTS_OF_A_PLAY)
            for most_drafts in MOST_DRAFTS:
                self.play(scene, seed, most_drafts)
        if self.drafted:
            self.check_head()
        assert self.num_right > 8 * num_requests
        assert self.num_wrong > num_requests
        assert self.num_cached_tokens
        assert self.preempted == set(PreemptionMode)


@pytest.fixture(autouse=True)
def drafts_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows have drafts however often these are wrong."""
    monkeypatch.setattr(RowCost, "share", lambda *_: 0.001)


@pytest.fixture
def lookup() -> PromptLookup:
    path = find_library()
    assert path is not None
    return PromptLookup(path)


@pytest.fixture
def tiny(name: str, lookup: PromptLookup, tmp_path: Path) -> Campaign:
    """A tiny model of FAMILIES."""
    family, changes, settings = FAMILIES[name]
    path = tmp_path / "model"
    save = MtpReference.save if "head" in name else save_tiny_architecture
    save(path, family, {**FAMILY_ARCHITECTURES[family], **changes})
    if "GGUF" in name:
        path = write_gguf_of(path, tmp_path / "model.gguf", of_type(FileType.Q8_0))
    text = np.random.default_rng(3).integers(3, VOCAB_SIZE, 200).tolist()
    return Campaign(RealModel(path, BLOCK_SIZE, NUM_BLOCKS, **settings), lookup, text, "states" in name)


@pytest.mark.parametrize("name", FAMILIES)
def test_random_requests_get_with_drafts_what_they_get_alone(name: str, tiny: Campaign) -> None:
    number = list(FAMILIES).index(name)

    tiny.play(tiny.scene(number, 12), number, MOST_DRAFTS[number % 3], share_of_lookup=0.0)

    assert tiny.num_right > 30
    assert tiny.num_wrong > 5
    assert bool(tiny.drafted) is ("head" in name)
    if tiny.drafted:
        tiny.check_head()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FAMILIES)
def test_200_random_requests_of_a_tiny_model_get_with_drafts_what_they_get_alone(name: str, tiny: Campaign) -> None:
    tiny.run(NUM_REQUESTS)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_200_random_requests_of_the_demo_model_get_with_drafts_what_they_get_alone(
    demo_model: Path, float32_model: Path, lookup: PromptLookup
) -> None:
    license_text = (Path(__file__).parents[2] / "LICENSE").read_text()
    text = AutoTokenizer.from_pretrained(float32_model)(license_text).input_ids[:400]

    Campaign(RealModel(demo_model, BLOCK_SIZE, NUM_BLOCKS), lookup, text).run(NUM_REQUESTS)


def test_greedy_rows_with_drafts_may_outnumber_the_slots(lookup: PromptLookup, tmp_path: Path) -> None:
    save_tiny_architecture(tmp_path, "LlamaForCausalLM", {})
    model, ids = RealModel(tmp_path, BLOCK_SIZE, NUM_BLOCKS), np.random.default_rng(3).integers(3, VOCAB_SIZE, 60)
    conditions = StopConditions(20, ignore_eos=True)
    requests = [Request(ids[:7].tolist(), conditions, SamplingRow()), Request(ids.tolist(), conditions, SamplingRow())]
    greedy = Scene.of(model, requests)
    proposer = knowing(greedy)

    def make_worker() -> Worker:
        worker = model.new_worker(max_num_seqs=2)
        assert worker._drafting is not None
        worker._drafting._proposer = proposer
        return worker

    greedy.play(ALL_AT_ONCE, requests, make_worker)

    assert proposer.num_right > 10
