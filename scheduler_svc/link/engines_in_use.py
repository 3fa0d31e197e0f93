"""Which engines of a cell take new requests, for which model and with which tokenizer; at which one a request runs.

All engines are used that serve one model, with one tokenizer, under one name (`agree`). A request runs at the same one
of them on every front, unless that has too much to do (`choose_place`): consistent hashing with bounded loads
(Mirrokni, Thorup, Zadimoghaddam: arXiv 1608.01350), by rendezvous hashing (Thaler, Ravishankar, 1998). An engine that
comes or goes changes the place of its share of the prompts only.
"""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, TypeVar

from octavo_shared.errors import OctavoServiceError
from octavo_shared.process.events import Event
from octavo_shared.step_wire.executor_info import TokenizerFile
from scheduler_svc.link.remote_engine import ReadTokenizer, RemoteEngine
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.served_model import Reproducibility, ServedModel


@dataclass(frozen=True, slots=True)
class Kind:
    """What all engines that are used have in common."""

    name: str
    model_hash: str
    weights_digest: str
    tokenizer_digest: str


_WORDS = {
    "name": "another name",
    "model_hash": "another model",
    "weights_digest": "other weights",
    "tokenizer_digest": "another tokenizer",
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine process that takes requests."""

    kind: Kind
    scheduler_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """Which engines are used.

    Attributes:
        kind: What they serve; None: no engine takes requests.
        used: Addresses of the engines that get new requests.
        odd: Why the other engines are not used, by address.
    """

    kind: Kind | None
    used: tuple[str, ...]
    odd: Mapping[str, str]


def agree(candidates: Mapping[str, Candidate], in_use: Kind | None) -> Agreement:
    """Return which engines are used, by their addresses.

    A kind stays in use while an engine of it takes requests: so a new model comes into use when the engines of the old
    model are drained. Else it is the kind of most engines; among equals, of the engine that has served longest.
    """
    odd: dict[str, str] = {}
    latest: dict[str, str] = {}  # address of the latest engine of each scheduler
    for address in sorted(candidates, key=lambda one: (candidates[one].incarnation, one), reverse=True):
        scheduler_id = candidates[address].scheduler_id
        if (later := latest.setdefault(scheduler_id, address)) != address:
            odd[address] = (
                f"its scheduler id {scheduler_id!r} is also that of the engine at {later}, which came later; give each "
                "scheduler a --scheduler-id of its own"
            )
    ready = {address: one for address, one in candidates.items() if address not in odd}
    kinds = Counter(one.kind for one in ready.values())
    kind = in_use if in_use in kinds else None
    if kind is None and kinds:
        first = {one.kind: one.incarnation for one in sorted(ready.values(), key=lambda one: -one.incarnation)}
        kind = max(kinds, key=lambda kind: (kinds[kind], -first[kind]))
    for address, one in ready.items():
        if kind is not None and one.kind != kind:
            differs = [
                _WORDS[field.name]
                for field in fields(Kind)
                if getattr(one.kind, field.name) != getattr(kind, field.name)
            ]
            odd[address] = (
                f"it serves {' and '.join(differs)} than the engines in use; drain those to change over to it"
            )
    return Agreement(kind, tuple(sorted(ready.keys() - odd.keys())), odd)


def merged(models: Sequence[ServedModel]) -> ServedModel:
    """Return what each of several engines of one kind serves."""
    first = models[0]
    if all(model is first for model in models):
        return first
    promises = [model.reproducibility for model in models]
    ids = tuple(sorted({one for promise in promises for one in promise.numerics_ids}))
    why_not = next((promise.why_not for promise in promises if promise.why_not), "")
    if not why_not and len(ids) > 1:
        why_not = f"the schedulers' executors have {len(ids)} different numerics ids"
    return replace(
        first,
        max_model_len=min(model.max_model_len for model in models),
        max_num_seqs=min(model.max_num_seqs for model in models),
        reproducibility=Reproducibility(ids, first.reproducibility.weights_digest, why_not),
        adapters=tuple(name for name in first.adapters if all(name in model.adapters for model in models)),
        speculates=any(model.speculates for model in models),
        speculation_may_change_outputs=any(model.speculation_may_change_outputs for model in models),
    )


log = logging.getLogger(__name__)

# In place of the digest of a tokenizer.
NOT_LOADED = "not loaded"


@dataclass(slots=True)
class Joined:
    """An engine process, the task that keeps the front joined to it, and the files of its tokenizer."""

    engine: RemoteEngine
    task: "asyncio.Task[None]"
    tokenizer: tuple[TokenizerFile, ...] = ()
    tokenizer_digest: str = ""

    def keep_tokenizer(self, files: tuple[TokenizerFile, ...]) -> None:
        """Set the files of its tokenizer."""
        digest = hashlib.sha256()
        for file in files:
            digest.update(b"%d:%s%d:" % (len(file.name), file.name.encode(), len(file.content)))
            digest.update(file.content)
        self.tokenizer, self.tokenizer_digest = files, digest.hexdigest()

    def candidate(self) -> Candidate | None:
        """Return what it offers to new requests; None: it takes none."""
        engine = self.engine
        if engine.is_away or engine.why_not_ready or engine.model is None:
            return None
        model, weights_digest = engine.model, engine.model.reproducibility.weights_digest
        kind = Kind(model.name, model.info.model_hash, weights_digest, self.tokenizer_digest)
        return Candidate(kind, engine.scheduler_id, engine.incarnation)


class EnginesInUse:
    """Chooses them, and loads their tokenizer before a request is checked for their model.

    Args:
        load_tokenizer: Called before a model with another tokenizer is served.
        on_loaded: Called when that tokenizer is there: it is to be chosen again.
        name: What clients call the model; "": what the schedulers call it.
        has_own_tokenizer: Whether the operator gives the tokenizer, so that the engines' files do not count.

    Attributes:
        engines: Where new requests go.
        model: What each of them serves, or served last while all engines are away; None: no engine has served one.
        tokenizer_trouble: Why their tokenizer did not load; "": it did.
    """

    def __init__(
        self, load_tokenizer: ReadTokenizer, on_loaded: Callable[[], None], name: str, *, has_own_tokenizer: bool
    ) -> None:
        self.engines: Sequence[RemoteEngine] = ()
        self.model: ServedModel | None = None
        self.tokenizer_trouble = ""
        self._load_tokenizer = load_tokenizer
        self._on_loaded = on_loaded
        self._name = name
        self._odd: Mapping[str, str] = {}  # why engines are not used that would take requests, by address
        self._kind: Kind | None = None  # in use
        self._is_kind_settled = False  # all engines that are named had spoken when it came into use
        self._tokenizer_digest = "" if has_own_tokenizer else NOT_LOADED
        self._loading: asyncio.Task[None] | None = None
        self._differing_keys: frozenset[bytes] = frozenset()  # as last logged

    def choose(self, joined: Mapping[str, Joined]) -> None:
        """Choose among the engines that are named, by address; log which of them are not used, and why."""
        offers = {address: offer for address, one in joined.items() if (offer := one.candidate())}
        agreement = agree(offers, self._kind if self._is_kind_settled else None)
        for address, cause in agreement.odd.items():
            if self._odd.get(address) != cause:
                log.warning(Event("engine_not_used", engine=address, cause=cause))
        self._odd = agreement.odd
        kind, used = agreement.kind, [joined[address] for address in agreement.used]
        if kind is not None and kind.tokenizer_digest != self._tokenizer_digest:
            self.engines = ()
            if self._loading is None or self._loading.done():
                self._loading = asyncio.ensure_future(self._load(used[0]))
            return
        self.engines = [one.engine for one in used]
        if kind is not None:
            if self._kind not in (None, kind):
                log.info(Event("model_changed", model=kind.name, weights=kind.weights_digest))
            self._kind = kind
            self._is_kind_settled |= all(one.engine.has_spoken for one in joined.values())
            model = merged([engine.model for engine in self.engines if engine.model is not None])
            self.model = replace(model, served_name=self._name) if self._name else model
        self._compare_keys()

    async def _load(self, joined: Joined) -> None:
        """Load the tokenizer of an engine, for all engines with the same one."""
        model, files, digest = joined.engine.model, joined.tokenizer, joined.tokenizer_digest
        assert model is not None, "it offers a model"

        async def fetched() -> tuple[TokenizerFile, ...]:
            return files

        try:
            await self._load_tokenizer(model.info, fetched)
        except OctavoServiceError as error:
            if str(error) != self.tokenizer_trouble:
                log.warning(Event("no_tokenizer", model=model.name, cause=str(error)))
            self.tokenizer_trouble = str(error)
        else:
            self._tokenizer_digest, self.tokenizer_trouble = digest, ""
            self._loading = None
            self._on_loaded()

    def _compare_keys(self) -> None:
        """Log once of which schedulers the names of blocks differ: none of them finds cached blocks of another one."""
        keys = {engine.prefix_key_fingerprint: engine.scheduler_id for engine in self.engines}
        keys.pop(b"", None)
        if len(keys) > 1 and not self._differing_keys.issuperset(keys):
            self._differing_keys = frozenset(keys)
            schedulers = ",".join(sorted(keys.values()))
            fix = "give them one --prefix-key-file, so that executors keep their blocks when they change schedulers"
            log.warning(Event("prefix_keys_differ", schedulers=schedulers, fix=fix))


# What an engine may have to do at most, as a multiple of its share by its slots, as a front sees it. Fronts hear late
# of each other's requests, so an engine may really have up to 1.25 times its share.
LOAD_BOUND = 1.1

# Tokens of a prompt that decide where it goes, in whole blocks: as a rule the beginning of a system prompt.
NUM_PREFIX_TOKENS = 64


class Place(Protocol):
    """An engine process where requests can run."""

    @property
    def scheduler_id(self) -> str:
        """Its name, which stays over its restarts."""

    @property
    def num_slots(self) -> int:
        """Sequences that run there at once."""

    @property
    def num_taken(self) -> int:
        """Sequences that run or wait there."""


_Place = TypeVar("_Place", bound=Place)


def prefix_of(request: EngineRequest, block_size_tokens: int) -> bytes:
    """Return what requests have in common that should run at one place, as they can share blocks there."""
    num_tokens = min(NUM_PREFIX_TOKENS, len(request.prompt_token_ids))
    num_tokens -= num_tokens % block_size_tokens if num_tokens > block_size_tokens else 0
    prompt = request.prompt_token_ids[:num_tokens].astype("<i4", copy=False).tobytes()
    tenant, adapter = request.tenant.encode(), request.lora_adapter.encode()
    return b"%d:%s:%d:%d:%s:%s" % (len(tenant), tenant, request.cache_salt, len(adapter), adapter, prompt)


def choose_place(prefix: bytes, width: int, places: Sequence[_Place]) -> _Place:
    """Return where `width` sequences with a prompt of this prefix run.

    The first place by its hash that stays within the bound, and has free slots if any place has; else the least loaded.
    """
    ranked = sorted(places, key=lambda place: _score(place.scheduler_id, prefix), reverse=True)
    num_taken = width + sum(place.num_taken for place in ranked)
    num_slots = max(1, sum(place.num_slots for place in ranked))
    free = [place for place in ranked if place.num_taken + width <= place.num_slots] or ranked
    for place in free:
        if place.num_taken + width <= max(width, LOAD_BOUND * num_taken * place.num_slots / num_slots):
            return place
    return min(free, key=lambda place: (place.num_taken + width) / max(1, place.num_slots))


def _score(scheduler_id: str, prefix: bytes) -> bytes:
    return hashlib.blake2b(prefix, digest_size=8, key=hashlib.sha256(scheduler_id.encode()).digest()).digest()
