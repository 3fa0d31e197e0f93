"""Steps that save states, or begin with saved ones, name what there is."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from executor_svc.fake.worker import FakeWorker
from executor_svc.worker.interface import check_states
from octavo_shared.errors import InvalidStepError
from octavo_shared.step_wire.cache_group import CacheGroup, CacheKind
from octavo_shared.step_wire.executor_info import ExecutorInfo
from octavo_shared.step_wire.step import Step, TableDelta, pairs
from tests.support.each_row import each_row
from tests.support.tables import admission, small_table

FULL = CacheGroup(CacheKind.FULL, (0,), 4, 8)
NEEDS = "it needs the state behind them"
IS_EMPTY = "it begins with an empty state"
HAS_NONE = "it has none"


def info_with(num_states: int) -> ExecutorInfo:
    groups = FULL, CacheGroup(CacheKind.STATE, (1,), 4, num_states)
    return replace(FakeWorker().info, cache_groups=groups)


def check(*saved: tuple[int, int, int], num_states: int = 3, **admitted: Any) -> None:
    """Check a step behind one that computed 3 tokens in slot 0 and 2 in slot 1; slot 2 is free."""
    table = small_table()
    two = admission(0, num_tokens=5, blocks=(0, 1)), admission(1, num_tokens=5, blocks=(2, 3))
    table.apply(TableDelta(admissions=two, prefill_chunks=pairs((0, 3), (1, 2))))
    delta = TableDelta(admissions=(admission(2, **admitted),) if admitted else ())
    check_states(
        Step(1, 2, delta, states_to_save=np.array(saved, np.int32).reshape(-1, 3)), table, info_with(num_states)
    )


def test_what_there_is_passes() -> None:
    check((0, 3, 8), (1, 2, 10))
    check((0, 3, 9), num_computed_tokens=2, state_block=9)
    check(num_computed_tokens=0)


@each_row(
    ([], {"num_computed_tokens": 2}, f"admits slot 2 behind 2 tokens; {NEEDS}"),
    ([], {"num_computed_tokens": 0, "state_block": 8}, f"admits slot 2 behind 0 tokens; {IS_EMPTY}"),
    (
        [],
        {"num_computed_tokens": 2, "state_block": 7},
        "admits slot 2 with the state in block 7; states are in blocks 8 to 10",
    ),
    ([], {"num_computed_tokens": 2, "state_block": 2**31}, f"in block {2**31}; states are in blocks 8 to 10"),
    ([(0, 3, 11)], {}, "saves a state in block 11; states are in blocks 8 to 10"),
    ([(0, 3, 7)], {}, "saves a state in block 7; states are in blocks 8 to 10"),
    ([(0, 3, 8)], {"num_states": 0}, "saves a state in block 8; no block is for states"),
    ([(0, 3, 8), (0, 3, 9)], {}, "saves the state of slot 0 twice"),
    ([(0, 3, 8), (1, 2, 8)], {}, "saves a state in block 8 twice"),
    ([(0, 4, 8)], {}, f"saves the state of slot 0 behind 4 tokens; {HAS_NONE}"),
    ([(0, 2, 8)], {}, f"saves the state of slot 0 behind 2 tokens; {HAS_NONE}"),
    ([(2, 0, 8)], {}, f"saves the state of slot 2 behind 0 tokens; {HAS_NONE}"),
    ([(4, 3, 8)], {}, f"saves the state of slot 4 behind 3 tokens; {HAS_NONE}"),
    ([(-1, 3, 8)], {}, f"saves the state of slot -1 behind 3 tokens; {HAS_NONE}"),
)
def test_what_there_is_not_is_refused(
    saved: list[tuple[int, int, int]], settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidStepError) as refused:
        check(*saved, **settings)
    assert str(refused.value).startswith("step 2 ")
    assert str(refused.value).endswith(sentence)
