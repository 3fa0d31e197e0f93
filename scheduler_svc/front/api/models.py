"""The models behind a front, by name; both ports look up here which model a request is for.

A scheduler's own front has one, and so has a front whose engines have no names: the served model decides its name.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.process.concurrency import any_says_yes
from scheduler_svc.front.api.generation import Generation, Metadata
from scheduler_svc.front.api.message_scan import peek_text
from scheduler_svc.front.api.request_body import M, RequestBody
from scheduler_svc.front.api_meter import ApiMeter
from scheduler_svc.front.text.text_model import UnknownModelError

if TYPE_CHECKING:  # imports opentelemetry
    from scheduler_svc.telemetry.request_tracing import RequestTrace

# The key of the only model, where the served model decides its name.
UNNAMED = ""


class Models:
    """Finds a model by name.

    Args:
        generations: What runs the requests of each model, by name; only a single one may be UNNAMED.
        meter: Counts requests; the servicers report each request to it.
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

    @property
    def adapters(self) -> Mapping[str, str]:
        """The model of each adapter, by name; of equal names, the first one."""
        found: dict[str, str] = {}
        for parent, generation in self.all.items():
            model = generation.engine.model
            for name in () if model is None else model.adapters:
                if name not in self.all:
                    found.setdefault(name, parent)
        return found

    def _with_adapter(self, name: str) -> Generation | None:
        parent = self.adapters.get(name)
        return None if parent is None else self.all[parent]

    def choose(self, name: str) -> Generation:
        """Return what runs the requests for a model, or for an adapter of it; "": the only model.

        A name that the served model decides is checked with the request: it may change until then.

        Raises: UnknownModelError: no model has this name; or it is empty, and there are several models.
        """
        found = self._unnamed or self._generations.get(name) or self._with_adapter(name)
        if found is None and not name:
            found = self._only
        if found is None:
            raise UnknownModelError(name, [*self.names, *self.adapters])
        return found

    def choose_for(self, body: RequestBody[M]) -> Generation:
        """Return what runs a request that is not decoded yet; errors as in `choose`."""
        return self._unnamed or self.choose(peek_model(body.content, body.message_class))

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Count a call as waiting while its request is read; with several models, only the request names the model.

        Raises: UnavailableError, NoExecutorError, QueueFullError: the request would not be queued.
        """
        if self._only is None:
            yield
            return
        await self._only.engine.wait_until_reachable()
        with self._only.reading():
            yield

    def traced(self, metadata: Metadata) -> "RequestTrace | AbstractContextManager[None]":
        """Return a context that records the refusal of a request that could not be read."""
        return next(iter(self._generations.values())).traced(pb.GenerateRequest(), metadata)

    async def abort(self, request_id: str) -> bool:
        """End a live request of the caller, whichever model it runs on.

        Raises: UnavailableError: no model whose engines answer has it, and some do not answer. Models that never had
            an executor are asked only if there is no other.
        """
        known = [one for one in self._generations.values() if one.engine.model is not None]
        return await any_says_yes(one.abort(request_id) for one in known or self._generations.values())


def peek_model(content: bytes, message_class: type[Message]) -> str:
    """Return the field `model` of an encoded request; "": it is absent or invalid."""
    fields = message_class.DESCRIPTOR.fields
    return peek_text(content, message_class.DESCRIPTOR.fields_by_name["model"].number, len(fields))
