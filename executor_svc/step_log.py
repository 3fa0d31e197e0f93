"""The responses of the last steps of an epoch, kept so that a broken stream can be resumed."""

from collections import deque

from octavo.execution.v1 import step_pb2
from shared.errors import StepGapError

NUM_KEPT_RESPONSES = 16


class StepLog:
    """What was executed in this epoch. Steps are numbered from 1 without gaps."""

    def __init__(self) -> None:
        self.last_step_id = 0
        self._responses: deque[step_pb2.ExecuteModelResponse] = deque(maxlen=NUM_KEPT_RESPONSES)

    def append(self, response: step_pb2.ExecuteModelResponse) -> None:
        """Keep the response of the next step; the oldest one is forgotten."""
        assert response.step_id == self.last_step_id + 1, (response.step_id, self.last_step_id)
        self._responses.append(response)
        self.last_step_id = response.step_id

    def find(self, step_id: int) -> step_pb2.ExecuteModelResponse | None:
        """Return the stored response of a step, or None if it is the next one to run.

        Raises: StepGapError: the step lies beyond the next one, or before the stored ones.
        """
        if step_id == self.last_step_id + 1:
            return None
        if step_id > self.last_step_id:
            raise StepGapError(
                f"step {step_id} came after step {self.last_step_id}; {self.last_step_id + 1} is missing"
            )
        return self.since(step_id - 1)[0]

    def since(self, step_id: int) -> list[step_pb2.ExecuteModelResponse]:
        """Return the responses of all steps after `step_id`, in order.

        Raises: StepGapError: they are not all kept, or `step_id` was never executed.
        """
        num_wanted = self.last_step_id - step_id
        if num_wanted < 0:
            raise StepGapError(f"step {step_id} was not executed in this epoch; the last one is {self.last_step_id}")
        if num_wanted > len(self._responses):
            first = self.last_step_id - len(self._responses) + 1
            raise StepGapError(f"the response of step {step_id + 1} is not kept any more; the first kept is {first}")
        return list(self._responses)[len(self._responses) - num_wanted :]
