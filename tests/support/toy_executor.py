"""An executor for tests: the mirror table, a cache of histories, and a next token that is a pure function.

The cache holds, for each place in each block, the hash of the whole history up to there. A step that
would attend to a wrong, foreign or unwritten place fails the test.
"""

import itertools
import zlib
from collections.abc import Callable

import numpy as np

from octavo.execution.v1 import step_pb2
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.sequence import FinishReason, StopConditions
from shared.batch_table import BatchTable, StepLayout
from shared.step import Int32Array, Step, StepResult
from shared.wire import decode_result, decode_step, encode_result, encode_step

NextToken = Callable[[list[int]], int]


def over_the_wire(step: Step) -> Step:
    """Return the step as the other side of the wire reads it."""
    return decode_step(step_pb2.ExecuteModelRequest.FromString(encode_step(step).SerializeToString()))


def result_over_the_wire(result: StepResult) -> StepResult:
    """Return the result as the other side of the wire reads it."""
    return decode_result(step_pb2.ExecuteModelResponse.FromString(encode_result(result).SerializeToString()))


def history_hashes(token_ids: list[int]) -> list[int]:
    """Return, for each position, the hash of the history up to and with it."""
    hashes = itertools.accumulate(token_ids, lambda h, token: zlib.crc32(token.to_bytes(4, "little"), h), initial=0)
    return list(hashes)[1:]


def hashed_next_token(vocab_size: int) -> NextToken:
    """Return a next token that depends on every token before it."""
    return lambda token_ids: history_hashes(token_ids)[-1] % vocab_size


def count_up(token_ids: list[int]) -> int:
    """Continue by counting, for traces that people read: the next token is the last one plus 1."""
    return token_ids[-1] + 1


class ToyExecutor:
    """Runs steps in order, as an executor does, and checks every read of its cache."""

    def __init__(self, limits: SchedulerLimits, next_token: NextToken) -> None:
        self.table = BatchTable(limits.max_num_seqs, limits.max_model_len, limits.block_size, limits.num_blocks)
        self.layout: StepLayout | None = None
        self._limits = limits
        self._next_token = next_token
        self._cache: dict[tuple[int, int], int] = {}

    def execute(self, step: Step) -> StepResult:
        """Run a step that came over the wire; the answer goes back over it."""
        received = over_the_wire(step)
        layout = self.layout = self.table.apply(received.delta)
        assert layout.num_tokens <= self._limits.max_num_batched_tokens, "the step is larger than its budget"
        rows = list(zip(layout.slots.tolist(), layout.starts.tolist(), layout.lengths.tolist(), strict=True))
        for slot, start, length in rows:
            self._write(slot, start, start + length)
        for slot, start, length in rows:
            self._attend(slot, start + length)
        sampled = [
            self._next_token(self.table.token_ids[slot, :position].tolist())
            for slot, position in zip(layout.sample_slots.tolist(), layout.sample_positions.tolist(), strict=True)
        ]
        sampled_token_ids: Int32Array = np.array(sampled, np.int32)
        self.table.record(layout, sampled_token_ids)
        return result_over_the_wire(StepResult(received.epoch, received.step_id, sampled_token_ids))

    def _places(self, slot: int, end: int) -> list[tuple[int, int]]:
        """Return the (block, offset) of positions 0 to `end` - 1."""
        blocks, size = self.table.blocks_of(slot).tolist(), self._limits.block_size
        return [(blocks[position // size], position % size) for position in range(end)]

    def _hashes(self, slot: int, end: int) -> list[int]:
        token_ids = self.table.token_ids[slot, :end].tolist()
        assert min(token_ids) >= 0, f"slot {slot} would feed a token that is not known"
        return history_hashes(token_ids)

    def _write(self, slot: int, start: int, end: int) -> None:
        written = list(zip(self._places(slot, end), self._hashes(slot, end), strict=True))[start:]
        self._cache.update(written)

    def _attend(self, slot: int, end: int) -> None:
        found = [self._cache.get(place) for place in self._places(slot, end)]
        assert found == self._hashes(slot, end), f"slot {slot} attends to a wrong place in the cache"


def generate_alone(
    prompt: list[int], conditions: StopConditions, limits: SchedulerLimits, next_token: NextToken
) -> tuple[list[int], FinishReason]:
    """Return the output of a prompt by the plainest loop there is: no batch, no blocks, no scheduler."""
    token_ids = list(prompt)
    while True:
        token_ids.append(next_token(token_ids))
        output = token_ids[len(prompt) :]
        is_eos = output[-1] in limits.eos_token_ids and not conditions.ignore_eos
        if is_eos or output[-1] in conditions.stop_token_ids:
            return output, FinishReason.STOP
        if len(output) == conditions.max_tokens or len(token_ids) == limits.max_model_len:
            return output, FinishReason.LENGTH
