"""Which sources a snapshot is of."""

import re
from pathlib import Path

import pytest

import scheduler_svc.core
import scheduler_svc.request
from scheduler_svc.step_log.snapshot import core_digest

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
