"""What a step costs on both tiers grows with what it changes, not with what runs. Calls are counted, not time."""

import numpy as np

from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.step import Admission, SamplingRow, Step, StepResult, TableDelta, pairs
from octavo_shared.step_wire.wire import decode_result, decode_step, encode_result, encode_step
from tests.support.call_counts import num_calls
from tests.support.each_row import each_row


def admitting(num_sequences: int) -> Step:
    """Return a step that admits sequences of 3 tokens and computes their prompts."""
    prompt = np.array([1, 2, 3], np.int32)
    admissions = tuple(
        Admission(slot, 1, prompt, 3, 0, np.array([slot], np.int32), SamplingRow()) for slot in range(num_sequences)
    )
    return Step(1, 1, TableDelta(admissions=admissions, prefill_chunks=pairs(*[(s, 3) for s in range(num_sequences)])))


def run(table: BatchTable, step: Step) -> None:
    """Do all that both tiers do with a step, but compute it."""
    received = decode_step(encode_step(step))
    layout = table.apply(received.delta)
    result = StepResult(1, step.step_id, np.full(len(layout.sample_slots), 7, np.int32))
    table.resolve(layout, decode_result(encode_result(result)).sampled_token_ids)


@each_row(0, 4)
def test_a_step_costs_the_same_beside_16_sequences_and_beside_1024(num_new: int) -> None:
    costs = []
    for num_sequences in (16, 1024):
        table = BatchTable(num_sequences, 64, 16, num_sequences)
        run(table, admitting(num_sequences))
        for step_id in range(2, 6):  # caches fill up
            run(table, Step(1, step_id, TableDelta()))
        appended = pairs(*[(slot, slot) for slot in range(num_new)])
        step = Step(1, 6, TableDelta(appended_blocks=appended))
        costs.append(num_calls(lambda table=table, step=step: run(table, step)))  # type: ignore[misc]
    assert costs[0] == costs[1]


def test_ten_times_the_admissions_cost_at_most_ten_times_the_calls() -> None:
    few, many = (num_calls(lambda n=n: run(BatchTable(n, 64, 16, n), admitting(n))) for n in (20, 200))  # type: ignore[misc]
    assert many <= 10 * few
