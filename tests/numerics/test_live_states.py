"""The worker's states of sequences: who forks goes on from its parent's, who comes begins anew or from a saved one."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_svc.cache.cache_groups import GroupedCacheEngine
from executor_svc.config import ExecutorConfig
from executor_svc.models.memory_needs import summarize_model
from executor_svc.worker.interface import Worker
from executor_svc.worker.loading import load_worker
from executor_svc.worker.torch_worker import TorchWorker
from octavo_shared.errors import InvalidStepError
from octavo_shared.step_wire.cache_group import CacheKind, firsts_of
from octavo_shared.step_wire.executor_info import Capability
from octavo_shared.step_wire.step import Admission, Int32Array, SamplingRow, TableDelta, pairs
from tests.numerics.architectures import save_tiny_architecture
from tests.numerics.driver import PoisonedCacheEngine, RecordingSampler, StepDriver, fork_of
from tests.numerics.family_architectures import FAMILY_ARCHITECTURES
from tests.numerics.mtp_reference import MtpReference
from tests.numerics.reference import assert_close, random_prompt
from tests.numerics.threaded_group import ThreadedRanks

# Of a sequence in both layers that have a state.
STATE_BYTES = {
    "GraniteMoeHybridForCausalLM": 2 * 4 * (3 * (8 * 10 + 2 * 11) + 8 * 10 * 11),
    "Lfm2ForCausalLM": 2 * 4 * 2 * 40,
    "NemotronHForCausalLM": 2 * 4 * (3 * (8 * 10 + 2 * 4 * 11) + 8 * 10 * 11),
    "Qwen3_5ForCausalLM": 2 * 4 * (3 * (2 * 4 * 7 + 12 * 10) + 12 * 7 * 10),
    "Qwen3_5ForCausalLM with a head that drafts": 2 * 4 * (3 * (2 * 4 * 7 + 12 * 10) + 12 * 7 * 10) + 4 * 45,
}

PROMPT = random_prompt(8)  # whole blocks
SAMPLED = SamplingRow(temperature=1.0, seed=3)
NUM_NEW = 9


@pytest.fixture(scope="module", params=STATE_BYTES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("hybrid") / request.param
    architecture = request.param.partition(" ")[0]
    save = MtpReference.save if has_head(path) else save_tiny_architecture
    save(path, architecture, FAMILY_ARCHITECTURES[architecture])
    return path


def has_head(directory: Path) -> bool:
    return directory.name.endswith("drafts")


@pytest.fixture(scope="module", params=["native", "composed", "torch", "two ranks"])
def worker(request: pytest.FixtureRequest, directory: Path) -> Iterator[TorchWorker | ThreadedRanks]:
    """Slots and blocks whose states are NaN before they are used."""
    kernels = "torch" if request.param == "torch" else "native"
    room = {
        "num_device_blocks": 100,
        "num_host_blocks": 50,
        "state_cache_gib": 8.5 * STATE_BYTES[directory.name] / 2**30,
    }
    method = "mtp" if has_head(directory) and kernels == "native" else "prompt-lookup"
    sizes = {"block_size_tokens": 4, "max_num_seqs": 8, **room}
    settings = {"model": str(directory), "cpu_kernels": kernels, "draft_method": method, **sizes}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("executor_svc.worker.assembly.CacheEngine", PoisonedCacheEngine)
        patch.setattr("executor_svc.worker.assembly.Sampler", RecordingSampler)
        if request.param == "composed":
            patch.setattr("executor_svc.worker.assembly.native_forward", lambda *_: None)
        config = ExecutorConfig.model_validate(settings)
        loaded = ThreadedRanks(config, 2) if request.param == "two ranks" else load_worker(config)
        assert isinstance(loaded, TorchWorker | ThreadedRanks)
        yield loaded
    if isinstance(loaded, ThreadedRanks):
        loaded.close()


@pytest.fixture
def driver(worker: TorchWorker | ThreadedRanks) -> StepDriver:
    worker.reset()  # a scheduler of an earlier release is not served, but the layout is changed
    worker.reset(uses_groups=True)
    for rank in ranks_of(worker):
        states, engine = rank._states, rank._cache_engine
        assert states is not None
        assert isinstance(engine, GroupedCacheEngine)
        saved = engine._engines[-1]
        tensors = [tensor for layer in states.layers for tensor in (layer.conv, layer.recurrent)]
        for tensor in (*tensors, *saved._pools, saved.host_blocks):
            tensor.fill_(torch.nan)
    return StepDriver(worker)


def ranks_of(worker: Worker) -> list[TorchWorker]:
    if isinstance(worker, ThreadedRanks):
        return worker.workers
    assert isinstance(worker, TorchWorker)
    return [worker]


def alone(driver: StepDriver, sampling: SamplingRow) -> list[int]:
    [tokens] = driver.generate([PROMPT], NUM_NEW, sampling=sampling)
    driver.worker.reset(uses_groups=True)
    return tokens


@pytest.mark.parametrize("is_beam", [False, True], ids=["fork", "beam fork"])
def test_a_fork_goes_on_from_the_state_of_its_parent(is_beam: bool, driver: StepDriver) -> None:
    """It branches off behind the prompt, into a slot that another sequence has used."""
    expected = [alone(driver, SamplingRow()), alone(driver, SAMPLED)]
    other = driver.admission(5, random_prompt(3), 1)
    driver.execute(TableDelta(admissions=(other,), prefill_chunks=pairs((5, 3))))
    fork = fork_of(0, 5, SAMPLED, generation=2)
    own_blocks = [[5, index, block] for index, block in enumerate(driver.take_blocks(NUM_NEW), len(PROMPT) // 4)]

    admission = driver.admission(0, PROMPT, NUM_NEW)
    released = np.array([5], np.int32)
    if is_beam:  # all tokens but the last one are computed when it branches off
        begin = TableDelta(released_slots=released, admissions=(admission,), prefill_chunks=pairs((0, len(PROMPT) - 1)))
        then = TableDelta(beam_forks=(fork,), prefill_chunks=pairs((0, 1), (5, 1)))
        own_blocks.insert(0, [5, 1, int(driver.take_blocks(1)[0])])
        copies = pairs((int(admission.block_ids[1]), own_blocks[0][2]))
    else:
        begin = TableDelta(
            released_slots=released, admissions=(admission,), prefill_chunks=pairs((0, len(PROMPT))), forks=(fork,)
        )
        then, copies = TableDelta(), pairs()
    driver.execute(begin)
    driver.execute(replace(then, replaced_blocks=np.array(own_blocks, np.int32)), blocks_to_copy=copies)
    table = driver.worker.table
    while table.num_tokens[0] < len(PROMPT) + NUM_NEW:
        driver.execute(TableDelta())

    found = [table.token_ids[slot, len(PROMPT) : len(PROMPT) + NUM_NEW].tolist() for slot in (0, 5)]
    assert found == expected


def test_a_sequence_that_is_computed_again_begins_anew(driver: StepDriver) -> None:
    """In another slot, beside another one in its old slot, behind a step that computed too much."""
    expected = alone(driver, SAMPLED)
    driver.execute(
        TableDelta(admissions=(driver.admission(0, PROMPT, NUM_NEW, SAMPLED),), prefill_chunks=pairs((0, 8)))
    )
    driver.execute(TableDelta())
    tokens = driver.worker.table.tokens_of(0).tolist()
    again = driver.admission(3, tokens, NUM_NEW, SAMPLED, num_prompt_tokens=len(PROMPT))
    other = driver.admission(0, random_prompt(20), NUM_NEW)
    driver.execute(
        TableDelta(
            released_slots=np.array([0], np.int32),
            admissions=(again, other),
            prefill_chunks=pairs((3, len(tokens)), (0, 20)),
        )
    )
    while driver.worker.table.num_tokens[3] < len(PROMPT) + NUM_NEW:
        driver.execute(TableDelta())

    assert driver.worker.table.token_ids[3, len(PROMPT) : len(PROMPT) + NUM_NEW].tolist() == expected


def states_of(worker: Worker, slot: int) -> list[torch.Tensor]:
    """Return the states of a slot, of all layers and ranks."""
    layers = [layer for rank in ranks_of(worker) if rank._states is not None for layer in rank._states.layers]
    return [tensor[slot].clone() for layer in layers for tensor in (layer.conv, layer.recurrent)]


@pytest.mark.parametrize("worker", ["native", "composed", "two ranks"], indirect=True)
def test_a_state_takes_the_drafts_that_were_right(driver: StepDriver) -> None:
    """Beside a prompt and a row without drafts: as a token a step leaves it, also to a fork."""
    worker, num_new = driver.worker, 60
    prompts = {0: random_prompt(8), 3: random_prompt(5, seed=1), 5: random_prompt(11, seed=2)}
    alone: dict[int, tuple[list[int], list[list[torch.Tensor]]]] = {}
    for slot, prompt in prompts.items():
        driver.prefill([prompt], num_new)
        states: list[list[torch.Tensor]] = [[]] * len(prompt)
        while True:
            states.append(states_of(worker, 0))  # without the last token
            if len(states) == len(prompt) + num_new:
                break
            driver.execute(TableDelta())
        alone[slot] = worker.table.tokens_of(0).tolist(), states
        worker.reset(uses_groups=True)
        driver = StepDriver(worker)

    admissions = [driver.admission(slot, prompt, num_new) for slot, prompt in prompts.items()]
    late = driver.admission(6, random_prompt(100, seed=3), 1)
    chunks = pairs(*((slot, len(prompt)) for slot, prompt in prompts.items()))
    driver.execute(TableDelta(admissions=(*admissions, late), prefill_chunks=chunks, allowances=pairs((0, 8), (5, 8))))
    for num_drafts in (1, 3, 7):
        for num_right in range(num_drafts + 1):
            drafts = []
            for slot, right, count in ((0, num_right, num_drafts), (3, 0, 0), (5, num_drafts - num_right, num_drafts)):
                tokens, place = alone[slot][0], int(worker.table.num_tokens[slot])
                wrong = [abs(token_id - 1) for token_id in tokens[place + right :]]
                drafts.append([*tokens[place : place + right], *wrong][:count])
            result = driver.execute(TableDelta(prefill_chunks=pairs((6, 2))), drafts)

            assert result.token_counts is not None
            assert result.token_counts.tolist() == [num_right + 1, 1, num_drafts - num_right + 1]
            for slot, (tokens, states) in alone.items():
                found = worker.table.tokens_of(slot).tolist()
                assert found == tokens[: len(found)]
                for ours, theirs in zip(states_of(worker, slot), states[len(found) - 1], strict=True):
                    assert torch.equal(ours, theirs), (slot, num_drafts, num_right)
    driver.execute(TableDelta(allowances=pairs((0, 1)), forks=(fork_of(0, 7),)), [[], [], [], []])
    for ours, theirs in zip(states_of(worker, 7), alone[0][1][int(worker.table.num_tokens[0]) - 1], strict=True):
        assert torch.equal(ours, theirs)


LONG_PROMPT = random_prompt(19)


class SavedPrompts:
    """Computes prompts in parts, each from a saved state or from the beginning, and looks at the last logits."""

    def __init__(self, driver: StepDriver) -> None:
        self.driver, self.worker = driver, driver.worker
        self.first_block, self.end_block = firsts_of(self.worker.info.cache_groups)[-2:].tolist()

    def begin(self, slot: int, num_tokens: int, prompt: Sequence[int] = LONG_PROMPT) -> Admission:
        """Compute the first tokens of a prompt in a slot."""
        admission = self.driver.admission(slot, prompt, 1)
        self.run(TableDelta(admissions=(admission,), prefill_chunks=pairs((slot, num_tokens))))
        return admission

    def goes_on(self, begun: Admission, slot: int, num_computed_tokens: int, block: int) -> TableDelta:
        """Return what computes the rest of a prompt in a slot, on the same blocks."""
        generation = int(self.worker.table.generation[slot]) + 1
        admission = replace(
            begun, slot=slot, generation=generation, num_computed_tokens=num_computed_tokens, state_block=block
        )
        num_left = len(begun.token_ids) - num_computed_tokens
        return TableDelta(admissions=(admission,), prefill_chunks=pairs((slot, num_left)))

    def run(self, delta: TableDelta, saved: Sequence[tuple[int, int, int]] = (), **moves: Int32Array) -> torch.Tensor:
        """Run a step; return its logits, [num_samples, vocab_size]."""
        self.driver.execute(delta, states_to_save=saved, **moves)
        sampler = ranks_of(self.worker)[0]._sampler
        assert isinstance(sampler, RecordingSampler)
        return sampler.logits

    def release(self, *slots: int) -> None:
        self.run(TableDelta(released_slots=np.array(slots, np.int32)))

    def check(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare logits: bit for bit, where the kernels say so."""
        if self.worker.info.is_invariant:
            assert torch.equal(found, expected)
        else:
            assert_close(found, expected)

    def whole(self) -> torch.Tensor:
        """Return the logits behind the prompt, computed at once in a slot that is free again."""
        admission = self.driver.admission(7, LONG_PROMPT, 1)
        logits = self.run(TableDelta(admissions=(admission,), prefill_chunks=pairs((7, len(LONG_PROMPT)))))
        self.release(7)
        assert torch.isfinite(logits).all()
        return logits


