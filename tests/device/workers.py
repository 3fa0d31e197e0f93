"""Workers as a GPU has them: Triton kernels, sampling on the device, decodes replayed.

Where there is no CUDA device all of it runs on the CPU: the kernels in Triton's interpreter, a replay by running the
function again.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.models import executor_settings, usable_backends
from executor_svc.attention.cache_format import choose_cache_dtype
from executor_svc.attention.invariant_triton_backend import InvariantAttentionBackend
from executor_svc.checkpoint.model_directory import ModelDirectory
from executor_svc.checkpoint.weights import Checkpoint
from executor_svc.models.decoder import Decoder
from executor_svc.models.families import parse_config
from executor_svc.models.kernels import ChosenModel, FoundLibrary, compute_path
from executor_svc.models.selection import choose_decoder, choose_model
from executor_svc.models.triton_dense import TritonDense
from executor_svc.sampler.device_sampling import sample_on_device
from executor_svc.worker.assembly import ModelIdentity, assemble_worker
from executor_svc.worker.graph_capture import Capture, CudaCapture, Cut, Launch, Replay, graph_capture
from executor_svc.worker.torch_worker import TorchWorker

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_GPU = DEVICE.type == "cuda"


@dataclass
class CountedCapture:
    """Captures graphs where there is a device for them, and counts replays."""

    capture: Capture | None
    num_replays: int = 0

    def __call__(self, run: Callable[[], torch.Tensor]) -> Replay:
        if self.capture is not None:
            replay = self.capture(run)
        else:
            run()
            replay = run

        def count_and_replay() -> torch.Tensor:
            self.num_replays += 1
            return replay()

        return count_and_replay


class CountedPieces(CountedCapture):
    """The same, and of pieces: without a device nothing runs apart what is around the reads of the cache."""

    num_steps: int = 0  # that were recorded in pieces

    def in_pieces(self, run: Callable[[Cut], torch.Tensor]) -> tuple[list[Launch], torch.Tensor]:
        assert isinstance(self.capture, CudaCapture)
        launches, output = self.capture.in_pieces(run)

        def count_and_launch() -> None:
            self.num_steps += 1
            launches[-1]()

        return [*launches[:-1], count_and_launch], output


def worker_with(
    backend: str,
    directory: Path,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    capture: Capture | None = None,
    **changes: Any,
) -> tuple[TorchWorker, CountedCapture]:
    """Return a worker of the model in a directory, and what counts its replays, unless `capture` records its graphs.

    The backend "invariant" is that of `--numerics invariant`, with the products that go with it.
    """
    is_invariant = backend == "invariant"
    attention, block_size = usable_backends(DEVICE, dtype)["triton" if is_invariant else backend]
    if is_invariant:
        attention = InvariantAttentionBackend(None if IS_GPU else 4)
    config = executor_settings(
        model=str(directory),
        device=DEVICE.type,
        dtype=str(dtype).removeprefix("torch."),
        block_size_tokens=block_size,
        **{
            "num_device_blocks": 64,
            "max_num_seqs": 8 if IS_GPU else 3,
            "max_num_batched_tokens": 64,
            "host_cache_gib": 0.0,
            "numerics": "invariant" if is_invariant else "fast",
            **changes,
        },
    )
    counted = CountedPieces(graph_capture(DEVICE)) if IS_GPU else CountedCapture(None)
    monkeypatch.setattr("executor_svc.worker.assembly.graph_capture", lambda _: capture or counted)
    monkeypatch.setattr("executor_svc.worker.assembly.device_sampling", lambda _: sample_on_device)
    model_config = parse_config(json.loads((directory / "config.json").read_text()), directory / "config.json")
    if IS_GPU:
        chosen = choose_decoder(model_config, config, DEVICE)
    else:
        model = Decoder(model_config, TritonDense(dtype, DEVICE, is_invariant=is_invariant))
        path = compute_path(DEVICE, dtype, "Triton", attention, FoundLibrary(None))
        cache_dtype = choose_cache_dtype(config.kv_cache_dtype, dtype)
        chosen = ChosenModel(model, attention, path, model.load, kv_cache_dtype=cache_dtype)
    chosen.load(Checkpoint(directory))
    chosen = replace(chosen, attention=attention, block_size=block_size)
    identity = ModelIdentity("test", "", model_config.max_position_embeddings)
    return assemble_worker(chosen, identity, config, DEVICE), counted


def reference_worker(directory: Path, **changes: Any) -> TorchWorker:
    """Return a worker of the same model as plain as there is: torch in float32 on the CPU, sampling on the host."""
    return served_worker(directory, torch.device("cpu"), cpu_kernels="torch", **changes)


def served_worker(directory: Path, device: torch.device = DEVICE, **changes: Any) -> TorchWorker:
    """Return the worker that an executor would make: on a CPU it is the stand-in for that of a GPU."""
    config = executor_settings(
        model=str(directory),
        device=device.type,
        **{
            "dtype": "float32",
            "num_device_blocks": 64,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "host_cache_gib": 0.0,
            **changes,
        },
    )
    chosen = choose_model(ModelDirectory(directory), config, device)
    chosen.load(Checkpoint(directory))
    max_model_len = chosen.model.shape.max_position_embeddings
    return assemble_worker(chosen, ModelIdentity("test", "", max_model_len), config, device)
