"""What xformers returns for its paged masks, in plain torch; demands, signature and masks are those of the library."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch

from tests.contract_attention.flash_attn_stand_in import Call

# Reasons of a kernel of xformers that are this machine's, not the call's.
MACHINE_REASONS = ("device=cpu", "operator wasn't built", "triton is not available", "bf16 is only supported on A100+")


@contextmanager
def xformers() -> Iterator[list[Call]]:
    """Put a stand-in for the kernels of xformers in place; yields the calls that it gets."""
    fmha: Any = import_module("xformers.ops.fmha")
    signature = inspect.signature(fmha.memory_efficient_attention_forward)
    calls: list[Call] = []

    def memory_efficient_attention_forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = signature.bind(*args, **kwargs)  # TypeError: there is no such argument
        calls.append(("memory_efficient_attention_forward", dict(given.arguments)))
        given.apply_defaults()
        arguments = given.arguments
        assert (arguments["p"], arguments["output_dtype"]) == (0.0, None)
        query, keys, values, mask = (arguments[name] for name in ("query", "key", "value", "attn_bias"))
        inputs = fmha.Inputs(query=query, key=keys, value=values, attn_bias=mask, scale=arguments["scale"])
        inputs.validate_inputs()
        kernels = [fmha.flash.FwOp, fmha.cutlass.FwOp] if arguments["op"] is None else [arguments["op"]]
        reasons = [_reasons(kernel, inputs) for kernel in kernels]
        assert [] in reasons, reasons
        return _attend(query, keys, values, mask, arguments["scale"])

    with patch.object(fmha, "memory_efficient_attention_forward", memory_efficient_attention_forward):
        yield calls


def _reasons(kernel: Any, inputs: Any) -> list[str]:
    """Return why a kernel does not take a call, machine aside."""
    return [
        reason for reason in kernel.not_supported_reasons(inputs) if not any(word in reason for word in MACHINE_REASONS)
    ]


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: Any, scale: float) -> torch.Tensor:
    """Attend in float64 with what the fields of the mask say; tensors are [1, n, num_kv_heads, group, head_dim]."""
    output = torch.empty(query.shape, dtype=query.dtype)
    starts = mask.q_seqinfo.seqstart.tolist()
    for row, (begin, end) in enumerate(pairwise(starts)):
        slots = _key_slots(mask, row, keys.shape[1])
        heads = query[0, begin:end].double().permute(1, 2, 0, 3)  # [num_kv_heads, group, num_queries, head_dim]
        row_keys, row_values = (tensor[0, slots].double().permute(1, 2, 0, 3) for tensor in (keys, values))
        scores = scale * heads @ row_keys.transpose(2, 3)
        num_queries, num_keys = scores.shape[2:]
        hidden = torch.ones(num_queries, num_keys, dtype=torch.bool).triu(1 + num_keys - num_queries)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        output[0, begin:end] = (weights @ row_values).permute(2, 0, 1, 3).to(query.dtype)
    return output


def _key_slots(mask: Any, row: int, num_slots: int) -> torch.Tensor:
    """Return where the keys of a row are."""
    if not hasattr(mask, "block_tables"):
        begin, end = mask.k_seqinfo.seqstart[row : row + 2].tolist()
        assert end <= num_slots
        return torch.arange(begin, end)
    table, page_size = mask.block_tables, mask.page_size
    assert table.dtype == torch.int32
    assert table.shape == (len(mask.k_seqinfo.seqlen), mask.k_seqinfo.padding // page_size)
    assert 0 <= table.min() <= table.max() < num_slots // page_size, "an id is none of the pool"
    positions = torch.arange(int(mask.k_seqinfo.seqlen[row]))
    slots: torch.Tensor = table[row, positions // page_size].long() * page_size + positions % page_size
    return slots
