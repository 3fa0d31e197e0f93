"""Shared fixtures; Hypothesis profiles: `quick`, and `thorough` (slow tests, OCTAVO_HYPOTHESIS_PROFILE=thorough)."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from octavo.model_store import find_model

settings.register_profile(
    "quick",
    max_examples=40,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=1000, derandomize=False)
settings.load_profile(os.environ.get("OCTAVO_HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The directory of the demo model; tests that use it are marked `model`."""
    directory = find_model("smollm2")
    if directory is None:
        pytest.fail("the demo model is not prepared: run `octavo model prepare smollm2`, or pytest with -m 'not model'")
    return directory
