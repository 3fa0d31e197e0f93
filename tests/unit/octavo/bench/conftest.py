"""Sessions of `octavo bench` here leave the garbage collector of the process of the tests as it is."""

import gc

import pytest


@pytest.fixture(autouse=True)
def _leave_old_objects_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tests/conftest.py has frozen would be looked at by every later test."""
    for name in ("collect", "freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda: None)
