"""`python -m executor_svc`: the executor with a real model, or one rank of it."""

import os
import sys
import time
from contextlib import ExitStack

from executor_svc.config import ExecutorConfig
from executor_svc.parallel.ranks import RankAssignment, assignment_from
from executor_svc.service.process import run_executor
from executor_svc.worker.interface import Worker
from octavo.values.wording import how_to_install
from octavo_shared.errors import ModelLoadError
from octavo_shared.process.config import load_config_or_exit
from octavo_shared.process.garbage_collection import freeze, rare_looks


def main() -> int:
    """Run the executor, or a rank that follows it; return the exit code."""
    config = load_config_or_exit(ExecutorConfig, sys.argv[1:], os.environ)
    try:
        assignment = assignment_from(os.environ, config.tp)
    except ModelLoadError as error:
        print(f"octavo executor: {error}", file=sys.stderr)
        return 1
    _spin_less()
    # Triton's default is going to change, and it says so in a warning: multiply and add are fused.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    if assignment is not None and assignment.rank > 0:
        from executor_svc.worker.rank_process import run_following_rank

        return run_following_rank(config, assignment)
    with ExitStack() as at_end:
        return run_executor(config, lambda: _load_worker(config, assignment, at_end))


def _load_worker(config: ExecutorConfig, assignment: RankAssignment | None, at_end: ExitStack) -> Worker:
    """Load the model, and say so on stdout. Torch is imported here, so that the server answers before that is done."""
    started_s = time.monotonic()
    print(f"octavo executor loading {config.model}", flush=True)
    with rare_looks():
        worker = _import_and_load(config, assignment, at_end)
    freeze()
    print(f"octavo executor loaded {config.model} in {time.monotonic() - started_s:.1f} s", flush=True)
    return worker


def _import_and_load(config: ExecutorConfig, assignment: RankAssignment | None, at_end: ExitStack) -> Worker:
    try:
        from executor_svc.worker.loading import load_worker
        from executor_svc.worker.rank_process import load_leader, share_cores
    except ModuleNotFoundError as error:
        raise ModelLoadError(f"the package {error.name} is missing: {how_to_install('executor')}") from error
    if config.tp > 1:
        return load_leader(config, assignment, sys.argv[1:], os.environ, at_end)
    share_cores(config, 1)
    return load_worker(config)


def _spin_less() -> None:
    """Let OpenMP's threads, which torch uses, sleep soon when they wait for each other; read when torch is imported.

    By default they spin for milliseconds, and where other work shares the cores they steal them from
    the very thread that they wait for. A token of the demo model beside 3 busy processes took 114 and
    120 ms with this, 507 ms without; alone on the machine 58 and 69 ms with, 57 ms without (Intel Xeon
    2.5 GHz, 2 cores, 2026-11-21). A variable that is set already stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


if __name__ == "__main__":
    sys.exit(main())
