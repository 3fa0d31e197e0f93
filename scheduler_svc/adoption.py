"""Whether an executor that was just attached may serve, and what the fleet serves from then on.

The first executor of a fleet says what is served; others must be able to serve the same, also while the
first one is away for a restart. Read next: `served_model.py`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Container

from scheduler_svc.core.fleet import Fleet
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.executor_client import ExecutorRefusedError
from scheduler_svc.executor_session import ExecutorSession
from scheduler_svc.served_model import CoreSettings, ServedModel, serving_limits
from scheduler_svc.tokenizer import Tokenizer


class Adoption:
    """Makes the cores of executors that may serve.

    Args:
        fleet: Where the cores join.
        addresses: Those that there ought to be an executor at.
        settings: Of the cores.
        load_tokenizer: Makes the tokenizer from a session, or from the operator's own directory.
        on_other_model: Called with a sentence before another model is served than before.

    Attributes:
        model: What is served, or was last; None: no executor has been attached yet.
    """

    def __init__(
        self,
        fleet: Fleet,
        addresses: Container[str],
        settings: CoreSettings,
        load_tokenizer: Callable[[ExecutorSession], Awaitable[Tokenizer]],
        on_other_model: Callable[[str], None],
    ) -> None:
        self.model: ServedModel | None = None
        self._fleet = fleet
        self._addresses = addresses
        self._settings = settings
        self._load_tokenizer = load_tokenizer
        self._on_other_model = on_other_model
        self._lock = asyncio.Lock()
        self._serving_addresses: set[str] = set()  # where the served model was when last attached

    async def adopt(self, session: ExecutorSession, address: str) -> Scheduler:
        """Return a core for an executor that was just attached at an address.

        Raises: ExecutorRefusedError, ExecutorFaultError, TokenizerFileError: it cannot be used.
        """
        async with self._lock:  # two that attach at once must agree on the model
            if self._fleet.cores:
                limits = self._limits_beside_others(session)
            else:
                self._require_same_model(session, address)
                limits = await self._serve_model_of(session)
            self._serving_addresses.add(address)
            return self._fleet.join(limits, session.epoch, address)

    def _limits_beside_others(self, session: ExecutorSession) -> SchedulerLimits:
        info, served = session.info, self.model
        assert served is not None, "the first executor said what is served"
        if (info.model_hash, info.dtype) != (served.info.model_hash, served.info.dtype):
            raise ExecutorRefusedError(f"it has another model or number format, {info.model_id} {info.dtype}")
        return serving_limits(info, self._settings, served.max_model_len)

    def _require_same_model(self, session: ExecutorSession, address: str) -> None:
        """Refuse another model as long as another address of the fleet served ours when it was last attached."""
        info, served = session.info, self.model
        if served is None or (info.model_hash, info.dtype) == (served.info.model_hash, served.info.dtype):
            return
        self._serving_addresses.discard(address)
        expected = sorted(serving for serving in self._serving_addresses if serving in self._addresses)
        if expected:
            what = f"it has another model or number format, {info.model_id} {info.dtype}"
            raise ExecutorRefusedError(f"{what}; the fleet serves {served.info.model_id} from {', '.join(expected)}")

    async def _serve_model_of(self, session: ExecutorSession) -> SchedulerLimits:
        """Serve what this executor, the first one, has; requests for anything else end."""
        info, old = session.info, self.model
        if old is not None and (info.model_hash, info.dtype) != (old.info.model_hash, old.info.dtype):
            self._on_other_model("the executor came back with another model, number format or quantization")
            self._serving_addresses.clear()
        limits = serving_limits(info, self._settings)
        is_same_instance = old is not None and old.info.instance_id == info.instance_id
        tokenizer = old.tokenizer if old and is_same_instance else await self._load_tokenizer(session)
        self.model = ServedModel(info, tokenizer, limits.max_model_len, limits.max_num_seqs)
        return limits
