"""The adapters of a run: what executors find at their sources, at which schedulers their names are, who names them.

Some seeds have them. `adapter_operator.py` loads, reloads and unloads them, and changes what is at the sources.
"""

import hashlib
import random
import re
from collections import defaultdict
from collections.abc import Callable, Sequence

from octavo.values.outputs import Delta, Finished
from octavo_shared.errors import ModelLoadError
from tests.simulation.plan import FIRST_LAST_NUMBER, Plan, RequestPlan

# So many of the seeds have adapters; in so many of these, executors serve one by its source.
_SHARE = 0.4
_OFFERED_SHARE = 0.5
_MOST_LOAD_STEPS = 3

# So many of the requests name one, and so many of those a name that there never is.
_NAMING_SHARE = 0.8
_NOBODY_SHARE = 0.05

# Names, and the sources that they are loaded from, at first each from its own; more than an executor has slots.
NAMES = ("a", "b", "c", "d")
NOBODY = "nobody"
NUM_VERSIONS = 3
MISSING = -1

# So long after a source had something, an executor may tell of it: it is not read again for a while once a load has
# failed, and scheduler and executor may stand still.
_TOLD_WITHIN_S = 60.0

# Rare things with adapters, beside those that a life shows (`rare_lives.py`).
RELOADED, LOADED_AFTER_A_LOSS = "adapter reloaded in use", "adapter loaded after a loss"
NO_SLOT, AFTER_AN_ENGINE = "adapter slots in use", "adapter after an engine"
RARE_WITH_ADAPTERS = {
    RELOADED: "a name was loaded in place with another content, and requests with the former one ran",
    LOADED_AFTER_A_LOSS: "an executor was lost that loaded an adapter, and another load of it ended",
    NO_SLOT: "a request waited for a slot, and others used all of them",
    AFTER_AN_ENGINE: "an answer with an adapter had begun, went on at the next engine, and finished",
}

# What a request is told whose adapter is unknown, or not loaded.
UNKNOWN_NAME = "lora_adapter is "
NOT_LOADED = "the executor cannot load the adapter: "
_NOT_KNOWN_HERE = "which began the answer, is not loaded"
_OTHER_CONTENT = re.compile(r"(\w+) has another content now; its SHA-256 is not (\w+), which was asked for")
_IS_MISSING = re.compile(r"(\w+) is not there")


def _content_of(source: str, version: int) -> bytes:
    return f"{source}, version {version}".encode()


def _digest_of(source: str, version: int) -> str:
    return hashlib.sha256(_content_of(source, version)).hexdigest()


_CONTENTS = {
    _digest_of(source, version): _content_of(source, version) for source in NAMES for version in range(NUM_VERSIONS)
}


