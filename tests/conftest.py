"""Hypothesis profiles: `quick`, and `thorough` for tests marked slow or OCTAVO_HYPOTHESIS_PROFILE=thorough."""

import os

from hypothesis import HealthCheck, Phase, settings

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
