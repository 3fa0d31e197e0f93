"""A service takes as many files as it may have."""

import resource
from collections.abc import Iterator

import pytest

from scheduler_svc.processes.process import raise_file_limit


@pytest.fixture(autouse=True)
def _limits() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_low_limit_is_raised_as_far_as_it_may_be() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))

    raise_file_limit()

    soft, still_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == (2**16 if hard == resource.RLIM_INFINITY else min(hard, 2**16))
    assert still_hard == hard


@pytest.mark.parametrize("soft", [2**17, resource.RLIM_INFINITY])
def test_a_high_limit_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch, soft: int) -> None:
    changes: list[object] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", lambda *given: changes.append(given))

    raise_file_limit()

    monkeypatch.undo()
    assert changes == []