class Adapters:
    """What a run has of adapters.

    Args:
        plan: Of the run.
        clock: Returns its time in seconds.

    Attributes:
        num_slots: Of each executor; 0: the run has no adapters.
        num_load_steps: How many steps after its own a load ends.
        offered: What executors serve by themselves.
    """

    def __init__(self, plan: Plan, clock: Callable[[], float]) -> None:
        draw = random.Random(f"adapters {plan.seed}")
        num_slots = draw.choice((2, 3)) if draw.random() < _SHARE else 0
        self.num_slots = 0 if plan.has_encoder else num_slots  # no such model takes adapters
        self.num_load_steps = draw.randint(0, _MOST_LOAD_STEPS)
        self.offered = NAMES[:1] if draw.random() < _OFFERED_SHARE else ()
        self._plan = plan
        self._clock = clock
        self._versions: dict[str, list[tuple[float, int]]] = {source: [(clock(), 0)] for source in NAMES}
        self._known_since_s: defaultdict[str, dict[str, float]] = defaultdict(dict)  # by scheduler, then by name

    def name_of(self, request: RequestPlan) -> str:
        """Return the adapter that a request names, and again when all is well; "": none."""
        draw = random.Random(f"adapter of {request.number % FIRST_LAST_NUMBER} {self._plan.seed}")
        if not self.num_slots or draw.random() >= _NAMING_SHARE:
            return ""
        return NOBODY if draw.random() < _NOBODY_SHARE else draw.choice(NAMES)

    # Sources -----------------------------------------------------------------------------------------

    def put(self, source: str, version: int) -> None:
        """Let a source have another content from now on; MISSING: it is gone."""
        self._versions[source].append((self._clock(), version))

    def version_of(self, source: str) -> int:
        """Return what a source has now."""
        return self._versions[source][-1][1]

    def read(self, source: str) -> bytes:
        """Return the content of a source, as an executor reads it. Raises ModelLoadError: it is not there."""
        version = self.version_of(source)
        if version == MISSING:
            raise ModelLoadError(f"{source} is not there")
        return _content_of(source, version)

    def had(self, source: str, since_s: float) -> set[str]:
        """Return the digests of what a source has had since a time; "" if it was missing."""
        versions = self._versions[source]
        first = max((place for place, (at_s, _) in enumerate(versions) if at_s <= since_s), default=0)
        return {"" if version == MISSING else _digest_of(source, version) for _, version in versions[first:]}

    # Names -------------------------------------------------------------------------------------------

    def note_known(self, scheduler: str, name: str) -> None:
        """A scheduler has said that it knows a name."""
        self._known_since_s[scheduler].setdefault(name, self._clock())

    def note_unknown(self, scheduler: str, *names: str) -> None:
        """From now on a scheduler may not know some names, or any."""
        for name in names or NAMES:
            self._known_since_s[scheduler].pop(name, None)

    def is_known(self, name: str, schedulers: Sequence[str], since_s: float) -> bool:
        """Return whether all of some schedulers have known a name for certain since a time."""
        return all(self._known_since_s[scheduler].get(name, since_s + 1.0) <= since_s for scheduler in schedulers)

    # What requests are told --------------------------------------------------------------------------

    def explain(self, error: str, name: str, *, is_quiet: bool) -> bool:
        """Return whether a request is told what comes of its adapter, as may be while something is done to those."""
        is_told = bool(name) and any(said in error for said in (UNKNOWN_NAME, NOT_LOADED, _NOT_KNOWN_HERE))
        return is_told and (not is_quiet or name == NOBODY)

    def why_wrong(self, error: str, name: str, scheduler: int, sent_at_s: float) -> str:
        """Say why a request that was sent at a time must not be told this; empty: it may, as far as adapters go."""
        if not name:
            return ""
        numbers = range(self._plan.num_schedulers) if self._plan.cell else [scheduler]
        schedulers = [f"scheduler{number}:1" for number in numbers]
        if UNKNOWN_NAME in error and name != NOBODY and self.is_known(name, schedulers, sent_at_s):
            return "; every scheduler knows this adapter"
        if "continuation.adapter" in error:
            return "; what goes on must say what began it"
        if NOT_LOADED not in error:
            return ""
        since_s = sent_at_s - _TOLD_WITHIN_S
        if (missing := _IS_MISSING.search(error)) and "" in self.had(missing[1], since_s):
            return ""
        if other := _OTHER_CONTENT.search(error):
            source, asked_for = other.groups()
            if self.had(source, since_s) - {asked_for, ""} and asked_for in _CONTENTS:
                return ""
        return "; nothing explains that no executor has its adapter"

    def content_of(self, finished: Finished) -> bytes | None:
        """Return the content that made an answer, as it says itself; None: it does not say, or says several."""
        digests = {made.adapter_digest for output in finished.outputs for made in output.provenance}
        return _CONTENTS.get(digests.pop()) if len(digests) == 1 else None


def digests_of(delta: Delta) -> set[str]:
    """Return those that a delta says that its tokens were made with."""
    return {made.adapter_digest for made in delta.provenance}
