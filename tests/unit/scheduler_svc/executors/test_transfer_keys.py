"""What an executor may say of transfers."""

import pytest

from octavo_shared.errors import ExecutorFaultError
from octavo_shared.step_wire.step import BlockReceive, Step, StepResult, TableDelta, no_slots
from scheduler_svc.executors.transfer_keys import SessionTransfers, TransferKeys


def test_an_executor_that_tells_the_end_of_a_transfer_twice_is_at_fault() -> None:
    transfers = SessionTransfers(TransferKeys(bytes(32)), lambda name: (name, ""))
    sealed = transfers.sealed(Step(1, 1, TableDelta(), blocks_to_receive=(BlockReceive(7, no_slots(), b""),)))
    [received] = sealed.blocks_to_receive
    with pytest.raises(ExecutorFaultError, match="is not pending"):
        transfers.opened(StepResult(1, 1, no_slots(), arrived_transfers=(received.transfer_id,) * 2))
