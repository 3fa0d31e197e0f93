"""gRPC ignores options that it does not know, so a name with a mistake changes nothing and nobody notices."""

import ast
from pathlib import Path

import grpc
import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("octavo", "scheduler_svc", "executor_svc", "shared", "tests", "benchmarks")


def options_in(source: str) -> set[str]:
    """Return the names of gRPC's options in a file: the first of two in a tuple, without capitals, unlike services."""
    pairs = (node.elts for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Tuple) and len(node.elts) == 2)
    names = (pair[0].value for pair in pairs if isinstance(pair[0], ast.Constant))
    return {name for name in names if isinstance(name, str) and name.startswith("grpc.") and name.islower()}


@pytest.fixture(scope="module")
def library() -> bytes:
    [path] = Path(grpc.__file__).parent.glob("_cython/cygrpc*.so")
    return path.read_bytes()


def is_known(option: str, library: bytes) -> bool:
    """Whether the library has the name at the end of a string."""
    return option.encode() + b"\0" in library


def test_the_library_knows_each_option_that_we_set(library: bytes) -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    sources = (path.read_text(encoding="utf-8") for path in files)
    options = set().union(*(options_in(source) for source in sources if '"grpc.' in source))
    assert len(options) > 10
    assert {option for option in options if not is_known(option, library)} == set()
