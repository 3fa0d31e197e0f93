"""Every import contract of `pyproject.toml` holds, and an import that is planted breaks exactly its own."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from tests.architecture.test_imports import PACKAGES, REPOSITORY
from tests.support.each_row import each_row

CONTRACTS = [
    contract["name"]
    for contract in tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
]

NO_TORCH = "the scheduler and what both services share never import torch or transformers"
PURE_CORE = "the scheduler's core is pure: no transport, clock, randomness or logging"
FRONT_BY_INTERFACE = "the front knows the engine by its interface alone"
FRONT_PROCESS_BY_INTERFACE = "so does a front in a process of its own, and all that it needs of the link"
TOKENS_ONLY = "the engine, the core and the executors' sessions know no text and no clients"
REQUEST_BELOW = "what front and engine know of a request imports neither of them"
LAYERS = (
    "the packages stand on each other: commands, local services, the two services, what they share, the client, values"
)
NO_CLIENTS = "the services are nobody's clients: of octavo they know stubs, values and errors, and how to speak TLS"
FAKE_WITHOUT_TORCH = "the fake executor runs without torch"
EXECUTOR_ROOMS = "the rooms of the executor stand on each other"

LAZY = "def planted() -> None:\n    {}\n"

# The contract that must break, the file that gets the import at its end, the import.
PLANTS = [
    (NO_TORCH, "scheduler_svc/planted.py", "import torch"),
    (NO_TORCH, "scheduler_svc/planted.py", LAZY.format("import torch")),
    (NO_TORCH, "scheduler_svc/planted.py", "from transformers import AutoTokenizer"),
    (NO_TORCH, "scheduler_svc/planted.py", "from torch.nn import functional"),
    (NO_TORCH, "shared/octavo_shared/planted.py", "import safetensors.numpy"),
    (LAYERS, "scheduler_svc/planted.py", "import executor_svc.worker.interface"),
    (LAYERS, "executor_svc/worker/planted.py", "from scheduler_svc.core import sequence"),
    (LAYERS, "executor_svc/worker/planted.py", LAZY.format("import scheduler_svc.core.sequence")),
    (PURE_CORE, "scheduler_svc/core/planted.py", "import time"),
    (PURE_CORE, "scheduler_svc/core/planted.py", LAZY.format("import random")),
    (PURE_CORE, "scheduler_svc/core/planted.py", "from asyncio import Queue"),
    (PURE_CORE, "scheduler_svc/core/planted.py", "import logging.handlers"),
    (PURE_CORE, "scheduler_svc/core/planted.py", "import grpc.aio"),
    (PURE_CORE, "scheduler_svc/core/planted.py", "from google.protobuf import message"),
    (PURE_CORE, "scheduler_svc/core/planted.py", "from octavo_shared.step_wire.wire import encode_step"),
    (PURE_CORE, "scheduler_svc/core/planted.py", "import octavo_shared.process.config"),
    (PURE_CORE, "scheduler_svc/core/planted.py", "import scheduler_svc.executors.session"),
    (FRONT_BY_INTERFACE, "scheduler_svc/front/planted.py", "import scheduler_svc.core.sequence"),
    (FRONT_BY_INTERFACE, "scheduler_svc/front/api/planted.py", LAZY.format("import scheduler_svc.engine.engine")),
    (FRONT_BY_INTERFACE, "scheduler_svc/front/text/planted.py", "from scheduler_svc.executors import serving_limits"),
    (FRONT_BY_INTERFACE, "scheduler_svc/front/planted.py", "from scheduler_svc.link.remote_engine import RemoteEngine"),
    (
        FRONT_PROCESS_BY_INTERFACE,
        "scheduler_svc/processes/front_process.py",
        "from scheduler_svc.engine.engine import Engine",
    ),
    (
        FRONT_PROCESS_BY_INTERFACE,
        "scheduler_svc/link/remote_engine.py",
        LAZY.format("import scheduler_svc.core.stopping"),
    ),
    (FRONT_PROCESS_BY_INTERFACE, "scheduler_svc/link/messages.py", "import scheduler_svc.link.front_session"),
    (TOKENS_ONLY, "scheduler_svc/engine/planted.py", "from scheduler_svc.link import remote_engine"),
    (TOKENS_ONLY, "scheduler_svc/engine/planted.py", "from scheduler_svc.front import response"),
    (TOKENS_ONLY, "scheduler_svc/executors/planted.py", "import scheduler_svc.admin.state"),
    (REQUEST_BELOW, "scheduler_svc/request/planted.py", "import scheduler_svc.core.sequence"),
    (REQUEST_BELOW, "scheduler_svc/request/planted.py", LAZY.format("import scheduler_svc.telemetry.meter")),
    (LAYERS, "shared/octavo_shared/planted.py", "import scheduler_svc.core.sequence"),
    (LAYERS, "shared/octavo_shared/planted.py", "from executor_svc import worker"),
    (NO_CLIENTS, "shared/octavo_shared/planted.py", LAZY.format("from octavo.client import Client")),
    (NO_CLIENTS, "executor_svc/worker/planted.py", "import octavo.calls.tls"),
    (NO_CLIENTS, "scheduler_svc/planted.py", "from octavo.calls import scheduler_channel"),
    (FAKE_WITHOUT_TORCH, "executor_svc/fake/planted.py", "import torch"),
    (FAKE_WITHOUT_TORCH, "executor_svc/fake/worker.py", LAZY.format("import torch")),
    (FAKE_WITHOUT_TORCH, "executor_svc/fake/planted.py", "import executor_svc.cache.cache_engine"),
    (EXECUTOR_ROOMS, "executor_svc/worker/planted.py", LAZY.format("import executor_svc.service.kept_responses")),
    (EXECUTOR_ROOMS, "executor_svc/native/matrix.py", "from executor_svc.models.config import ModelConfig"),
    (EXECUTOR_ROOMS, "executor_svc/models/planted.py", "import executor_svc.sampler.sample_rows"),
    (EXECUTOR_ROOMS, "executor_svc/planted.py", "# a module outside of all rooms"),
]


# Plants each import by itself and checks the contracts, in one process: to start one took longer than to check.
CHECK_EACH = """
import json, pathlib, sys
from importlinter.cli import lint_imports
for path, statement in json.load(sys.stdin):
    planted = pathlib.Path(path)
    before = planted.read_text() if planted.exists() else None
    planted.write_text(f"{before or ''}\\n{statement}\\n")
    print("exit status", lint_imports(config_filename="pyproject.toml"))
    planted.unlink() if before is None else planted.write_text(before)
