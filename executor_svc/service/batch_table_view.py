"""The batch table in readable messages, for GetBatchTable."""

import numpy as np

from octavo.execution.v1 import execution_service_pb2 as pb
from shared import wire
from shared.batch_table import BatchTable
from shared.errors import UnknownNameError
from shared.step import SamplingRow


def batch_table_rows(table: BatchTable, slot: int | None, include_token_ids: bool) -> list[pb.BatchTableRow]:
    """Return the live slots, ascending, or only `slot`.

    Raises: UnknownNameError: `slot` is not live.
    """
    live_slots = np.flatnonzero(table.live).tolist()
    if slot is None:
        return [_row(table, live_slot, include_token_ids) for live_slot in live_slots]
    if slot not in live_slots:
        raise UnknownNameError(f"slot {slot} is not live; {len(live_slots)} slots are")
    return [_row(table, slot, include_token_ids)]


def _row(table: BatchTable, slot: int, include_token_ids: bool) -> pb.BatchTableRow:
    return pb.BatchTableRow(
        slot=slot,
        generation=int(table.generation[slot]),
        active=bool(table.active[slot]),
        num_prompt_tokens=int(table.num_prompt_tokens[slot]),
        num_tokens=int(table.num_tokens[slot]),
        num_computed_tokens=int(table.num_scheduled_tokens[slot]),
        block_table=table.blocks_of(slot).tolist(),
        sampling_params=wire.encode_sampling(SamplingRow(*table.sampling[slot].item())),
        token_ids=table.tokens_of(slot).tolist() if include_token_ids else [],
    )
