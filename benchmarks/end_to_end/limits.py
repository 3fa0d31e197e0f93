"""What the machine can do at most, measured in a process of its own between the turns of the engines.

    python -m benchmarks.end_to_end.limits [--threads 2]

Reading: all threads together sum 1 GiB, which no cache holds. Multiplying: chains of fused multiply-adds in registers.
Both in C (`limits.c`), compiled for this machine. The best large matrix product is torch's.
"""

import argparse
import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("limits.c")
READ_BYTES = 1 << 30
FMA_STEPS = 20_000_000
GEMM_SIZE = 3072
ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Sample:
    """The best of a few attempts each, a second; None: there is no C compiler, or no torch."""

    read_gb: float | None
    fma_gflop: float | None
    gemm_gflop: float | None


def sample_limits(num_threads: int) -> Sample:
    """Measure in a process of its own: its threads and memory are gone afterwards."""
    command = [sys.executable, "-m", "benchmarks.end_to_end.limits", "--threads", str(num_threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    return Sample(**json.loads(done.stdout))


def _compiled() -> ctypes.CDLL | None:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "limits.so")
        command = [compiler, "-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", "-pthread"]
        subprocess.run([*command, str(SOURCE), "-o", str(library)], check=True)
        loaded = ctypes.CDLL(str(library))
    loaded.read_bytes_per_s.restype = ctypes.c_double
    loaded.fma_flops_per_s.restype = ctypes.c_double
    return loaded


def _read_rate(library: ctypes.CDLL, num_threads: int, num_bytes: int) -> float:
    """Return the best rate, in bytes a second, from huge pages where the system has them."""
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for begin in range(0, num_bytes, mmap.PAGESIZE):
            memory[begin] = 1  # an untouched page is the page of zeros, which is in the cache
        held = (ctypes.c_char * num_bytes).from_buffer(memory)
        arguments = ctypes.addressof(held), ctypes.c_size_t(num_bytes), num_threads
        rate = max(library.read_bytes_per_s(ctypes.c_void_p(arguments[0]), *arguments[1:]) for _ in range(ATTEMPTS))
        del held
    return float(rate)


def _gemm_rate(num_threads: int, size: int) -> float | None:
    """Return the best rate of torch's matrix product in float32, in operations a second."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    torch.set_num_threads(num_threads)
    left, right = torch.randn(size, size), torch.randn(size, size)
    seconds = []
    for _ in range(ATTEMPTS):
        began = time.perf_counter()
        torch.mm(left, right)
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)


def measure(
    num_threads: int, read_bytes: int = READ_BYTES, fma_steps: int = FMA_STEPS, gemm: int = GEMM_SIZE
) -> Sample:
    """Measure in this process."""
    library = _compiled()
    gemm_rate = _gemm_rate(num_threads, gemm)
    if library is None:
        return Sample(None, None, gemm_rate and gemm_rate / 1e9)
    steps = ctypes.c_int64(fma_steps)
    fma_rate = max(float(library.fma_flops_per_s(steps, num_threads)) for _ in range(ATTEMPTS))
    return Sample(_read_rate(library, num_threads, read_bytes) / 1e9, fma_rate / 1e9, gemm_rate and gemm_rate / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory bandwidth and float32 peak of this machine.")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    print(json.dumps(asdict(measure(parser.parse_args().threads))))


if __name__ == "__main__":
    main()
