"""Records the code of a release, for the tests that run it beside the current code.

Run it once at each release, on the tagged commit, with `make record-release` (or
`python -m tests.skew.record_release COMMIT`), and commit the result: `octavo-VERSION.zip` beside this
file, next to those of releases before, which stay until somebody drops them. It holds what a scheduler,
its core and fronts, a fake executor and a client import, without torch, and
`PYTHONPATH=octavo-VERSION.zip` runs them. The same commit gives the same bytes: entries are in order and
have no time of their own. The comment of the archive is the commit.
"""

import ast
import io
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

HERE = Path(__file__).parent
PACKAGES = ("executor_svc", "octavo", "scheduler_svc", "shared")

# What the tests start or import; everything that these import comes with them.
ROOTS = (
    *("executor_svc.fake.__main__", "octavo.client", "scheduler_svc.__main__"),
    *(f"scheduler_svc.processes.{name}" for name in ("engine_process", "front_process")),
)

# The least that the format can say: midnight, 1 January 1980.
NO_TIME = (1980, 1, 1, 0, 0, 0)
FILE_MODE = 0o100644 << 16
UNIX = 3


def main() -> int:
    """Record the release at the commit of the command line, HEAD by default; return the exit code."""
    commit = _git("rev-parse", f"{sys.argv[1] if len(sys.argv) > 1 else 'HEAD'}^{{commit}}").decode().strip()
    sources = read_sources(_git("archive", "--format=tar", commit, *PACKAGES))
    archive = HERE / f"octavo-{version_of(sources)}.zip"
    archive.write_bytes(zip_release(needed_sources(sources, ROOTS), commit))
    print(f"{archive.name}: {archive.stat().st_size / 1024:.0f} KiB, from {commit}")
    return 0


def read_sources(tar: bytes) -> dict[str, bytes]:
    """Return the Python files of a tar archive by path, as they are installed."""
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        members = [member for member in archive if member.isfile() and member.name.endswith(".py")]
        return {
            member.name.removeprefix("shared/"): content.read()
            for member in members
            if (content := archive.extractfile(member))
        }


def version_of(sources: Mapping[str, bytes]) -> str:
    """Return `octavo.__version__`.

    Raises: ValueError: octavo/__init__.py does not say it as one string.
    """
    for node in ast.parse(sources["octavo/__init__.py"]).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise ValueError("octavo/__init__.py has no __version__")


def needed_sources(sources: Mapping[str, bytes], roots: tuple[str, ...]) -> dict[str, bytes]:
    """Return the files that the modules `roots` import, at any time and through any number of others.

    Raises: KeyError: a root is not among the sources.
    """
    paths = {_module_of(path): path for path in sources}
    needed: dict[str, bytes] = {}
    pending = [name for root in roots for name in _with_parents(root)]
    while pending:
        path = paths[pending.pop()]
        if path in needed:
            continue
        needed[path] = sources[path]
        imported = (parent for name in _imports(ast.parse(sources[path])) for parent in _with_parents(name))
        pending += [name for name in imported if name in paths]
    return needed


def zip_release(sources: Mapping[str, bytes], commit: str) -> bytes:
    """Return the files as a zip archive that depends on nothing but them, the commit and the zlib in use."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path in sorted(sources):
            entry = zipfile.ZipInfo(path, NO_TIME)
            entry.external_attr, entry.create_system = FILE_MODE, UNIX
            archive.writestr(entry, sources[path], zipfile.ZIP_DEFLATED, compresslevel=9)
        archive.comment = commit.encode()
    return content.getvalue()


def _imports(node: ast.AST) -> Iterator[str]:
    """Yield what is imported anywhere below a node, but for type checkers only; absolute imports only, as we write."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from (
            f"{node.module}.{alias.name}" for alias in node.names
        )  # a submodule, or else only its parents count
    for child in ast.iter_child_nodes(node):
        yield from _imports(child)


def _with_parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=HERE.parents[1], check=True, stdout=subprocess.PIPE).stdout


if __name__ == "__main__":
    sys.exit(main())
