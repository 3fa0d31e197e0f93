"""The worker's states of sequences: who forks goes on from its parent's, who comes begins anew."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_svc.config import ExecutorConfig
from executor_svc.models.memory_needs import summarize_model
from executor_svc.worker.loading import load_worker
from executor_svc.worker.torch_worker import TorchWorker
from octavo_shared.errors import InvalidStepError
from octavo_shared.step_wire.cache_group import CacheKind
from octavo_shared.step_wire.executor_info import Capability
from octavo_shared.step_wire.step import SamplingRow, TableDelta, pairs
from tests.numerics.architectures import save_tiny_architecture
from tests.numerics.driver import PoisonedCacheEngine, StepDriver, fork_of
from tests.numerics.family_architectures import FAMILY_ARCHITECTURES
from tests.numerics.reference import random_prompt

# Of a sequence in both layers that have a state.
STATE_BYTES = {
    "GraniteMoeHybridForCausalLM": 2 * 4 * (3 * (8 * 10 + 2 * 11) + 8 * 10 * 11),
    "Lfm2ForCausalLM": 2 * 4 * 2 * 40,
    "Qwen3_5ForCausalLM": 2 * 4 * (3 * (2 * 4 * 7 + 12 * 10) + 12 * 7 * 10),
}

PROMPT = random_prompt(8)  # whole blocks
SAMPLED = SamplingRow(temperature=1.0, seed=3)
NUM_NEW = 9


@pytest.fixture(scope="module", params=STATE_BYTES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("hybrid") / request.param
    save_tiny_architecture(path, request.param, FAMILY_ARCHITECTURES[request.param])
    return path


@pytest.fixture(scope="module", params=["native", "torch"])
def worker(request: pytest.FixtureRequest, directory: Path) -> TorchWorker:
    """Slots whose states are NaN before they are used."""
    sizes = {"block_size_tokens": 4, "num_device_blocks": 100, "num_host_blocks": 4, "max_num_seqs": 8}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("executor_svc.worker.assembly.CacheEngine", PoisonedCacheEngine)
        config = ExecutorConfig.model_validate({"model": str(directory), "cpu_kernels": request.param, **sizes})
        loaded = load_worker(config)
    assert isinstance(loaded, TorchWorker)
    assert loaded._states is not None
    for layer in loaded._states.layers:
        layer.conv.fill_(torch.nan)
        layer.recurrent.fill_(torch.nan)
    return loaded


@pytest.fixture
def driver(worker: TorchWorker) -> StepDriver:
    worker.reset(uses_groups=True)
    return StepDriver(worker)


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


def test_a_sequence_without_a_state_of_its_beginning_is_refused(driver: StepDriver) -> None:
    admission = replace(driver.admission(2, PROMPT, 1), num_computed_tokens=4)

    with pytest.raises(InvalidStepError, match="admits slot 2 at position 4; the model has a recurrent state"):
        driver.execute(TableDelta(admissions=(admission,), prefill_chunks=pairs((2, 4))))


def test_what_the_executor_says_of_its_states(worker: TorchWorker, directory: Path) -> None:
    info = worker.info
    full, states = info.cache_groups

    assert (full.kind, full.layers, full.num_device_blocks) == (CacheKind.FULL, (1,), 100)
    assert (states.kind, states.layers, states.num_device_blocks) == (CacheKind.STATE, (0, 2), 0)
    assert states.bytes_per_block == STATE_BYTES[directory.name] == summarize_model(directory).state_bytes
    assert full.bytes_per_block == 4 * summarize_model(directory).token_bytes
    assert info.max_allowance == 1  # a wrong draft could not be taken back
    assert Capability.VARIABLE_TOKENS not in info.capabilities


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
