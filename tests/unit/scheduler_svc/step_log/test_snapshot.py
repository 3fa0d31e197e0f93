"""Which sources a snapshot is of, and what of the core it has."""

import re
from pathlib import Path

import numpy as np
import pytest

import scheduler_svc.core
import scheduler_svc.request
from octavo_shared.step_wire.batch_table import BatchTable
from scheduler_svc.core.blocks.eviction_order import EvictionOrder
from scheduler_svc.core.blocks.prefix_cache import PrefixCache
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.request.parameters import BeamSearchParams
from scheduler_svc.step_log.snapshot import _parts, core_digest
from scheduler_svc.step_log.state_fields import FORMS
from tests.support.driving import group, max_tokens, small_limits
from tests.support.fleet_driving import FleetBench

CORE, REQUEST = (Path(package.__path__[0]) for package in (scheduler_svc.core, scheduler_svc.request))
IMPORT = re.compile(r"^from scheduler_svc\.request\.(\w+) import ", re.MULTILINE)


def test_the_digest_is_of_every_module_of_requests_that_the_core_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = {name for path in CORE.rglob("*.py") for name in IMPORT.findall(path.read_text())}
    read: list[Path] = []
    read_bytes = Path.read_bytes

    def note(path: Path) -> bytes:
        read.append(path)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", note)
    assert core_digest.__wrapped__() == core_digest()
    assert imported
    assert {REQUEST / f"{name}.py" for name in imported} <= set(read)


# Classes that are written otherwise than attribute by attribute.
WRITTEN_WHOLE = (EvictionOrder, PrefixCache, BatchTable)


def test_what_of_a_core_changes_is_in_the_table() -> None:
    """A new attribute that decisions depend on needs its place in `state_fields.py`."""
    swapping = small_limits(blocks=8, host_blocks=8, preemption_mode=PreemptionMode.SWAP, prefix_caching=True)
    fresh = _parts(FleetBench(small_limits(prefix_caching=True), swapping).fleet)
    bench = FleetBench(small_limits(prefix_caching=True), swapping)
    changed = set()
    for arrival in range(12):
        search = BeamSearchParams(2) if arrival % 4 == 2 else None
        bench.add(
            group(arrival, 5 + arrival % 7, max_tokens(8), num_sequences=1 + (arrival % 4 == 1), beam_search=search)
        )
    for _ in range(40):
        for member in bench.members:
            bench.step(member, 1.0)
            for part, former in zip(_parts(bench.fleet), fresh, strict=True):
                for name, value in vars(part).items():
                    is_plain = isinstance(value, bool | int | float | str | list | dict | set | tuple | np.ndarray)
                    if (
                        is_plain
                        and not isinstance(part, WRITTEN_WHOLE)
                        and not np.array_equal(value, vars(former)[name])
                    ):
                        changed.add((type(part), name))
            while member.results:
                bench.process(member)
    fields = {(kind, name) for kind, form in FORMS.items() for name in form.hints}
    of_the_fleet = {name for _, name in changed if name in ("cores", "inboxes", "pools")}  # made by joining
    missing = {(kind.__name__, name) for kind, name in changed - fields if name not in of_the_fleet}
    assert not missing
    assert len(changed) > 40, "something has happened"
