"""The first number of a step that differs, and whose it is."""

import numpy as np

from octavo_shared.step_wire.step import Int32Array, StepResult
from scheduler_svc.replay.difference import RowOwner, first_mismatch
from tests.support.each_row import each_row
from tests.unit.scheduler_svc.step_log.test_recording_fleet import decode_layout


def of_rows(counts: tuple[int, ...], *token_ids: int) -> StepResult:
    ids: Int32Array = np.array(token_ids, np.int32)
    return StepResult(1, 1, ids, np.zeros(len(ids), np.float32), token_counts=np.array(counts, np.uint8))


@each_row(
    (of_rows((3, 1), 7, 8, 9, 5), ""),
    (of_rows((3, 1), 7, 8, 9, 6), "request 'b', output 0, token 1: token recorded 5, now 6"),
    (of_rows((3, 1), 7, 8, 4, 6), "request 'a', output 0, token 2: token recorded 9, now 4"),
    (of_rows((2, 2), 7, 8, 9, 5), "request 'a', output 0, token 0: number of tokens recorded 3, now 2"),
    (of_rows((2, 1), 7, 8, 5), "request 'a', output 0, token 0: number of tokens recorded 3, now 2"),
)
def test_of_rows_with_several_tokens_the_token_is_named(found: StepResult, words: str) -> None:
    layout, owners = decode_layout(2), [RowOwner("a", 0, 0), RowOwner("b", 0, 0)]
    mismatch = first_mismatch(layout, owners, owners, of_rows((3, 1), 7, 8, 9, 5), found)
    assert ("" if mismatch is None else str(mismatch)) == words
