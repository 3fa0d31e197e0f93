"""Scenario of weights that are replaced while an executor runs, beside what reading, hashing and packing take."""

import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.costs.harness import Figures, Groups, Size, Way, in_turn, scenario
from benchmarks.costs.workers import title
from executor_svc.checkpoint.model_directory import ModelDirectory
from executor_svc.checkpoint.weights import Checkpoint
from executor_svc.config import ExecutorConfig
from executor_svc.device.cpus import read_cpus
from executor_svc.device.selection import find_device
from executor_svc.models.kernels import ChosenModel
from executor_svc.models.selection import choose_model
from executor_svc.worker.loading import load_worker


@scenario("weights", "an update of all weights of a running executor, which makes their digest, on all cores", pairs=7)
async def weights(size: Size) -> Groups:
    """The files are those that the model was loaded from: what has been packed is overwritten all the same."""
    directory = size.directory()
    for number_format in size.of(("none", "int8-a8", "int4"), ("none",)):
        config = ExecutorConfig.model_validate(
            {
                "model": str(directory),
                "weights_dir": (str(directory.parent),),
                "dtype": "float32",
                "quantization": number_format,
                "num_threads": read_cpus().num_threads(),
                "num_device_blocks": 64,
                "num_host_blocks": 0,
            }
        )
        worker = load_worker(config)
        model = choose_model(ModelDirectory(directory), config, find_device("cpu", 0))
        name = f"{title(number_format)}: "
        apart = f"{name}digest, then packing"

        yield [
            Way(f"{name}plain copy", in_turn(timed, copy, directory)),
            Way(f"{name}digest", in_turn(timed, hash_all, directory)),
            Way(apart, in_turn(timed, hash_and_pack, directory, model)),
            Way(f"{name}update", in_turn(timed, worker.update_weights, directory, ""), beside=apart),
        ]


def copy(directory: Path) -> None:
    """Read all files of weights into memory."""
    for path in directory.glob("*.safetensors"):
        path.read_bytes()


def hash_all(directory: Path) -> None:
    """Make the digest as an update makes it, with nothing beside it."""
    with Checkpoint(directory).digest() as digest:
        digest.result()


def hash_and_pack(directory: Path, model: ChosenModel) -> None:
    """Do what an update does, one after the other, each on all cores."""
    hash_all(directory)
    model.load(Checkpoint(directory))


def timed(run: Callable[..., object], *arguments: object) -> Figures:
    began_s = time.perf_counter()
    run(*arguments)
    return {"time, s": time.perf_counter() - began_s}
