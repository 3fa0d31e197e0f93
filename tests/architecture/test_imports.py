"""Who may import whom: the contracts hold, each of them bites, and the CPU side really starts without torch."""

import ast
import graphlib
import importlib.util
import json
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.each_row import each_row

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("octavo", "scheduler_svc", "executor_svc", "shared/octavo_shared")
HEAVY = ("torch", "transformers", "safetensors")
CORE_ROOMS = ("scheduler_svc.core", "scheduler_svc.engine", "scheduler_svc.executors", "scheduler_svc.admin")
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

STEP_WIRE = REPOSITORY / "shared/octavo_shared/step_wire"
PURE_MODULES = [
    *sorted((REPOSITORY / "scheduler_svc" / "core").rglob("*.py")),
    *sorted((REPOSITORY / "scheduler_svc" / "request").rglob("*.py")),
    *(STEP_WIRE / f"{name}.py" for name in ("batch_table", "table_columns", "table_digest", "delta_check")),
    *(STEP_WIRE / f"{name}.py" for name in ("step", "sampling_row", "step_layout", "token_rules")),
    *(REPOSITORY / "shared/octavo_shared/errors.py", REPOSITORY / "octavo/values/sampling_parameters.py"),
]
PURE_IMPORTS = {
    *(
        "__future__",
        "bisect",
        "collections",
        "contextlib",
        "copy",
        "dataclasses",
        "enum",
        "functools",
        "hashlib",
        "heapq",
    ),
    *("itertools", "math"),
    *("operator", "struct", "typing", "numpy", "scheduler_svc", "octavo", "octavo_shared"),
}

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
    (FRONT_PROCESS_BY_INTERFACE, "scheduler_svc/link/ends.py", "import scheduler_svc.link.front_session"),
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


@each_row(*PACKAGES)
def test_every_folder_with_modules_is_a_package(package: str) -> None:
    """Without an `__init__.py` the import checker does not see what a folder imports."""
    folders = {path.parent for path in (REPOSITORY / package).rglob("*.py")}

    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@each_row(*PURE_MODULES)
def test_the_core_imports_nothing_but_what_is_known_to_be_pure(path: Path) -> None:
    """Stricter than the contract, which names what is forbidden; it cannot see numpy.random at all."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}

    assert {name.split(".")[0] for name in imported} <= PURE_IMPORTS
    assert not {name for name in imported if name.startswith("numpy.") and name != "numpy.typing"}
    assert "random" not in attributes


def import_cycle(root: Path, *folders: str) -> list[str]:
    """Return modules in these folders that import each other in a circle, imports for type checking included."""
    found = [path for folder in folders for path in (root / folder).rglob("*.py")]
    paths = {path: ".".join(path.relative_to(root).with_suffix("").parts).removeprefix("shared.") for path in found}
    imported: dict[str, set[str]] = {}
    for path, module in paths.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
        imported[module] = names & set(paths.values())
    try:
        graphlib.TopologicalSorter(imported).prepare()
    except graphlib.CycleError as error:
        return [str(module) for module in error.args[1]]
    return []


def test_no_modules_of_the_core_or_shared_import_each_other() -> None:
    assert import_cycle(REPOSITORY, "scheduler_svc/core", "scheduler_svc/request", "shared/octavo_shared") == []


TYPES_ONLY = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from packed.b import B\n"


@pytest.mark.parametrize(
    "statement",
    [
        "import packed.b",
        "from packed import b",
        "from packed.b import B",
        LAZY.format("import packed.b"),
        TYPES_ONLY,
    ],
)
def test_an_import_cycle_is_found(tmp_path: Path, statement: str) -> None:
    (tmp_path / "packed" / "room").mkdir(parents=True)
    (tmp_path / "packed" / "room" / "a.py").write_text(statement)
    assert import_cycle(tmp_path, "packed") == []

    (tmp_path / "packed" / "b.py").write_text("from packed.room.a import A")
    assert import_cycle(tmp_path, "packed") in (
        ["packed.room.a", "packed.b", "packed.room.a"],
        ["packed.b", "packed.room.a", "packed.b"],
    )


def modules_below(package: str) -> list[str]:
    """Return the names of all modules of a package without importing any."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    names = [package]
    for info in pkgutil.iter_modules(spec.submodule_search_locations, package + "."):
        names += modules_below(info.name) if info.ispkg else [info.name]
    return names