@pytest.fixture
def prompts(driver: StepDriver) -> SavedPrompts:
    return SavedPrompts(driver)


def test_a_prompt_goes_on_from_each_state_that_was_saved_of_it(prompts: SavedPrompts) -> None:
    """In a slot that another sequence used, at boundaries of blocks and between them, with the same bits."""
    expected, positions = prompts.whole(), (4, 7, 12, 16)
    begun = prompts.begin(0, positions[0])
    other = prompts.begin(5, 6, random_prompt(9, seed=1))
    for index, (position, following) in enumerate(zip(positions, (*positions[1:], len(LONG_PROMPT)), strict=True)):
        saved = [(0, position, prompts.first_block + index)]
        if index == 0:  # two at once
            saved.append((5, 6, prompts.end_block - 1))
        found = prompts.run(TableDelta(prefill_chunks=pairs((0, following - position))), saved)
    prompts.check(found, expected)
    prompts.release(0, 5)

    for index, position in enumerate(positions):
        prompts.check(prompts.run(prompts.goes_on(begun, 5, position, prompts.first_block + index)), expected)
        prompts.release(5)
    found = prompts.run(prompts.goes_on(other, 0, 6, prompts.end_block - 1))
    prompts.release(0)
    admission = prompts.driver.admission(3, random_prompt(9, seed=1), 1)
    prompts.check(found, prompts.run(TableDelta(admissions=(admission,), prefill_chunks=pairs((3, 9)))))


