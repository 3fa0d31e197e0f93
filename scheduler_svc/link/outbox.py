"""What a front has to say to the engine: one message, which grows until the stream takes it."""

import asyncio
from collections import deque

import grpc.aio

from octavo.core.v1 import core_service_pb2 as pb

# Prompts in one message, in bytes, but for the last of them: a message has a limit.
MAX_PROMPT_BYTES = 4 * 2**20


class Outbox:
    """Belongs to one front, over all of its sessions.

    Attributes:
        message: The message that grows; after adding to it, call `wake`.
    """

    def __init__(self) -> None:
        self.message = pb.JoinRequest()
        self._num_prompt_bytes = 0  # in `message`
        self._full: deque[pb.JoinRequest] = deque()  # before `message`
        self._has_news = asyncio.Event()

    def wake(self) -> None:
        """There is something to write."""
        self._has_news.set()

    def submit(self, submission: pb.Submission) -> None:
        """Add a request; the message is closed behind it if its prompts are large enough."""
        self.message.submissions.append(submission)
        self._num_prompt_bytes += len(submission.prompt_token_ids)
        if self._num_prompt_bytes >= MAX_PROMPT_BYTES:
            self._full.append(self._take())
        self.wake()

    def clear(self) -> None:
        """A session begins: what was for the last session is void."""
        self._take()
        self._full.clear()

    async def write_to(self, call: "grpc.aio.StreamStreamCall[pb.JoinRequest, pb.JoinResponse]") -> None:
        """Write to a stream whatever there is, until cancelled."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            while self._full:
                await call.write(self._full.popleft())
            await call.write(self._take())

    def _take(self) -> pb.JoinRequest:
        message, self.message, self._num_prompt_bytes = self.message, pb.JoinRequest(), 0
        return message
