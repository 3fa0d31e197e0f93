"""Each simulation collects its garbage at its end; what was there before is not looked at again."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def frozen_heap() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
