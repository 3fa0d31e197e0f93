"""A process that is one rank of a group: rank 0 becomes a worker of the service, the others follow it."""

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch

from executor_svc.config import ExecutorConfig
from executor_svc.device.cpus import read_cpus
from executor_svc.device.selection import find_device
from executor_svc.parallel.ranks import RankAssignment
from executor_svc.parallel.rendezvous import FollowingRank, LeadingRank, end_group
from executor_svc.worker.interface import Worker
from executor_svc.worker.loading import check_model, load_worker
from executor_svc.worker.rank_worker import LeaderWorker, follow
from executor_svc.worker.torch_worker import TorchWorker
from octavo_shared.errors import ModelLoadError, StepFailedError
from octavo_shared.process.events import Event, configure_logging

logger = logging.getLogger(__name__)


def load_leader(
    config: ExecutorConfig,
    assignment: RankAssignment | None,
    argv: Sequence[str],
    environ: Mapping[str, str],
    at_end: ExitStack,
) -> Worker:
    """Join the group as rank 0 and load its part of the model.

    Args:
        config: With `tp` above 1.
        assignment: By a launcher; None: start the other ranks on this machine.
        argv: Arguments of this process, for the ranks that it starts.
        environ: Its environment.
        at_end: Gets what ends the other ranks in order.

    Raises: ModelLoadError: the others do not come, or the model cannot be loaded.
    """
    check_model(config, are_ranks_here=assignment is None)
    local_rank = 0 if assignment is None else assignment.local_rank
    device = find_device(config.device, local_rank)
    leading = LeadingRank(assignment, config.tp, argv, environ, device)
    at_end.callback(leading.close)
    local_size = config.tp if assignment is None else _local_size(environ)
    share_cores(config, local_size)
    worker = load_worker(config, leading.group, device, local_size)
    assert isinstance(worker, TorchWorker), "encoders have one rank"
    return LeaderWorker(worker, leading.steps, leading.blocks, leading.end)


def run_following_rank(config: ExecutorConfig, assignment: RankAssignment) -> int:
    """Run a rank above 0 until rank 0 ends; return the exit code."""
    configure_logging(config.log_level, config.log_format)
    # A terminal or a cluster tells all ranks to stop at once; rank 0 lets its requests end, and then says so.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        device = find_device(config.device, assignment.local_rank)
        following = FollowingRank(assignment, device)
        local_size = _local_size(os.environ)
        share_cores(config, local_size)
        worker = load_worker(config, following.group, device, local_size)
        assert isinstance(worker, TorchWorker), "encoders have one rank"
        follow(worker, following.steps, following.blocks)
    except ModelLoadError as error:
        print(f"octavo executor: rank {assignment.rank}: {error}", file=sys.stderr)
        return 1
    except StepFailedError as error:
        end_group(f"rank {assignment.rank}: {error}")  # an orderly end may wait for a device that is lost
    following.group.close()
    return 0


def _local_size(environ: Mapping[str, str]) -> int:
    """Return how many ranks this machine has; launchers and `LocalRanks` say it."""
    return int(environ.get("LOCAL_WORLD_SIZE", "1"))


def share_cores(config: ExecutorConfig, num_ranks: int) -> None:
    """Give each rank of this machine its share of the cores; more threads than cores would wait for each other."""
    if config.num_threads is not None:
        return
    cpus = read_cpus()
    # Torch's own choice is every CPU, unless OMP_NUM_THREADS says fewer.
    num_threads = max(1, min(cpus.num_threads(num_ranks), torch.get_num_threads() // num_ranks))
    torch.set_num_threads(num_threads)
    logger.info(Event("threads", num_threads=num_threads, cpus=cpus.num_cpus, cores=cpus.num_cores, quota=cpus.quota))
