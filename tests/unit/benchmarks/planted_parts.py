"""Parts of a GPU check that go wrong, each in its way. They import no torch, so that a process takes milliseconds."""

import json
import os
import signal
import threading
import time

from benchmarks.gpu.part import Figure, Part, Progress, SkippedError


def sound(progress: Progress) -> str:
    progress.add(Figure(f"before, {progress.result.name}", 1.0, "s"))
    return "all well"


def segmentation_fault(progress: Progress) -> None:
    sound(progress)
    progress.doing("test_that_crashes")
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(progress: Progress) -> None:
    sound(progress)
    if os.fork() == 0:  # what a part started goes with it
        time.sleep(600)
    print(f"pid {os.getpid()}", flush=True)
    time.sleep(600)


def exception(progress: Progress) -> None:
    sound(progress)
    raise ValueError("logits differ\nby much")


def out_of_memory(progress: Progress) -> None:
    sound(progress)
    bytearray(2**62)


def no_more_memory_for_the_system(progress: Progress) -> None:
    sound(progress)
    os.kill(os.getpid(), signal.SIGKILL)


def crash_at_exit(progress: Progress) -> str:
    import atexit

    atexit.register(os.abort)
    return sound(progress)


def other_standard_input(progress: Progress) -> str:
    """Do what pytest does, and interrupt who reads meanwhile: the read begins anew, of what is there now."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and thread.ident is not None:
            signal.pthread_kill(thread.ident, signal.SIGUSR1)
    time.sleep(0.05)
    return sound(progress)


def lost_device(progress: Progress) -> str:
    """Run tests where the first error that no assertion raised has cost the device."""
    from benchmarks.gpu import test_files  # pytest takes as long as all others together

    vars(test_files)["_is_device_lost"] = lambda: True
    return test_files.run_tests(progress, "[]", json.dumps(["tests/unit/benchmarks/planted_failures.py"]))


def environment(progress: Progress) -> str:
    sound(progress)
    return f"{os.environ['TRITON_INTERPRET']}, {os.environ['CUDA_VISIBLE_DEVICES']!r}"


def skipped(progress: Progress) -> None:
    raise SkippedError("compute-sanitizer is not there")


def part(function: str, limit_s: float = 60.0, name: str = "", needs: tuple[str, ...] = ()) -> Part:
    return Part(name or function, function, f"tests.unit.benchmarks.planted_parts:{function}", limit_s, needs=needs)
