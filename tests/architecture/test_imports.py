"""Who imports whom, and that the CPU side really starts without torch; test_import_contracts.py has the contracts."""

import ast
import graphlib
import importlib.util
import os
import pkgutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.each_row import each_row

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("octavo", "scheduler_svc", "executor_svc", "shared/octavo_shared")
HEAVY = ("torch", "transformers", "safetensors")
CORE_ROOMS = ("scheduler_svc.core", "scheduler_svc.engine", "scheduler_svc.executors", "scheduler_svc.admin")
STEP_WIRE = REPOSITORY / "shared/octavo_shared/step_wire"
PURE_MODULES = [
    *sorted((REPOSITORY / "scheduler_svc" / "core").rglob("*.py")),
    *sorted((REPOSITORY / "scheduler_svc" / "request").rglob("*.py")),
    *(STEP_WIRE / f"{name}.py" for name in ("batch_table", "table_columns", "delta_check")),
    *(STEP_WIRE / f"{name}.py" for name in ("step", "sampling_row", "token_rules")),
    *(REPOSITORY / "shared/octavo_shared/errors.py", REPOSITORY / "octavo/values/sampling_params_table.py"),
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


def modules_below(package: str) -> list[str]:
    """Return the names of all modules of a package without importing any."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    names = [package]
    for info in pkgutil.iter_modules(spec.submodule_search_locations, package + "."):
        names += modules_below(info.name) if info.ispkg else [info.name]
    return names


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a user, where Python looks first if it is started there: nothing in it may stand for ours."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("calls", "commands", "config", "core", "local", "models", "processes", "shared", "values"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise AssertionError('a folder of the user was imported')")
    return folder


def run_in(home: Path, *arguments: str) -> str:
    """Run Python in a folder; return what it prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=home,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "shared")])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_after_importing(home: Path, modules: list[str], looked_for: Sequence[str]) -> list[str]:
    """Import modules in a fresh process; return which of the packages and modules looked for came with them."""
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(*(name for name in {looked_for!r} if name in sys.modules))"
    )
    return run_in(home, "-c", code).split()


def test_the_scheduler_imports_no_torch_in_a_fresh_process(home: Path) -> None:
    modules = modules_below("scheduler_svc") + modules_below("octavo_shared")

    assert "scheduler_svc.__main__" in modules
    assert loaded_after_importing(home, modules, HEAVY) == []


def test_the_client_and_the_command_line_import_nothing_of_the_services(home: Path) -> None:
    names = ("command_line", "bench", "chat", "connection", "drain", "explain", "generate", "options", "top")
    modules = ["octavo.client", "octavo.admin_client", "octavo.errors", "octavo.values.sampling_params"]
    modules += [f"octavo.commands.{name}" for name in names]
    assert loaded_after_importing(home, modules, ["octavo_shared", "scheduler_svc", "executor_svc"]) == []


# The scheduler's modules are imported in that folder by the other tests here.
@each_row("-m octavo.cli --help", "-m executor_svc --help")
def test_folders_of_a_user_do_not_stand_for_ours(command: str, *, home: Path) -> None:
    run_in(home, *command.split())


# What a process does without, and would start later by.
LATE = {
    "scheduler_svc.__main__ scheduler_svc.processes.supervisor": [
        "aiohttp",
        "cryptography",
        "numpy",
        "scheduler_svc.core",
        "tokenizers",
    ],
    "scheduler_svc.processes.engine_process": [
        "aiohttp",
        "cryptography",
        "jinja2",
        "scheduler_svc.front.front",
        "tokenizers",
    ],
    "scheduler_svc.processes.front_process": ["aiohttp", "cryptography", "opentelemetry", "scheduler_svc.core"],
    "executor_svc.__main__ executor_svc.fake.__main__ executor_svc.fake.worker": ["aiohttp", "cryptography", *HEAVY],
}


@each_row(*LATE)
def test_a_process_starts_with_what_it_needs_and_no_more(modules: str, *, home: Path) -> None:
    assert loaded_after_importing(home, modules.split(), LATE[modules]) == []


def test_a_front_process_loads_nothing_of_the_core(home: Path) -> None:
    """Nor when it has imported what it imports only if it is configured: tracing."""
    modules = ["scheduler_svc.processes.front_process", *modules_below("scheduler_svc.front")]
    modules.append("scheduler_svc.telemetry.request_tracing")

    assert loaded_after_importing(home, modules, [*CORE_ROOMS, *HEAVY]) == []
