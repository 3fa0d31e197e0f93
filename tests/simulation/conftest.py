"""Each simulation collects its garbage at its end; what was there before is not looked at again."""

import gc

import pytest


@pytest.fixture(scope="package", autouse=True)
def frozen_heap() -> None:
    gc.collect()
    gc.freeze()
