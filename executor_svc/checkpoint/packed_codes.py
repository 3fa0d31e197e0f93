"""Codes of 4 bits, and of 8 of GPTQ, in int32 on their way to the kernels: blocks of a row.

AWQ, GPTQ and compressed-tensors have them. A weight is (code - zero) * scale; both are of a group of inputs, or of a
row. How eight codes lie in an int32, the first in its lowest bits, and what lies beside them:

    rows   [outputs, inputs / 8]: neighbours of a row; scales [outputs, groups], zeros [outputs / 8, groups], of outputs
           Source: compressors/pack_quantized of compressed-tensors 0.20.1.
    gptq   [inputs / 8, outputs]: neighbours of a row; scales [groups, outputs], zeros [groups, outputs / 8], each
           stored one less but in gptq_v2. Source: nn_modules/qlinear of GPTQModel.
    awq    [inputs, outputs / 8]: outputs 0 2 4 6 1 3 5 7; scales and zeros as gptq, the zeros in the same order.
           Source: awq/modules/linear/gemm.py of AutoAWQ.

With 8 bits gptq has four codes and four zeros in an int32; all zeros must be 128.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 -- the usual name

from executor_svc.checkpoint.gguf.rounding import RoundingErrors
from executor_svc.checkpoint.scaled_codes import INT8, CodesConfig
from executor_svc.checkpoint.scaled_weights import (
    Codes,
    check_matrix,
    check_numbers,
    check_scale_type,
    part_of,
    refuse_cut,
    rows_in,
    unpacked_shape,
)
from executor_svc.checkpoint.weight_map import BlockRows
from octavo_shared.errors import ModelLoadError

_IN_WORD: Final = 8
# Where AWQ has outputs 0 to 7.
_AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
_SYMMETRIC_ZERO: Final = 8
_SYMMETRIC_ZERO_OF_8_BITS: Final = 128


@dataclass(frozen=True, slots=True)
class GroupScales:
    """Scales and zeros of a tensor as they are stored.

    `shape`: of the tensor, [num_outputs, num_inputs]. `zeros`: None: all are 8. `group_inputs`: that share a scale.
    """

    shape: Sequence[int]
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_inputs: int


def check_groups(
    name: str, packed: Sequence[int], module: str, beside: Mapping[str, torch.Tensor], config: CodesConfig
) -> GroupScales:
    """Return the scales and zeros of a tensor.

    Args:
        name: File and tensor.
        packed: Its shape, in int32.
        module: What the names of all of its tensors begin with.
        beside: What lies beside it, by the ends of the names.
        config: What config.json says.

    Raises: ModelLoadError: something is missing, or not what the layout requires.
    """
    check_matrix(name, packed, config)
    if config.packing == "rows":
        shape = unpacked_shape(name, packed, beside.get("weight_shape"), f"{module}.weight_shape", _IN_WORD)
    elif config.packing == "gptq":
        shape = [packed[1], packed[0] * config.codes_of_element]
    else:
        shape = [packed[1] * _IN_WORD, packed[0]]
    num_outputs, num_inputs = shape
    layouts = {
        sharing: -(-num_inputs // config.group_inputs) if sharing == "group" else 1
        for sharing in sorted(config.sharings)
    }
    scale_name = f"{module}.{config.scale_name}"
    scales = check_scale_type(name, beside.get(config.scale_name), scale_name, config)
    shapes = {sharing: _as_stored(num_outputs, groups, config) for sharing, groups in layouts.items()}
    sharing = next((each for each, wanted in shapes.items() if list(scales.shape) == wanted), None)
    if sharing is None:
        expected = " or ".join(str(wanted) for wanted in shapes.values())
        raise ModelLoadError(f"{name} has a scale {scale_name} with shape {list(scales.shape)}; it must be {expected}")
    check_numbers(name, scales, scale_name, config)
    group_inputs = config.group_inputs if sharing == "group" else max(1, num_inputs)
    zeros = _check_zeros(name, num_outputs, layouts[sharing], module, beside, config)
    _check_order(name, num_inputs, group_inputs, module, beside, config)
    return GroupScales(shape, scales, zeros, group_inputs)


def _as_stored(num_outputs: int, num_groups: int, config: CodesConfig) -> list[int]:
    return [num_outputs, num_groups] if config.packing == "rows" else [num_groups, num_outputs]


def _check_zeros(
    name: str,
    num_outputs: int,
    num_groups: int,
    module: str,
    beside: Mapping[str, torch.Tensor],
    config: CodesConfig,
) -> torch.Tensor | None:
    """Return the zeros as they are stored. Raises: ModelLoadError: they are missing or wrong."""
    if config.zero_name is None:
        unused = beside.get("weight_zero_point")
        if unused is not None and bool(unused.any()):
            raise ModelLoadError(
                f"{name} has zeros {module}.weight_zero_point, but config.json says that it is symmetric"
            )
        return None
    zeros, zero_name = beside.get(config.zero_name), f"{module}.{config.zero_name}"
    if zeros is None:
        raise ModelLoadError(f"{name} is {config.kind.name}, but its zeros {zero_name} are missing")
    expected = _as_stored(-(-num_outputs // config.codes_of_element), num_groups, config)
    if zeros.dtype != torch.int32 or list(zeros.shape) != expected:
        kind = str(zeros.dtype).removeprefix("torch.")
        raise ModelLoadError(
            f"{name} has zeros {zero_name} in {kind} with shape {list(zeros.shape)}; they must be in int32 with shape "
            f"{expected}"
        )
    if config.kind == INT8:
        unpacked = zeros.contiguous().view(torch.uint8)[:, :num_outputs].int() + config.added_to_zeros
        is_wrong = unpacked != _SYMMETRIC_ZERO_OF_8_BITS
        if is_wrong.any():
            raise ModelLoadError(
                f"{name} has the zero {int(unpacked[is_wrong][0])} in {zero_name}; of codes of 8 bits it must be "
                f"{_SYMMETRIC_ZERO_OF_8_BITS}"
            )
    return zeros


def _check_order(
    name: str,
    num_inputs: int,
    group_inputs: int,
    module: str,
    beside: Mapping[str, torch.Tensor],
    config: CodesConfig,
) -> None:
    """Check that inputs are in groups one after the other. Raises: ModelLoadError: they are not."""
    last = "weight_g_idx" if config.packing == "rows" else "g_idx"
    order, order_name = beside.get(last), f"{module}.{last}"
    if order is None:
        if config.has_order:
            raise ModelLoadError(
                f"{name} has groups of inputs in any order, but {order_name}, which tells it, is missing"
            )
        return
    if order.is_floating_point() or list(order.shape) != [num_inputs]:
        kind = str(order.dtype).removeprefix("torch.")
        raise ModelLoadError(
            f"{name} has groups {order_name} in {kind} with shape {list(order.shape)}; they must be integers with "
            f"shape {[num_inputs]}"
        )
    if config.packing == "rows" and bool((order == -1).all()):  # there is no order
        return
    num_groups = -(-num_inputs // group_inputs)
    is_wrong = (order < 0) | (order >= num_groups)
    if is_wrong.any():
        raise ModelLoadError(
            f"{name} has the group {int(order[is_wrong][0])} in {order_name}; there are groups 0 to {num_groups - 1}"
        )
    if not torch.equal(order.long(), torch.arange(num_inputs) // group_inputs):
        raise ModelLoadError(
            f"{name} has its inputs in groups out of order (act-order: {order_name}), which no kernel has; use a "
            "checkpoint without desc_act or actorder: group"
        )


@dataclass(frozen=True, slots=True)
class GroupSource:
    """A matrix of codes of `GroupScales`, still in its file; indexing returns a part in blocks. As `ScaledSource`."""

    name: str
    codes: Codes
    scales: GroupScales
    config: CodesConfig
    rounding: RoundingErrors | None

    def __getitem__(self, index: slice | tuple[slice, ...], /) -> BlockRows:
        (first, last), (begin, end) = part_of(index, self.scales.shape)
        num_inputs, kind = self.scales.shape[1], self.config.kind
        is_of_rows = self.scales.group_inputs >= num_inputs
        refuse_cut(self.name, begin, end, num_inputs, 2 if is_of_rows else kind.block_inputs)
        num_blocks = -(-(end - begin) // kind.block_inputs)
        groups = (begin + torch.arange(num_blocks) * kind.block_inputs) // self.scales.group_inputs
        blocks = torch.empty(last - first, num_blocks, kind.block_bytes, dtype=torch.uint8)
        scales = self._scales_of(first, last, groups).contiguous()
        blocks[..., :4] = scales.view(torch.uint8).view(last - first, num_blocks, 4)
        if kind == INT8:
            codes = F.pad(self._bytes_of(first, last, begin, end), (0, num_blocks * kind.block_inputs - (end - begin)))
            blocks[..., 4:] = codes.view(last - first, num_blocks, -1) ^ _SYMMETRIC_ZERO_OF_8_BITS
            return rows_in(blocks, self.name, kind, self.rounding)
        blocks[..., 4] = self._zeros_of(first, last, groups)
        pairs = self._pairs_of(first, last, begin, end)
        padded = F.pad(pairs, (0, num_blocks * kind.block_inputs // 2 - pairs.shape[1]))
        blocks[..., 5:] = padded.view(last - first, num_blocks, -1)
        return rows_in(blocks, self.name, kind, self.rounding)

    def _scales_of(self, first: int, last: int, groups: torch.Tensor) -> torch.Tensor:
        """Return the scales of some outputs and groups, float32 [num_outputs, num_groups]."""
        scales = self.scales.scales
        part = scales[first:last] if self.config.packing == "rows" else scales[:, first:last].T
        return part[:, groups].float()

    def _zeros_of(self, first: int, last: int, groups: torch.Tensor) -> torch.Tensor:
        """Return the zeros, uint8 like the scales."""
        if self.scales.zeros is None:
            return torch.full((last - first, len(groups)), _SYMMETRIC_ZERO, dtype=torch.uint8)
        zeros = self.scales.zeros.T if self.config.packing == "rows" else self.scales.zeros
        unpacked = self._outputs_of(zeros[:, first // _IN_WORD : -(-last // _IN_WORD)][groups], first, last)
        return unpacked + self.config.added_to_zeros

    def _pairs_of(self, first: int, last: int, begin: int, end: int) -> torch.Tensor:
        """Return the codes of some outputs and inputs, uint8 [num_outputs, num_inputs / 2, rounded up]."""
        if self.config.packing == "awq":
            words = self.codes[begin:end, first // _IN_WORD : -(-last // _IN_WORD)]
            codes = self._outputs_of(words, first, last)
            codes = F.pad(codes, (0, codes.shape[1] % 2))
            return codes[:, ::2] | codes[:, 1::2] << 4
        return self._bytes_of(first, last, begin, end)

    def _bytes_of(self, first: int, last: int, begin: int, end: int) -> torch.Tensor:
        """Return the bytes of codes along inputs, uint8 [num_outputs, bytes of the inputs]."""
        in_word = self.config.codes_of_element
        in_byte, of_words = in_word // 4, slice(begin // in_word, -(-end // in_word))
        if self.config.packing == "rows":
            words = self.codes[first:last, of_words]
        else:
            words = self.codes[of_words, first:last].T
        stored = words.contiguous().view(torch.uint8)
        return stored[:, begin % in_word // in_byte :][:, : -(-(end - begin) // in_byte)]

    def _outputs_of(self, words: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Return what int32 hold of some outputs, [n, outputs / 8] as uint8 [num_outputs, n]."""
        halves = words.contiguous().view(torch.uint8).view(len(words), -1, _IN_WORD // 2)
        codes = torch.stack([halves & 15, halves >> 4], -1).flatten(-2)
        if self.config.packing == "awq":
            codes = codes[..., _AWQ_PLACES]
        begin = first % _IN_WORD
        return codes.flatten(1)[:, begin : begin + last - first].T
