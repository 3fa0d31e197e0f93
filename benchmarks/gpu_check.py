"""Check and measure the GPU path on this machine, with what is installed on it; writes a report.

    make gpu-check PYTHON=python3
    python3 -m benchmarks.gpu_check [--only tests,attention,...] [--results FOLDER] [--rehearse]

Needs a CUDA device, torch 2.10, Triton 3.6, transformers, NumPy and pytest; no network, and none of the packages of
the services, for all runs in this process. Parts:

    tests        every kernel and backend beside the reference, on thousands of random cases; generation on the device
                 through the scheduler's core and the worker, beside transformers
    attention    decode attention as a share of the copy bandwidth
    stream       a decode step of one sequence, 8B-shaped
    throughput   256 ragged sequences beside transformers' static batches
    sampling     all filters at once
    invariance   all logits of a sequence, bit for bit, alone, in chunks and in batches; what --numerics invariant costs

A rehearsal runs the same code with tiny sizes on a CPU, kernels in Triton's interpreter; its figures mean nothing.
"""

import argparse
import datetime
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.gpu.report import Figure, Outcome, Report

ROOT = Path(__file__).parents[1]
PARTS = ("tests", "attention", "stream", "throughput", "sampling", "invariance")
PACKAGES = ("torch", "triton", "transformers", "numpy", "flash-attn", "flash-attn-3", "xformers")
LEAST_VERSIONS = {"torch": (2, 10), "triton": (3, 6)}
TEST_FOLDERS = ("tests/kernels", "tests/device")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; return 0 if all parts passed, 1 if one failed, 2 if it cannot be run here."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description="Check and measure the GPU path."
    )
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts to run, of {','.join(PARTS)}")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the report")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on a CPU: shows that the check works")
    options = parser.parse_args(arguments)
    parts = options.only.split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    # Before Triton is imported, by anything.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    if options.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"
    problem = why_not_here(rehearse=options.rehearse)
    if problem is not None:
        print(f"gpu-check cannot run: {problem}", file=sys.stderr)
        return 2
    return run(parts, options.results, rehearse=options.rehearse)


def why_not_here(*, rehearse: bool) -> str | None:
    """Return why the check cannot be run, in one sentence; None: it can."""
    for name, least in LEAST_VERSIONS.items():
        found = installed_version(name)
        if found is None:
            return f"{name} is not installed; install a {name} of at least {'.'.join(map(str, least))}"
        if tuple(int(part) for part in found.split("+")[0].split(".")[:2]) < least:
            return f"{name} is {found}; it needs at least {'.'.join(map(str, least))}"
    if rehearse:
        return None
    import torch

    if not torch.cuda.is_available():
        return "torch finds no CUDA device; --rehearse shows on a CPU that the check itself works"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        return f"the device has capability {capability[0]}.{capability[1]}; the kernels need 8.0"
    return None


def installed_version(name: str) -> str | None:
    """Return the version of a package; None: it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def run(parts: Sequence[str], results: Path, *, rehearse: bool) -> int:
    """Run the parts, print and write the report."""
    import torch

    from benchmarks.gpu import measurements
    from benchmarks.gpu.backends import decode_planners
    from benchmarks.gpu.invariance import invariance_figures
    from benchmarks.gpu.sizes import FULL, REHEARSAL

    device = torch.device("cpu" if rehearse else "cuda")
    sizes = REHEARSAL if rehearse else FULL
    report = Report(title_of(rehearse), describe(rehearse), f"make gpu-check ({', '.join(parts)})", not rehearse)
    copy = measurements.copy_figure(sizes, device)
    report.figures.append(copy)
    copy_rate = copy.value * 1e9

    def measure(name: str, figures: Callable[[], Iterable[Figure]]) -> None:
        if name not in parts:
            return
        begin_s = time.perf_counter()
        try:
            for figure in figures():
                report.figures.append(figure)
                print(f"{figure.name}: {figure.value:.3g} {figure.unit}  {figure.detail}", flush=True)
        except Exception as error:  # the other parts may still say something
            traceback.print_exc()
            report.outcomes.append(Outcome(name, False, f"{type(error).__name__}: {error}".splitlines()[0]))
        else:
            report.outcomes.append(Outcome(name, True, f"{time.perf_counter() - begin_s:.0f} s"))

    if "tests" in parts:
        report.outcomes += [run_tests(folder) for folder in TEST_FOLDERS]
    measure(
        "attention",
        lambda: measurements.attention_figures(decode_planners(device, sizes.dtype), sizes, device, copy_rate),
    )
    measure("stream", lambda: measurements.single_stream_figures(sizes, device, copy_rate))
    measure("invariance", lambda: invariance_figures(sizes, device))
    measure("sampling", lambda: measurements.sampling_figures(sizes, device))
    measure("throughput", lambda: measurements.throughput_figures(sizes, device))
    print("\n" + report.markdown())
    for path in report.write(results, file_name(rehearse)):
        print(f"wrote {path}")
    return 0 if report.passed else 1


def run_tests(folder: str) -> Outcome:
    """Run the tests of a folder in a process of their own; the last line of pytest is the detail."""
    command = [sys.executable, "-m", "pytest", folder, "-q", "-x", "--rootdir", ".", "--confcutdir", "."]
    command += ["-c", "benchmarks/gpu/pytest.ini", "-p", "no:cacheprovider", "-m", "not slow"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or ["pytest printed nothing"]
    print("\n".join(lines[-40:] if done.returncode else lines[-1:]), flush=True)
    if done.returncode:
        print(done.stderr[-4000:], flush=True)
    return Outcome(folder, done.returncode == 0, lines[-1].strip("= "))


def title_of(rehearse: bool) -> str:
    """Return the heading of the report."""
    if rehearse:
        return "Rehearsal of the GPU check on a CPU"
    import torch

    return f"GPU check on {torch.cuda.get_device_name()}"


def describe(rehearse: bool) -> list[str]:
    """Return the card, the machine and the versions; no host name, no path."""
    import torch

    from benchmarks.machine import processor_name

    lines = [] if rehearse else [_describe_card()]
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    lines.append(f"{processor_name()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB")
    versions = [f"{name} {found}" for name in PACKAGES if (found := installed_version(name)) is not None]
    lines.append(f"Python {platform.python_version()}, {', '.join(versions)}, CUDA {torch.version.cuda}")
    lines.append(f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}")
    return lines


def _describe_card() -> str:
    import torch

    properties = torch.cuda.get_device_properties(0)
    return (
        f"{properties.name}, capability {properties.major}.{properties.minor}, "
        f"{properties.multi_processor_count} multiprocessors, {properties.total_memory / 2**30:.0f} GiB"
    )


def file_name(rehearse: bool) -> str:
    """Return the name of the report's files, without an ending."""
    if rehearse:
        return "gpu-check-rehearsal"
    import torch

    card = torch.cuda.get_device_name().lower().replace(" ", "-")
    return f"gpu-check-{card}-{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"


if __name__ == "__main__":
    sys.exit(main())