def test_the_state_of_a_slot_is_saved_before_the_slot_gets_another_sequence(prompts: SavedPrompts) -> None:
    """The step that saves it releases the slot, admits another sequence there, and a third one from another state."""
    expected = prompts.whole()
    begun, block, of_other = prompts.begin(0, 12), prompts.first_block + 3, prompts.first_block
    other = prompts.begin(1, 5, random_prompt(9, seed=1))
    prompts.run(TableDelta(released_slots=np.array([1], np.int32)), [(1, 5, of_other)])

    into_slot = prompts.goes_on(other, 0, 5, of_other)
    prompts.run(replace(into_slot, released_slots=np.array([0], np.int32)), [(0, 12, block)])

    prompts.check(prompts.run(prompts.goes_on(begun, 4, 12, block))[-1:], expected)


def test_a_state_that_is_saved_in_a_step_is_one_to_begin_with_in_it(prompts: SavedPrompts) -> None:
    expected, block = prompts.whole(), prompts.first_block + 2
    prompts.begin(1, 5, random_prompt(9, seed=1))
    prompts.run(TableDelta(released_slots=np.array([1], np.int32)), [(1, 5, block)])  # another state is there before
    begun = prompts.begin(0, 8)

    prompts.check(prompts.run(prompts.goes_on(begun, 1, 8, block), [(0, 8, block)]), expected)


