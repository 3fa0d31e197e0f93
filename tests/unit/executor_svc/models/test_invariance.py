"""Which paths on a GPU are invariant, and what is said of the others."""

from dataclasses import replace

import torch

from executor_svc.models.kernels import ComputePath, Kernels, why_not_invariant
from tests.support.each_row import each_row

INVARIANT = ComputePath(torch.device("cuda"), torch.bfloat16, "Triton", "invariant", "Triton")


def test_our_kernels_in_triton_are_invariant() -> None:
    assert why_not_invariant(INVARIANT) is None


@each_row(
    ("torch", "triton", "torch computes the dense work on the GPU"),
    ("torchao", "invariant", "torchao computes the dense work on the GPU"),
    ("Triton", "flashattention3", "flashattention3 computes the attention on the GPU"),
    ("Triton", "xformers", "xformers computes the attention on the GPU"),
    ("Triton", "triton", "triton computes the attention on the GPU"),
    ("transformers", "invariant", "transformers runs the model"),
)
def test_all_else_on_a_gpu_is_not(dense: Kernels, attention: str, reason: str) -> None:
    assert why_not_invariant(replace(INVARIANT, dense=dense, attention=attention)) == reason
