"""The models behind a front, by name: both ports ask here which one a request is for.

A scheduler's own front has one, and so has a front whose engines have no names: what is served decides its name.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.process.asking import any_says_yes
from scheduler_svc.front.api.generation import Generation, Metadata
from scheduler_svc.front.api.message_scan import peek_text
from scheduler_svc.front.api.request_body import M, RequestBody
from scheduler_svc.front.api_meter import ApiMeter
from scheduler_svc.front.text.text_model import UnknownModelError

if TYPE_CHECKING:  # imports opentelemetry
    from scheduler_svc.telemetry.request_tracing import RequestTrace

# The name of the only model, where what is served decides it.
UNNAMED = ""


class Models:
    """Finds a model by name.

    Args:
        generations: What runs the requests of each, by name; only a single one may be UNNAMED.
        meter: Counts requests; whoever speaks a protocol tells it of each.

    Attributes:
        meter: As above.
    """

    def __init__(self, generations: Mapping[str, Generation], meter: ApiMeter | None = None) -> None:
        self.meter = meter or ApiMeter()
        self._generations = generations
        self._only = next(iter(generations.values())) if len(generations) == 1 else None
        self._unnamed = generations.get(UNNAMED)

    @property
    def all(self) -> Mapping[str, Generation]:
        """What runs the requests of each model, by the name that clients use, if it is known."""
        if self._unnamed is None:
            return self._generations
        return {UNNAMED if self._unnamed.model is None else self._unnamed.model.name: self._unnamed}

    @property
    def names(self) -> Sequence[str]:
        """What clients may ask for."""
        return [name for name in self.all if name != UNNAMED]

    def choose(self, name: str) -> Generation:
        """Return what runs the requests for a model; "": the only one.

        A name that what is served decides is checked with the request: it may change until then.

        Raises: UnknownModelError: there is none of this name; or it is empty, and there are several.
        """
        found = self._unnamed or self._generations.get(name) or (None if name else self._only)
        if found is None:
            raise UnknownModelError(name, self.names)
        return found

    def choose_for(self, body: RequestBody[M]) -> Generation:
        """Return what runs a request that is not decoded yet; errors as in `choose`."""
        return self._unnamed or self.choose(peek_model(body.content, body.message_class))

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Let a call count as waiting while its request is read; of several models, it is read to know for which.

        Raises: UnavailableError, NoExecutorError, QueueFullError: it would not be queued.
        """
        if self._only is None:
            yield
            return
        await self._only.engine.wait_until_reachable()
        with self._only.reading():
            yield

    def traced(self, metadata: Metadata) -> "RequestTrace | AbstractContextManager[None]":
        """Return what records that a request is refused which could not be read."""
        return next(iter(self._generations.values())).traced(pb.GenerateRequest(), metadata)

    async def abort(self, request_id: str) -> bool:
        """End a live request of the caller, whichever model it runs on.

        Raises: UnavailableError: no model has it whose engines answer, and those of others do not. Models that never
            had an executor are asked only if there is no other.
        """
        known = [one for one in self._generations.values() if one.engine.model is not None]
        return await any_says_yes(one.abort(request_id) for one in known or self._generations.values())


def peek_model(content: bytes, message_class: type[Message]) -> str:
    """Return what an encoded request has in its field `model`; "": nothing that may stand in a request."""
    fields = message_class.DESCRIPTOR.fields
    return peek_text(content, message_class.DESCRIPTOR.fields_by_name["model"].number, len(fields))
