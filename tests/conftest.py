"""Shared fixtures; Hypothesis profiles: `quick`, and `thorough` (slow tests, OCTAVO_HYPOTHESIS_PROFILE=thorough).

Where there is no NVIDIA device, Triton's kernels are interpreted. Triton decides that when it is imported, so it is
said here, before any test module is.
"""

import gc
import os
import shutil
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.support.large_tables import thin

if shutil.which("nvidia-smi") is None and not list(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["TRITON_INTERPRET"] = "1"
# OpenMP's threads wait for each other asleep: beside another busy process they would take its cores from themselves.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
# Triton warns that its default is going to change; the kernels are tested with fused multiply-add.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

# A shell that runs the tests in the background lets them, and every program that they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker here: a GPU's image has settings of its own."""
    config.addinivalue_line(
        "markers", "further_case: of a large table; left out by `make test`, run by `make test-all`"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for garbage neither while modules and tests pile up nor, later, among them: nothing of that is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before markers are asked for."""
    thin(items)


def pytest_collection_finish() -> None:
    """Let torch compute in one thread where there are several workers: the others have the other cores."""
    if "PYTEST_XDIST_WORKER" in os.environ and (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The GGUF file of the demo model; tests that use it are marked `model`."""
    from octavo.models.store import find_model  # needs what a machine that only runs kernels may lack

    file = find_model("smollm2")
    if file is None:
        pytest.fail("the demo model is not prepared: run `octavo model prepare smollm2`, or pytest with -m 'not model'")
    return file


@pytest.fixture(scope="session")
def float32_model(demo_model: Path) -> Path:
    """The demo model as a Hugging Face directory in float32; tests that use it are marked `model`."""
    from benchmarks import float32_model  # needs more than most tests do

    return float32_model.float32_model()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread: tiny tensors are too small to share, and the other cores are for others."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
