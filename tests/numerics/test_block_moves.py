"""A sequence goes on as if nothing had happened while its blocks are swapped and copied. Blocks have 4 tokens."""

import numpy as np
import pytest
import torch

from octavo_shared.step_wire.step import Admission, Int32Array, SamplingRow, TableDelta, pairs
from tests.numerics.conftest import TinyModel
from tests.numerics.driver import RecordingSampler, StepDriver, fork_of
from tests.numerics.reference import MakeDriver, assert_close, random_prompt, reference_logits


def slots(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def swaps(sources: Int32Array, destinations: Int32Array) -> Int32Array:
    return np.stack((sources, destinations), axis=1).astype(np.int32)


def readmission(driver: StepDriver, slot: int, num_computed_tokens: int, num_blocks: int) -> Admission:
    """Return what brings the sequence in `slot` back into it, into other blocks."""
    table = driver.worker.table
    return Admission(
        slot=slot,
        generation=int(table.generation[slot]) + 1,
        token_ids=table.tokens_of(slot),
        num_prompt_tokens=int(table.num_prompt_tokens[slot]),
        num_computed_tokens=num_computed_tokens,
        block_ids=driver.take_blocks(4 * num_blocks),
        sampling=SamplingRow(*table.sampling[slot].item()),
    )


@pytest.mark.parametrize(("num_decodes", "max_staged_blocks"), [(1, 0), (2, 64), (3, 2)])
@pytest.mark.parametrize("sampling", [SamplingRow(), SamplingRow(temperature=1.5, seed=4)], ids=["greedy", "sampled"])
def test_decoding_after_a_swap_equals_decoding_without(
    sampling: SamplingRow,
    max_staged_blocks: int,
    num_decodes: int,
    tiny_models: dict[str, TinyModel],
    make_driver: MakeDriver,
    recorder: RecordingSampler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if max_staged_blocks:  # as on a GPU
        monkeypatch.setattr("executor_svc.cache.cache_engine.MAX_STAGED_BLOCKS", max_staged_blocks)
        monkeypatch.setattr("executor_svc.cache.cache_engine.BlocksInMemory", type(None))
    model, prompt = tiny_models["gqa"], random_prompt(14)
    undisturbed = make_driver(model).generate([prompt], 12, sampling=sampling)[0]
    driver = make_driver(model)
    admission = driver.admission(0, prompt, 12, sampling)
    driver.execute(TableDelta(admissions=(admission,), prefill_chunks=pairs((0, 14))))
    for _ in range(num_decodes):
        driver.execute(TableDelta())
    num_computed = 14 + num_decodes
    used = admission.block_ids[: -(-num_computed // 4)]
    host = np.arange(len(used), dtype=np.int32)[::-1] + 20
    back = readmission(driver, 0, num_computed, num_blocks=7)

    # The intruder overwrites the blocks in the step that swaps them out.
    intruder = Admission(1, 1, slots(*random_prompt(12, seed=9)), 12, 0, used[:3], SamplingRow())
    driver.execute(
        TableDelta(released_slots=slots(0), admissions=(intruder,), prefill_chunks=pairs((1, 12))),
        blocks_to_swap_out=swaps(used, host),
    )
    result = driver.execute(
        TableDelta(released_slots=slots(1), admissions=(back,), prefill_chunks=pairs((0, 1))),
        blocks_to_swap_in=swaps(host, back.block_ids[: len(used)]),
    )

    assert len(result.sampled_token_ids) == 1
    assert_close(recorder.logits[0], reference_logits(model, back.token_ids.tolist())[-1])
    while driver.worker.table.num_tokens[0] < 26:
        driver.execute(TableDelta())
    assert driver.worker.table.tokens_of(0)[14:].tolist() == undisturbed


def test_a_block_is_copied_after_it_was_swapped_in_by_the_same_step(
    tiny_models: dict[str, TinyModel], make_driver: MakeDriver, recorder: RecordingSampler
) -> None:
    model, prompt = tiny_models["gqa"], random_prompt(6)
    driver = make_driver(model)
    admission = driver.admission(0, prompt, num_new_tokens=1)
    driver.execute(TableDelta(admissions=(admission,), prefill_chunks=pairs((0, 6))))
    driver.execute(TableDelta(released_slots=slots(0)), blocks_to_swap_out=swaps(admission.block_ids, slots(5, 3)))

    # Two sequences share the first block and go on differently in copies of the second one.
    shared, first, second = driver.take_blocks(12)
    tokens = [[*prompt, 7], [*prompt, 8]]
    both = (
        Admission(0, 2, slots(*tokens[0]), 6, 6, slots(shared, first), SamplingRow()),
        Admission(1, 1, slots(*tokens[1]), 6, 6, slots(shared, second), SamplingRow()),
    )
    driver.execute(
        TableDelta(admissions=both, prefill_chunks=pairs((0, 1), (1, 1))),
        blocks_to_swap_in=pairs((5, shared), (3, first)),
        blocks_to_copy=pairs((first, second)),
    )

    assert_close(recorder.logits, torch.stack([reference_logits(model, row)[-1] for row in tokens]))


def test_sampled_forks_equal_sequences_of_their_own(tiny_models: dict[str, TinyModel], make_driver: MakeDriver) -> None:
    model, prompt = tiny_models["gqa"], random_prompt(9)
    rows = [SamplingRow(temperature=3.0, seed=5, output_index=index) for index in range(3)]
    alone = [make_driver(model).generate([prompt], 8, sampling=row)[0] for row in rows]
    driver = make_driver(model)
    admission = driver.admission(0, prompt, 8, rows[0])
    forks = tuple(fork_of(0, slot, rows[slot]) for slot in (1, 2))
    driver.execute(TableDelta(admissions=(admission,), prefill_chunks=pairs((0, 9)), forks=forks))

    # Blocks 2 and up of the parent are shared by the forks, block 2 holds position 8: every writer but one copies.
    tail, blocks = admission.block_ids[2], driver.take_blocks(24)
    replaced = [(slot, 2 + index, blocks[3 * (slot - 1) + index]) for slot in (1, 2) for index in range(3)]
    driver.execute(
        TableDelta(replaced_blocks=pairs(*replaced)), blocks_to_copy=pairs((tail, blocks[0]), (tail, blocks[3]))
    )
    for _ in range(6):
        driver.execute(TableDelta())

    outputs = [driver.worker.table.tokens_of(slot)[9:].tolist() for slot in range(3)]
    assert outputs == alone
    assert len({tuple(output) for output in outputs}) == 3
