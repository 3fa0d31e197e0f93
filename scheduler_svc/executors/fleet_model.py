"""The model that a fleet serves, and the check that a newly attached executor fits it.

The first executor of a fleet decides which model is served; others must have the same, even while the first one
restarts. They may be larger or smaller: each planner has the limits of its executor. The fleet serves sequences up to
the longest that any attached or expected executor holds; an expected one counts as it was when it was last attached.
So the order of attaching does not matter. Read next: `serving_limits.py`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

from octavo.execution.v1 import execution_service_pb2
from octavo_shared.errors import CallerError
from octavo_shared.process.events import Event
from octavo_shared.step_wire.executor_info import Capability, ExecutorInfo, TokenizerFile
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.executors.client import ExecutorRefusedError
from scheduler_svc.executors.serving_limits import PlannerSettings, serving_limits
from scheduler_svc.executors.session import ExecutorSession
from scheduler_svc.request.provenance import Numerics
from scheduler_svc.request.served_model import Reproducibility, ServedModel

log = logging.getLogger(__name__)

# Versions of the weights from which requests may go on to the present one.
MAX_FORMER = 64

FetchFiles: TypeAlias = Callable[[], Awaitable[tuple[TokenizerFile, ...]]]

# Called before a model is served, with its executor's description and a function that fetches its tokenizer files.
LoadTokenizer: TypeAlias = Callable[[ExecutorInfo, FetchFiles], Awaitable[None]]


class FleetModel:
    """Owns the served model, and makes the planners of executors that fit it.

    Args:
        fleet: The planners join it.
        addresses: Returns the addresses of expected executors.
        settings: Of the planners.
        load_tokenizer: Refuses an executor with a broken tokenizer, by raising TokenizerFileError.
        on_other_model: Called with a sentence before a different model is served.
        served_name: The name by which clients know the model; None: its executor's name for it.

    Attributes:
        model: The model that is served, or was last; None: no executor has been attached yet.
    """

    def __init__(
        self,
        fleet: Fleet,
        addresses: Callable[[], Container[str]],
        settings: PlannerSettings,
        load_tokenizer: LoadTokenizer,
        on_other_model: Callable[[str], None],
        served_name: str | None = None,
    ) -> None:
        self.model: ServedModel | None = None
        self._fleet = fleet
        self._addresses = addresses
        self._settings = settings
        self._load_tokenizer = load_tokenizer
        self._on_other_model = on_other_model
        self._served_name = served_name
        self._lock = asyncio.Lock()
        self._adapters: tuple[str, ...] = ()
        self._former: dict[str, str] = {}  # digests by model hash: the same model with its weights of before
        self._first_hash = ""  # of the weights with which executors are started
        self._source = (
            ""  # where executors find the weights that are served; empty: where they find them at their start
        )
        self._tokenizer_of = ""  # the executor process that the tokenizer came from
        self._members: dict[str, _Member] = {}  # executors that have served the model, by address

    async def admit(self, session: ExecutorSession, address: str) -> ExecutorPlanner:
        """Return a planner for an executor that was just attached at an address.

        Raises: ExecutorRefusedError, ExecutorFaultError, TokenizerFileError: it cannot be used.
        """
        async with self._lock:  # two executors that are attached at once must agree on the model
            is_first = not self._fleet.planners
            await self._bring_up_to_date(session)
            self._require_same_model(session, address, is_first=is_first)
            limits = serving_limits(session.info, self._settings)
            if is_first:
                await self._serve_model_of(session, limits)
            longest_input = limits.max_encoder_tokens
            info = replace(session.info, max_allowance=limits.max_allowance, max_encoder_tokens=longest_input)
            self._members[address] = _Member(info, limits.max_model_len, limits.max_num_seqs)
            self.update_limits()
            numerics = Numerics(session.info.numerics_id, session.info.weights_digest)
            self._report_numerics(numerics, address, session.info.kv_cache_dtype)
            agreed = session.agreement.capabilities
            limits = replace(
                limits,
                names_blocks=Capability.NAMED_BLOCKS in agreed and limits.prefix_caching,
                flags_rows=Capability.ROW_FLAGS in agreed,
                tells_loads=Capability.GRAMMARS_READY in agreed,
                bans_ngrams=Capability.NO_REPEAT_NGRAM in agreed,
                max_transfers=limits.max_transfers if Capability.BLOCK_TRANSFER in agreed else 0,
            )
            planner = self._fleet.join(limits, session.epoch, address, numerics, session.info)
            block_ids, names = session.kept_blocks
            if len(block_ids) and limits.names_blocks:
                self._fleet.adopt_blocks(planner, block_ids, names)
            return planner

    def update_limits(self) -> None:
        """Serve as much as the attached and expected executors can, after one came or the addresses changed."""
        addresses = self._addresses()
        infos = {address: member.info for address, member in self._members.items() if address in addresses}
        members = [self._members[address] for address in infos]
        if self.model is None or not members:
            return
        largest = max(members, key=lambda member: member.max_model_len)
        most = max(member.max_num_seqs for member in members)
        # Executors of release 0.1.0 tell neither the model's defaults nor a digest: those of another executor hold.
        defaults = next((member.info.sampling_defaults for member in members if member.info.sampling_defaults), {})
        digest = next((member.info.weights_digest for member in members if member.info.weights_digest), "")
        # Requests with a grammar need an executor that follows grammars, and texts one that pools: one is enough.
        adapting = next((member.info for member in members if member.info.num_adapter_slots), largest.info)
        guided = next((member.info for member in members if member.info.num_grammar_slots), largest.info)
        pooling = next((member.info for member in members if member.info.pooling_tasks), largest.info)
        info = replace(
            largest.info,
            sampling_defaults=defaults,
            weights_digest=digest,
            num_grammar_slots=guided.num_grammar_slots,
            matcher_id=guided.matcher_id,
            max_grammar_bytes=guided.max_grammar_bytes,
            num_adapter_slots=adapting.num_adapter_slots,
            max_adapter_rank=adapting.max_adapter_rank,
            pooling_tasks=pooling.pooling_tasks,
            embedding_size=pooling.embedding_size,
            num_scores=pooling.num_scores,
            num_token_types=pooling.num_token_types,
            max_encoder_tokens=max(member.info.max_encoder_tokens for member in members),
            bans_ngrams=any(member.info.bans_ngrams for member in members),
        )
        drafting = [info for info in infos.values() if info.max_allowance > 1]
        self.model = ServedModel(
            info,
            largest.max_model_len,
            most,
            self._served_name,
            Reproducibility.of(infos),
            speculates=bool(drafting),
            speculation_may_change_outputs=not all(info.is_invariant for info in drafting),
            adapters=self._adapters,
            former=tuple(self._former.items()),
        )

    async def _bring_up_to_date(self, session: ExecutorSession) -> None:
        """Give an executor that comes back with older weights those that are served, or refuse it."""
        served = self.model
        if served is None or not session.changes_weights:
            return
        if session.info.model_hash in self._former and session.info.weights_digest != served.info.weights_digest:
            if not self._source:
                raise ExecutorRefusedError(
                    f"it has older weights than the fleet, of the digest {session.info.weights_digest[:16]}, and the "
                    "fleet got its own as files: update it from a folder, or restart the scheduler to serve older ones"
                )
            try:
                await session.update_weights(self._source, served.info.weights_digest, _no_chunks())
            except CallerError as error:
                raise ExecutorRefusedError(f"it does not take the weights that are served: {error}") from error

    @asynccontextmanager
    async def changing_weights(self) -> AsyncIterator[None]:
        """Let no executor join for the length of a block."""
        async with self._lock:
            yield

    def follow_weights(self, model_hash: str, weights_digest: str, source: str) -> None:
        """Serve the same model with other weights, which executors find at a source; empty: nowhere any more."""
        assert self.model is not None, "executors are attached"
        self._former.pop(self.model.info.model_hash, None)
        self._former[self.model.info.model_hash] = self.model.info.weights_digest
        if len(self._former) > MAX_FORMER:  # never the one with which executors are started again
            del self._former[next(one for one in self._former if one != self._first_hash)]
        self._source = source

        def updated(info: ExecutorInfo) -> ExecutorInfo:
            return replace(info, model_hash=model_hash, weights_digest=weights_digest)

        members = self._members.items()
        self._members = {address: replace(member, info=updated(member.info)) for address, member in members}
        self.model = replace(self.model, info=updated(self.model.info))
        self.update_limits()

    def is_served(self, model_hash: str) -> bool:
        """Return whether a request that was checked for the model of a hash may run."""
        return self.model is not None and (model_hash == self.model.info.model_hash or model_hash in self._former)

    def name_adapters(self, names: Sequence[str]) -> None:
        """Tell fronts the names of adapters that requests may ask for."""
        self._adapters = tuple(names)
        self.update_limits()

    def _require_same_model(self, session: ExecutorSession, address: str, *, is_first: bool) -> None:
        """Refuse a different model while an executor serves ours, or one that did may return."""
        info, served = session.info, self.model
        if served is None or not (difference := _difference(info, served.info)):
            return
        self._members.pop(address, None)
        addresses = self._addresses()
        expected = sorted(member for member in self._members if member in addresses)
        if not is_first:
            raise ExecutorRefusedError(difference)
        if expected:
            raise ExecutorRefusedError(
                f"{difference}; the fleet serves {served.info.model_id} from {', '.join(expected)}"
            )

    def _report_numerics(self, numerics: Numerics, address: str, kv_cache_dtype: str) -> None:
        """Log that an executor joins others of which none has its numerics."""
        others = {planner.numerics for planner in self._fleet.planners}
        if others and numerics not in others:
            ids = ",".join(sorted({other.numerics_id for other in others}))
            infos = [planner.info for planner in self._fleet.planners if planner.info is not None]
            caches = ",".join(sorted({info.kv_cache_dtype for info in infos}))
            event = Event(
                "mixed_numerics",
                executor=address,
                numerics_id=numerics.numerics_id,
                others=ids,
                kv_cache_dtype=kv_cache_dtype,
                others_kv_cache_dtype=caches,
            )
            log.warning(event)

    async def _serve_model_of(self, session: ExecutorSession, limits: CoreLimits) -> None:
        """Serve the model of this executor, the first one; if it is a different one, all requests end."""
        info, old = session.info, self.model
        if old is not None and _difference(info, old.info):
            self._on_other_model("the executor came back with a different model, weights or dtype")
            self._members.clear()
            self._former.clear()
            self._source = ""
        if not self._former:
            self._first_hash = info.model_hash
        if old is None or self._tokenizer_of != info.instance_id:
            await self._load_tokenizer(info, session.get_tokenizer)
            self._tokenizer_of = info.instance_id
        self.model = ServedModel(info, limits.max_model_len, limits.max_num_seqs, self._served_name)


async def _no_chunks() -> AsyncIterator[execution_service_pb2.WeightsChunk]:
    return
    yield


@dataclass(frozen=True, slots=True)
class _Member:
    """An executor as it was when it was last attached."""

    info: ExecutorInfo
    max_model_len: int
    max_num_seqs: int


def _difference(info: ExecutorInfo, served: ExecutorInfo) -> str:
    """Return how an executor differs from the executors of the fleet, in words; empty: it fits."""
    digest, served_digest = info.weights_digest, served.weights_digest
    knows_digests = bool(digest and served_digest)
    if info.model_hash != served.model_hash and not (knows_digests and digest == served_digest):
        if info.model_id != served.model_id:
            return f"it serves a different model, {info.model_id}; the fleet serves {served.model_id}"
        if not knows_digests:
            return f"its weights or quantization of {info.model_id} differ from the fleet's"
    if knows_digests and digest != served_digest:
        what = f"its weights of {info.model_id} differ from the fleet's"
        return f"{what}: their digest is {digest[:16]}, the fleet's is {served_digest[:16]}"
    if info.dtype != served.dtype:
        return f"its dtype is {info.dtype}, the fleet's is {served.dtype}; start it with the same --dtype"
    if info.model_hash != served.model_hash:  # the files are the same, so only the quantization can differ
        return f"its quantization of {info.model_id} differs from the fleet's; start it with the same --quantization"
    return ""
