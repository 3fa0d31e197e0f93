"""Experts that a checkpoint holds stacked, all of a layer in one tensor; a model asks for each by its name.

gpt-oss has `experts.gate_up_proj`, [experts, inputs, outputs], whose outputs are gate and up by turns, and
`experts.down_proj`; in MXFP4 they are `..._blocks` and `..._scales`, with outputs before inputs.
"""

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch

from executor_svc.checkpoint.mxfp4 import (
    BLOCK_BYTES,
    BLOCK_INPUTS,
    BLOCKS,
    MXFP4_BLOCK,
    SCALES,
    join_blocks,
    restore_mxfp4,
)
from executor_svc.checkpoint.weight_map import BlockRows, TensorTarget
from octavo_shared.errors import ModelLoadError

_EXPERT: Final = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|bias)")
_WHY_NOT: Final = "is MXFP4; there it must be F32, F16 or BF16"
# Of each part of an expert: the stacked tensor, the first of its outputs, and from one to the next.
_PLACES: Final = {
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
    "down_proj": ("down_proj", 0, 1),
}


class Stack(Protocol):
    """A stacked tensor in its file: indexing reads what an expert has of it."""

    def __getitem__(self, expert: int, /) -> "torch.Tensor | CodedMatrix": ...


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """A matrix in MXFP4; indexing returns a part in blocks.

    Attributes:
        name: File and tensor.
        rows: [num_outputs, bytes of the blocks of a row] uint8.
    """

    name: str
    rows: torch.Tensor

    def each(self, first: int, step: int) -> "CodedMatrix":
        """Return some of the rows."""
        return CodedMatrix(self.name, self.rows[first::step])

    def __getitem__(self, index: slice | tuple[slice, ...], /) -> BlockRows:
        rows, *columns = index if isinstance(index, tuple) else (index,)
        blocks = self.rows[rows]
        if columns:
            begin, end, _ = columns[0].indices(self.rows.shape[1] // BLOCK_BYTES * BLOCK_INPUTS)
            if begin % BLOCK_INPUTS or end % BLOCK_INPUTS:
                raise ModelLoadError(
                    f"{self.name} cannot be shared among so many ranks: one would have inputs {begin} to {end}, "
                    f"which are not whole blocks of {BLOCK_INPUTS}; lower --tp"
                )
            blocks = blocks[:, begin // BLOCK_INPUTS * BLOCK_BYTES : end // BLOCK_INPUTS * BLOCK_BYTES]
        return BlockRows(self.name, blocks.contiguous(), MXFP4_BLOCK, None, why_not=_WHY_NOT)


@dataclass(frozen=True, slots=True)
class CodedStack:
    """Stacked matrices in MXFP4.

    Attributes:
        name: File and tensor.
        blocks: In their file, [experts, outputs, blocks of a row, 16] uint8.
        scales: [experts, outputs, blocks of a row] uint8.
        is_restored: Whether an expert comes as the numbers that its codes stand for.
    """

    name: str
    blocks: Stack
    scales: torch.Tensor
    is_restored: bool

    def __getitem__(self, expert: int, /) -> "CodedMatrix | torch.Tensor":
        blocks = self.blocks[expert]
        assert isinstance(blocks, torch.Tensor)
        try:
            rows = join_blocks(blocks, self.scales[expert])
        except ValueError as error:
            raise ModelLoadError(f"{self.name} {error}") from error
        return torch.from_numpy(restore_mxfp4(rows.numpy())) if self.is_restored else CodedMatrix(self.name, rows)


@dataclass(slots=True)
class StackedTarget(TensorTarget):
    """What becomes of a stacked tensor; see `TensorTarget`.

    Attributes:
        experts: Of each expert its targets, each with the first of its outputs and the distance to the next.
        is_transposed: Inputs come before outputs.
    """

    experts: dict[int, list[tuple[int, int, TensorTarget]]] = field(default_factory=dict)
    is_transposed: bool = False

    @property
    def nbytes(self) -> int:
        """Size of what this rank takes, for the progress bar."""
        return sum(target.nbytes for parts in self.experts.values() for _, _, target in parts)

    def fill(self, source: Stack) -> None:  # type: ignore[override]  # of a tensor with one dimension more
        """Read what is needed, an expert at a time."""
        for expert, parts in sorted(self.experts.items()):
            matrix = source[expert]
            for first, step, target in parts:
                if isinstance(matrix, CodedMatrix):
                    target.fill(matrix.each(first, step))
                else:
                    target.fill((matrix.t() if self.is_transposed else matrix)[first::step])


def is_stacked(config: Mapping[str, object]) -> bool:
    """Return whether a model with this config.json is stored so."""
    return config.get("architectures") == ["GptOssForCausalLM"]


def scales_of(blocks: str) -> str:
    """Return the name of the scales of stacked codes."""
    return blocks.removesuffix(BLOCKS) + SCALES


def stack_experts(targets: Mapping[str, TensorTarget], of_codes: Set[str]) -> dict[str, TensorTarget]:
    """Return the targets, those of experts by the names of the stacked tensors.

    Args:
        targets: By the names that the model has for them.
        of_codes: Names of the stacked tensors that are stored in MXFP4.
    """
    found: dict[str, TensorTarget] = {}
    for name, target in targets.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            found[name] = target
            continue
        module, expert, part, kind = match.groups()
        tensor, first, step = _PLACES[part]
        num_outputs = step * target.shape[0]
        stack = f"{module}.{tensor}"
        shape: tuple[int, ...]
        if kind == "bias":
            stack, shape = f"{stack}_bias", (num_outputs,)
        elif f"{stack}{BLOCKS}" in of_codes:
            stack, shape = f"{stack}{BLOCKS}", (num_outputs, target.shape[1] // BLOCK_INPUTS, BLOCK_INPUTS // 2)
        else:
            shape = (target.shape[1], num_outputs)
        is_transposed = len(shape) == 2  # numbers, not codes and no bias
        place = found.setdefault(stack, StackedTarget((0, *shape), is_transposed=is_transposed))
        assert isinstance(place, StackedTarget)
        place.experts.setdefault(int(expert), []).append((first, step, target))
        place.shape = (len(place.experts), *shape)
    return found


def stack_of(name: str) -> str | None:
    """Return the stacked tensor of an expert's weight, without an ending; None: it is of no expert."""
    match = _EXPERT.fullmatch(name)
    return None if match is None else f"{match[1]}.{_PLACES[match[3]][0]}"
