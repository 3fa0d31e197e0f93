"""Generate what is committed and written by no hand, or check that it is current.

    python protos/generate.py            write it
    python protos/generate.py --check    exit 1 if what is committed differs

First the files that come from the table of sampling parameters (`sampling_code.py`), one of them a `.proto`; then the
stubs in `octavo/` from the `.proto` files.

The generators are pinned to a low version on purpose: generated code refuses to run on a runtime
older than its generator, so a new generator would lock users of older grpcio and protobuf out.
They live in a virtual environment of their own (`.venv-protos`), since they need an older protobuf
than the services run on.
"""

import argparse
import filecmp
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable
from pathlib import Path

PINNED_GENERATORS = ("grpcio-tools==1.76.0", "protobuf==6.33.6", "mypy-protobuf==5.1.0", "setuptools>=77.0.1")
PROTOS = Path(__file__).resolve().parent
ROOT = PROTOS.parent

sys.path.insert(0, str(ROOT))  # the table of this tree, whichever is installed

from sampling_code import sources  # noqa: E402

GENERATED_SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def main() -> int:
    """Write or check the files; return the exit code."""
    parser = argparse.ArgumentParser(description="Generate the gRPC stubs in octavo/, and the sampling parameters.")
    parser.add_argument("--check", action="store_true", help="compare with what is committed, write nothing")
    check = parser.parse_args().check
    stale = [path for path, content in sources().items() if not is_current(ROOT / path, content)]
    if check and stale:
        return report(stale)
    for path in stale:
        (ROOT / path).write_text(sources()[path], encoding="utf-8")
    python = generator_python()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        generate(python, out)
        return report_differences(out) if check else write(out)


def generator_python() -> Path:
    """Return the Python of the generators' environment, making it when its pins changed."""
    home = ROOT / ".venv-protos"
    python = home / "bin" / "python"
    stamp = home / "pins"
    pins = "\n".join(PINNED_GENERATORS)
    if not stamp.exists() or stamp.read_text() != pins:
        print("installing the stub generators into .venv-protos ...", file=sys.stderr)
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PINNED_GENERATORS], check=True)
        stamp.write_text(pins)
    return python


def generate(python: Path, out: Path) -> None:
    """Run the pinned protoc into the folder `out`."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("octavo/**/*.proto"))
    plugins = [f"--plugin={name}={python.parent / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    outputs = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    command = [str(python), "-m", "grpc_tools.protoc", f"--proto_path={PROTOS}", *plugins, *outputs, *sources]
    subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True)


def generated_files(folder: Path) -> set[Path]:
    """Return the generated files below `folder`, relative to it."""
    return {path.relative_to(folder) for path in folder.glob("octavo/**/*") if path.name.endswith(GENERATED_SUFFIXES)}


def write(out: Path) -> int:
    """Replace the committed stubs by those in `out`."""
    for path in generated_files(ROOT) - generated_files(out):
        (ROOT / path).unlink()
    for path in generated_files(out):
        target = ROOT / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((out / path).read_bytes())
        for package in (target.parent, target.parent.parent):
            (package / "__init__.py").touch()
    return 0


def report_differences(out: Path) -> int:
    """Print which committed stubs are stale; return 1 if there is any."""
    fresh, committed = generated_files(out), generated_files(ROOT)
    stale = sorted(
        path
        for path in fresh | committed
        if path not in fresh & committed or not filecmp.cmp(out / path, ROOT / path, shallow=False)
    )
    return report(stale)


def is_current(path: Path, content: str) -> bool:
    """Return whether a file has this content."""
    return path.exists() and path.read_text(encoding="utf-8") == content


def report(stale: Iterable[str | Path]) -> int:
    """Print which files are stale; return 1 if there is any."""
    paths = list(stale)
    for path in paths:
        print(f"stale: {path} (run `make protos`)", file=sys.stderr)
    return 1 if paths else 0


if __name__ == "__main__":
    sys.exit(main())
