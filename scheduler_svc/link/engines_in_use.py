"""Which engines of a cell take new requests, for which model, and with which tokenizer; `agreement.py` has the rule."""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from octavo_shared.errors import OctavoServiceError
from octavo_shared.process.events import Event
from octavo_shared.step_wire.executor_info import TokenizerFile
from scheduler_svc.link.agreement import Candidate, Kind, agree, merged
from scheduler_svc.link.remote_engine import ReadTokenizer, RemoteEngine
from scheduler_svc.request.served_model import ServedModel

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
