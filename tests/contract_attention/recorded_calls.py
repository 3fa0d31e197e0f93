"""How we call each library, in words: one line an argument. `recorded_calls.json` has what was last agreed to.

python -m tests.contract_attention.recorded_calls        write the file anew, after a change that is meant
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from executor_svc.attention.flash_attn_backend import FlashAttention2Backend, FlashAttention3Backend
from executor_svc.attention.interface import AttentionBackend
from executor_svc.attention.xformers_backend import XformersBackend
from tests.contract_attention.cases import CASES
from tests.contract_attention.flash_attn_stand_in import Call, flash_attn_2, flash_attn_3
from tests.contract_attention.xformers_stand_in import xformers

PATH = Path(__file__).parent / "recorded_calls.json"

StandIn = Callable[[], AbstractContextManager[list[Call]]]
# Library: its stand-in, our backend, the block size, and what of a layer it does.
LIBRARIES: dict[str, tuple[StandIn, Callable[..., AttentionBackend], int, tuple[str, ...]]] = {
    "flash_attn 2": (
        flash_attn_2,
        partial(FlashAttention2Backend, num_multiprocessors=132),
        256,
        ("soft cap", "window", "ALiBi"),
    ),
    "flash_attn 3": (
        flash_attn_3,
        partial(FlashAttention3Backend, num_multiprocessors=132),
        16,
        ("soft cap", "window"),
    ),
    "xformers": (xformers, XformersBackend, 64, ()),
}

Described = dict[str, list[dict[str, str]]]  # case: calls: "function" and its arguments


def cases_of(library: str) -> list[str]:
    """Return the names of the cases that a library can do."""
    abilities = LIBRARIES[library][3]
    return [
        name
        for name in CASES
        if all(ability in abilities for ability in ("soft cap", "window", "ALiBi") if ability in name)
    ]


def describe_calls(library: str) -> Described:
    """Call a library with every case that it can do."""
    stand_in, make, block_size, _ = LIBRARIES[library]
    described = {}
    for name in cases_of(library):
        with stand_in() as calls:
            inputs = CASES[name].inputs(block_size, torch.bfloat16)
            inputs.keys.nan_to_num_()
            inputs.values.nan_to_num_()
            inputs.attend(make(), CASES[name].layer)
        described[name] = [describe(call) for call in calls]
    return described


def describe(call: Call) -> dict[str, str]:
    """Return a call in words."""
    name, arguments = call
    return {"function": name, **{argument: _describe(value) for argument, value in arguments.items()}}


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} {_stride_class(value)}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "q_seqinfo"):
        pages = f", pages of {value.page_size}, {_describe(value.block_tables)}" if hasattr(value, "page_size") else ""
        rows = f"queries {value.q_seqinfo.seqstart_py}, keys {list(value.k_seqinfo.intervals())}"
        return f"{type(value).__name__}: {rows}{pages}"
    return repr(value)


def _stride_class(tensor: torch.Tensor) -> str:
    if tensor.is_contiguous():
        return "contiguous"
    repeated = [dimension for dimension, stride in enumerate(tensor.stride()) if stride == 0]
    if repeated:
        return f"repeated along dimensions {repeated}"
    return "last dimension contiguous" if tensor.stride(-1) == 1 else f"strides {tensor.stride()}"


if __name__ == "__main__":
    PATH.write_text(json.dumps({library: describe_calls(library) for library in LIBRARIES}, indent=2) + "\n", "utf-8")