def loaded_after_importing(modules: list[str], looked_for: Sequence[str]) -> list[str]:
    """Import modules in a fresh process; return which of the packages and modules looked for came with them."""
    code = (
        f"import importlib, sys; sys.path[:0] = {[str(REPOSITORY), str(REPOSITORY / 'shared')]!r}\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(*(name for name in {looked_for!r} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_scheduler_imports_no_torch_in_a_fresh_process() -> None:
    modules = modules_below("scheduler_svc") + modules_below("octavo_shared")

    assert "scheduler_svc.__main__" in modules
    assert loaded_after_importing(modules, HEAVY) == []


def test_the_fake_executor_imports_no_torch_in_a_fresh_process() -> None:
    assert loaded_after_importing(["executor_svc.fake.__main__", "executor_svc.fake.worker"], HEAVY) == []


def test_the_client_and_the_command_line_import_nothing_of_the_services() -> None:
    names = ("command_line", "bench", "chat", "connection", "drain", "explain", "generate", "options", "top")
    modules = ["octavo.client", "octavo.admin_client", "octavo.errors", "octavo.values.sampling_params"]
    modules += [f"octavo.commands.{name}" for name in names]
    assert loaded_after_importing(modules, ["octavo_shared", "scheduler_svc", "executor_svc"]) == []


@each_row(
    "-c 'from octavo import Client, SamplingParams'",
    "-m octavo.cli --help",
    "-m scheduler_svc --help",
    "-m executor_svc --help",
    "-m executor_svc.fake --help",
)
def test_folders_of_a_user_do_not_stand_for_ours(command: str, *, tmp_path: Path) -> None:
    """Python looks first in the folder where it is started, or where the script is."""
    for name in ("calls", "commands", "config", "core", "local", "models", "processes", "shared", "values"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "__init__.py").write_text("raise AssertionError('a folder of the user was imported')")
    homes = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "shared")])
    done = subprocess.run(
        [sys.executable, *shlex.split(command)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": homes},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# What a process of the scheduler does without, and would start later by.
LATE = {
    "scheduler_svc.__main__": ["aiohttp", "cryptography", "numpy", "scheduler_svc.core", "tokenizers"],
    "scheduler_svc.processes.supervisor": ["aiohttp", "cryptography", "numpy", "scheduler_svc.core", "tokenizers"],
    "scheduler_svc.processes.engine_process": [
        "aiohttp",
        "cryptography",
        "jinja2",
        "scheduler_svc.front.front",
        "tokenizers",
    ],
    "scheduler_svc.processes.front_process": ["aiohttp", "cryptography", "opentelemetry", "scheduler_svc.core"],
    "executor_svc.__main__": ["aiohttp", "cryptography", "torch"],
}


@each_row(*LATE)
def test_a_process_starts_with_what_it_needs_and_no_more(module: str) -> None:
    assert loaded_after_importing([module], LATE[module]) == []


def test_the_check_for_torch_can_fail() -> None:
    assert loaded_after_importing(["executor_svc.cache.cache_engine"], HEAVY) == ["torch"]


def test_a_front_process_loads_nothing_of_the_core() -> None:
    """Nor when it has imported what it imports only if it is configured: tracing."""
    modules = ["scheduler_svc.processes.front_process", *modules_below("scheduler_svc.front")]
    modules.append("scheduler_svc.telemetry.request_tracing")

    assert loaded_after_importing(modules, [*CORE_ROOMS, *HEAVY]) == []


def test_the_check_for_the_core_can_fail() -> None:
    found = loaded_after_importing(["scheduler_svc.link.core_servicer"], CORE_ROOMS)

    assert found == ["scheduler_svc.core", "scheduler_svc.engine", "scheduler_svc.executors"]
