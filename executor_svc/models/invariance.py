"""Whether what computes a model is invariant: an output depends on its request alone, to the bit.

Invariant code sums every number in an order that depends on the model's shape alone: the kernels in C, and on a GPU the
Triton kernels that `--numerics invariant` takes. A library's products are not invariant: they choose their order by the
number of rows.
"""

from dataclasses import dataclass
from typing import Literal

import torch

# "C" is `executor_svc/native/`.
Kernels = Literal["C", "Triton", "torch", "torchao", "transformers"]


@dataclass(frozen=True, slots=True)
class ComputePath:
    """What computes a model, from token ids to sampled ids.

    Attributes:
        device: Where.
        dtype: Number format of the activations.
        dense: What does the dense work; "transformers" runs the model with code of its own.
        attention: The name of what attends: "C", a backend of `--attention-backend`, or "invariant", in Triton.
        sampler: What makes tokens of logits.
        why_not_c: Why the kernels in C do not do all of it, if that is known.
        warning: What an operator should mend about that; empty: nothing.
    """

    device: torch.device
    dtype: torch.dtype
    dense: Kernels
    attention: str
    sampler: Kernels
    why_not_c: str = ""
    warning: str = ""


def why_not_invariant(path: ComputePath) -> str | None:
    """Say in a few words why outputs may depend on more than their request; None: they do not."""
    if path.dense == "transformers":
        return f"transformers runs the model{_because(path)}"
    if path.device.type == "cuda":
        return _why_not_on_gpu(path)
    if path.dtype != torch.float32:
        return f"torch computes in {str(path.dtype).removeprefix('torch.')}, and on a CPU only float32 is invariant"
    for part, kernels in (("dense work", path.dense), ("attention", path.attention), ("sampling", path.sampler)):
        if kernels != "C":
            return f"{kernels} computes the {part}{_because(path)}"
    return None


def _why_not_on_gpu(path: ComputePath) -> str | None:
    parts = (
        ("dense work", path.dense, "Triton"),
        ("attention", path.attention, "invariant"),
        ("sampling", path.sampler, "Triton"),
    )
    return next((f"{found} computes the {part} on the GPU" for part, found, wanted in parts if found != wanted), None)


def _because(path: ComputePath) -> str:
    return f", because {path.why_not_c}" if path.why_not_c else ""
