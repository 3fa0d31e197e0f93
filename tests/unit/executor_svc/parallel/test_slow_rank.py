"""A rank that loads for longer than a collective may take keeps nobody out."""

import socket
import subprocess
import sys
from pathlib import Path

from tests.numerics.tiny_models import save_tiny_model

# Each rank: its number, the port of the store, the model. Rank 0 is later than a collective waits.
RANK = """
import sys, time
from datetime import timedelta
import torch
from torch._C._distributed_c10d import TCPStore
from executor_svc.checkpoint.weights_digest import WeightsDigest
from executor_svc.config import ExecutorConfig
from executor_svc.parallel.group import DistributedGroup
from executor_svc.worker.loading import load_worker

rank, port, model = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
find = WeightsDigest.result
def find_late(digest):
    time.sleep(4)
    return find(digest)
WeightsDigest.result = find_late
store = TCPStore("127.0.0.1", port, 2, is_master=rank == 0, wait_for_workers=False)
group = DistributedGroup(store, rank, 2, torch.device("cpu"), timedelta(seconds=2))
load_worker(ExecutorConfig(model=model, tp=2, num_device_blocks=4, num_threads=1), group)
group.wait_for_all()
"""


def test_ranks_wait_for_the_one_that_loads_longest(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(port), str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