"""


@pytest.fixture(scope="module")
def broken_contracts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[str]]:
    """The names of the contracts that import-linter finds broken, for each plant in a copy of the four packages."""
    root = tmp_path_factory.mktemp("packages")
    for package in PACKAGES:
        shutil.copytree(REPOSITORY / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    plants = [("shared/octavo_shared/planted.py", "# nothing"), *((path, statement) for _, path, statement in PLANTS)]
    done = subprocess.run(
        [sys.executable, "-c", CHECK_EACH],
        input=json.dumps(plants),
        cwd=root,
        env={**os.environ, "COLUMNS": "200", "PYTHONPATH": os.pathsep.join([str(root), str(root / "shared")])},
        capture_output=True,
        text=True,
    )
    reports = re.split(r"^exit status (\d)\n", done.stdout, flags=re.MULTILINE)
    assert len(reports) == 2 * len(plants) + 1, done.stdout + done.stderr
    found = {}
    for plant, report, status in zip(plants, reports[::2], reports[1::2], strict=False):
        broken = [name for name in CONTRACTS if re.search(rf"^{re.escape(name)} BROKEN", report, re.MULTILINE)]
        kept = [name for name in CONTRACTS if re.search(rf"^{re.escape(name)} KEPT", report, re.MULTILINE)]
        assert len(broken) + len(kept) == len(CONTRACTS), report
        assert (status != "0") == bool(broken)
        found[plant] = broken
    return found


def test_every_contract_holds(broken_contracts: dict[tuple[str, str], list[str]]) -> None:
    assert broken_contracts["shared/octavo_shared/planted.py", "# nothing"] == []


def test_every_contract_has_a_plant() -> None:
    assert {contract for contract, _, _ in PLANTS} == set(CONTRACTS)


@each_row(*PLANTS)
def test_planted_import_breaks_exactly_its_contract(
    contract: str, path: str, statement: str, *, broken_contracts: dict[tuple[str, str], list[str]]
) -> None:
    assert broken_contracts[path, statement] == [contract]