def test_a_state_comes_back_from_the_host_before_a_sequence_begins_with_it(prompts: SavedPrompts) -> None:
    """It leaves in the step that saves it; what it left from gets another state."""
    expected = prompts.whole()
    first_host, _ = firsts_of(prompts.worker.info.cache_groups, on_host=True)[-2:].tolist()
    block, other_block, host_block = prompts.first_block + 1, prompts.first_block + 5, first_host + 2
    begun = prompts.begin(0, 12)
    prompts.run(
        TableDelta(released_slots=np.array([0], np.int32)),
        [(0, 12, block)],
        blocks_to_swap_out=pairs((block, host_block)),
    )
    prompts.begin(0, 5, random_prompt(9, seed=1))
    prompts.run(TableDelta(released_slots=np.array([0], np.int32)), [(0, 5, block)])

    back = prompts.goes_on(begun, 2, 12, other_block)
    prompts.check(prompts.run(back, blocks_to_swap_in=pairs((host_block, other_block))), expected)


def test_a_large_state_is_copied_as_a_small_one(prompts: SavedPrompts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_svc.cache.saved_states._LARGE_ROW_BYTES", 0)
    test_the_state_of_a_slot_is_saved_before_the_slot_gets_another_sequence(prompts)


def test_a_step_that_begins_without_its_state_is_refused_and_changes_nothing(driver: StepDriver) -> None:
    admission = replace(driver.admission(2, PROMPT, 1), num_computed_tokens=4)

    with pytest.raises(InvalidStepError, match="admits slot 2 behind 4 tokens; it needs the state behind them"):
        driver.execute(TableDelta(admissions=(admission,), prefill_chunks=pairs((2, 4))))

    assert not driver.worker.table.live.any()


@pytest.mark.parametrize("worker", ["native"], indirect=True)
def test_what_the_executor_says_of_its_states(worker: TorchWorker, directory: Path) -> None:
    info = worker.info
    full, states = info.cache_groups
    summary = summarize_model(directory, has_mtp=has_head(directory))

    assert (full.kind, full.layers, full.num_device_blocks) == (CacheKind.FULL, (1, *([3] * has_head(directory))), 100)
    assert (states.kind, states.layers) == (CacheKind.STATE, (0, 2, *([4] * has_head(directory))))
    assert (states.num_device_blocks, states.num_host_blocks) == (8, 4)
    assert states.bytes_per_block == STATE_BYTES[directory.name] == summary.state_bytes
    assert full.bytes_per_block == 4 * summary.token_bytes
    assert info.max_allowance == 8
    assert Capability.VARIABLE_TOKENS in info.capabilities


@pytest.mark.parametrize(("settings", "expected"), [({}, 3), ({"max_num_seqs": 5}, 5)], ids=["unset", "set"])
def test_slots_that_nobody_asked_for_have_room_for_their_states(
    settings: dict[str, int], expected: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_architecture(tmp_path, "Qwen3_5ForCausalLM", FAMILY_ARCHITECTURES["Qwen3_5ForCausalLM"])
    config = ExecutorConfig.model_validate({"model": str(tmp_path), "num_device_blocks": 10, **settings})
    state_bytes = summarize_model(tmp_path).state_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "executor_svc.worker.assembly.available_memory_bytes", lambda: 15 * state_bytes
        )  # a quarter of it
        loaded = load_worker(config)

    assert loaded.info.max_num_seqs == expected
    told = [record.getMessage() for record in caplog.records if "max_num_seqs_lowered" in record.getMessage()]
    assert len(told) == ("max_num_seqs" not in settings)
