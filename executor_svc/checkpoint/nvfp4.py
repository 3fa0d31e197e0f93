"""NVFP4 weights of safetensors on their way to the kernels: compressed-tensors and ModelOpt, in blocks of a row.

A weight is code * scale * global scale: codes in E2M1, of inputs 2 i and 2 i + 1 in the low and the high half of byte
i, scales of 16 inputs in E4M3, one of the tensor in float32. compressed-tensors stores one divided by the last.
Sources: compressors/nvfp4 of compressed-tensors 0.20.1; qtensor/nvfp4_tensor.py of NVIDIA's ModelOpt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 -- the usual name

from executor_svc.checkpoint.gguf.rounding import RoundingErrors
from executor_svc.checkpoint.scaled_codes import NVFP4, CodesConfig
from executor_svc.checkpoint.scaled_weights import (
    Codes,
    check_matrix,
    check_numbers,
    check_scale_type,
    part_of,
    refuse_cut,
    rows_in,
)
from executor_svc.checkpoint.weight_map import BlockRows
from octavo_shared.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class Fp4Scales:
    """Scales of a tensor: of groups as they are stored, and the one that multiplies them; `shape`: of the tensor."""

    shape: Sequence[int]
    groups: torch.Tensor
    of_all: torch.Tensor


def check_fp4_scales(
    name: str, packed: Sequence[int], module: str, beside: Mapping[str, torch.Tensor], config: CodesConfig
) -> Fp4Scales:
    """Return the scales of a tensor; see `check_groups`.

    Raises: ModelLoadError: something is missing, or not what the layout requires.
    """
    check_matrix(name, packed, config)
    shape = [packed[0], packed[1] * 2]
    scale_name, global_name = f"{module}.{config.scale_name}", f"{module}.{config.global_name}"
    groups, expected = beside.get(config.scale_name), [shape[0], -(-shape[1] // config.group_inputs)]
    if groups is None:
        raise ModelLoadError(f"{name} is {config.kind.name}, but its scale {scale_name} is missing")
    if groups.dtype != torch.float8_e4m3fn or list(groups.shape) != expected:
        kind = str(groups.dtype).removeprefix("torch.")
        raise ModelLoadError(
            f"{name} has a scale {scale_name} in {kind} with shape {list(groups.shape)}; it must be in float8_e4m3fn "
            f"with shape {expected}"
        )
    check_numbers(name, groups.float(), scale_name, config)
    of_all = check_scale_type(name, beside.get(config.global_name), global_name, config)
    if of_all.numel() != 1:
        raise ModelLoadError(f"{name} has a scale {global_name} with shape {list(of_all.shape)}; it must be [1]")
    of_all = of_all.float().flatten()
    check_numbers(name, of_all, global_name, config)
    if config.packing == "pairs":
        of_all = 1 / of_all
        check_numbers(name, of_all, f"{global_name}, inverted", config)
    return Fp4Scales(shape, groups, of_all)


@dataclass(frozen=True, slots=True)
class Fp4Source:
    """A matrix in NVFP4, still in its file; indexing returns a part in blocks. As `ScaledSource`."""

    name: str
    codes: Codes
    scales: Fp4Scales
    config: CodesConfig
    rounding: RoundingErrors | None

    def __getitem__(self, index: slice | tuple[slice, ...], /) -> BlockRows:
        (first, last), (begin, end) = part_of(index, self.scales.shape)
        size = NVFP4.block_inputs
        refuse_cut(self.name, begin, end, self.scales.shape[1], size)
        num_blocks = -(-(end - begin) // size)
        scales = self.scales.groups.view(torch.uint8)[first:last, begin // 16 : -(-end // 16)]
        codes = self.codes[first:last, begin // 2 : -(-end // 2)]
        blocks = torch.empty(last - first, num_blocks, NVFP4.block_bytes, dtype=torch.uint8)
        blocks[..., :4] = self.scales.of_all.view(torch.uint8)
        blocks[..., 4:6] = F.pad(scales, (0, num_blocks * 2 - scales.shape[1])).view(-1, num_blocks, 2)
        blocks[..., 6:] = F.pad(codes, (0, num_blocks * size // 2 - codes.shape[1])).view(-1, num_blocks, size // 2)
        return rows_in(blocks, self.name, NVFP4, self.rounding)
