"""The live requests: which ones there are, whether they wait, what steps bring them.

The engine adds them, and puts those in the queue again whose executor is gone; the cores take them from
the queue. A request leaves when it has ended, by whatever comes first. Read next: `request.py`,
`suspects.py`.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence

from scheduler_svc.core.results import StepUpdates
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.request import Request
from scheduler_svc.suspects import Suspects
from shared.errors import CacheTooSmallError, OctavoServiceError


class LiveRequests(Mapping[str, Request]):
    """The live requests by id, in order of arrival.

    Args:
        queue: Where their groups wait for a core.
        wake: Called when a group was queued.
    """

    def __init__(self, queue: WaitingQueue, wake: Callable[[], None]) -> None:
        self.suspects = Suspects()
        self._queue = queue
        self._wake = wake
        self._requests: dict[str, Request] = {}
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    def __getitem__(self, request_id: str) -> Request:
        return self._requests[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def of(self, group: SequenceGroup) -> Request:
        """Return the live request that a group belongs to."""
        return self._requests[group.request_id]

    async def wait_until_all_ended(self) -> None:
        """Return once no request is live."""
        await self._all_ended.wait()

    # From arrival to end -------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take a new request, and queue it."""
        self._requests[request.request_id] = request
        self._all_ended.clear()
        self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        """Queue a live request, or park it: a suspect behind other suspects."""
        if self.suspects.may_run(request):
            self._queue.add(request.group)
            self._wake()

    def fail(self, request: Request, error: OctavoServiceError) -> None:
        """End a request with an error; whoever calls ends its group."""
        request.fail(error)
        self._forget(request)

    def _clear_suspect(self, request: Request) -> None:
        """A request got a token, or ended: if others are parked because of it, the next one may run."""
        following = self.suspects.clear(request)
        if following is not None:
            self._queue.add(following.group)
            self._wake()

    def _forget(self, request: Request) -> None:
        """A request has ended."""
        self._requests.pop(request.request_id, None)
        self._clear_suspect(request)
        if not self._requests:
            self._all_ended.set()

    # What steps bring ----------------------------------------------------------------------------

    def deliver(self, core: Scheduler, updates: StepUpdates) -> None:
        """Give what a step of a core brought to its requests; end those that are complete."""
        logprobs: Sequence[float | None] = updates.logprobs or [None] * len(updates.token_ids)
        for prompt in updates.prompt_logprobs:
            self.of(prompt.group).push_prompt(prompt.logprobs, prompt.alternatives)
        for row, sequence in enumerate(updates.sequences):
            request = self.of(sequence.group)
            alternatives = updates.alternatives.get(row)
            has_stop_string = request.push(sequence.index, updates.token_ids[row], logprobs[row], alternatives)
            if row in updates.finished:
                request.finish_output(sequence.index, updates.finished[row])
            elif has_stop_string:
                core.finish(sequence)
            self._note_progress(request)
        for group in updates.advanced_searches:
            request = self.of(group)
            request.num_losses = 0
            self._note_progress(request)
        for group in updates.finished_searches:
            assert group.beams is not None
            request = self.of(group)
            request.finish_search(group.beams.finished_hypotheses())
            self._note_progress(request)

    def take_failures(self, core: Scheduler) -> None:
        """End the requests that a core gave up, since they can never go on."""
        for failure in core.take_failures():
            self.fail(self.of(failure.group), CacheTooSmallError(failure.message))

    def _note_progress(self, request: Request) -> None:
        """A request got a token, or ended."""
        if request.has_ended:
            self._forget(request)
        else:
            self._clear_suspect(request)
