"""Experts that a checkpoint holds stacked, all of a layer in one tensor; a model asks for each by its name.

One tensor has the outputs of gate and of up of each expert, another those of down; a `StackLayout` says how. gpt-oss
may have them in MXFP4: `..._blocks` and `..._scales`, with outputs before inputs.
"""

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType
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

_EXPERT: Final = re.compile(r"(.*)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|bias)")
_WHY_NOT: Final = "is MXFP4; there it must be F32, F16 or BF16"
# Layers that predict further tokens are not read.
_IS_APART: Final = re.compile(r"(?!mtp\.).*\.experts\.\d+\.")


@dataclass(frozen=True, slots=True)
class StackLayout:
    """How the numbers of an expert lie in a stacked tensor.

    Attributes:
        is_transposed: Inputs come before outputs.
        by_turns: Outputs are gate and up by turns; else up comes behind all of gate.
        gate_up: How the name of the tensor of gate and up ends, behind that of the module.
        down: The same of down.
    """

    is_transposed: bool
    by_turns: bool
    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"

    def tensor(self, module: str, part: str) -> str:
        """Return the name of the tensor that holds a part of all experts of a module."""
        return f"{module}.{self.down if part == 'down_proj' else self.gate_up}"

    def rows(self, part: str, count: int) -> slice:
        """Return the outputs of a part, so many, among those of its tensor."""
        if part == "down_proj":
            return slice(None)
        index = int(part == "up_proj")
        return slice(index, None, 2) if self.by_turns else slice(index * count, (index + 1) * count)


_LAYOUTS: Final[Mapping[str, StackLayout]] = MappingProxyType(
    {
        "Gemma4ForCausalLM": StackLayout(is_transposed=False, by_turns=False),
        "GptOssForCausalLM": StackLayout(is_transposed=True, by_turns=True),
        "GraniteMoeHybridForCausalLM": StackLayout(
            is_transposed=False, by_turns=False, gate_up="input_linear.weight", down="output_linear.weight"
        ),
        "Qwen3_5MoeForCausalLM": StackLayout(is_transposed=False, by_turns=False),
    }
)


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

    def part(self, rows: slice) -> "CodedMatrix":
        """Return some of the rows."""
        return CodedMatrix(self.name, self.rows[rows])

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
        experts: Of each expert its targets, each with its outputs.
        is_transposed: Inputs come before outputs.
    """

    experts: dict[int, list[tuple[slice, TensorTarget]]] = field(default_factory=dict)
    is_transposed: bool = False

    @property
    def nbytes(self) -> int:
        """Size of what this rank takes, for the progress bar."""
        return sum(target.nbytes for parts in self.experts.values() for _, target in parts)

    def fill(self, source: Stack) -> None:  # type: ignore[override]  # of a tensor with one dimension more
        """Read what is needed, an expert at a time."""
        for expert, parts in sorted(self.experts.items()):
            matrix = source[expert]
            for rows, target in parts:
                if isinstance(matrix, CodedMatrix):
                    target.fill(matrix.part(rows))
                else:
                    target.fill((matrix.t() if self.is_transposed else matrix)[rows])


def stack_layout(config: Mapping[str, object], names: Iterable[str]) -> StackLayout | None:
    """Return how a model with this config.json, and tensors of these names, has stacks; None: its experts are apart."""
    architectures = config.get("architectures")
    found = next((each for name, each in _LAYOUTS.items() if architectures == [name]), None)
    return None if any(_IS_APART.match(name) for name in names) else found


def scales_of(blocks: str) -> str:
    """Return the name of the scales of stacked codes."""
    return blocks.removesuffix(BLOCKS) + SCALES


def stack_experts(
    targets: Mapping[str, TensorTarget], layout: StackLayout, of_codes: Set[str]
) -> dict[str, TensorTarget]:
    """Return the targets, those of experts by the names of the stacked tensors.

    Args:
        targets: By the names that the model has for them.
        layout: Of the stacks.
        of_codes: Names of the stacked tensors that are stored in MXFP4.
    """
    found: dict[str, TensorTarget] = {}
    for name, target in targets.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            found[name] = target
            continue
        module, expert, part, kind = match.groups()
        stack, count = layout.tensor(module, part), target.shape[0]
        num_outputs = count if part == "down_proj" else 2 * count
        is_transposed = False
        shape: tuple[int, ...]
        if kind == "bias":
            stack, shape = f"{stack}_bias", (num_outputs,)
        elif f"{stack}{BLOCKS}" in of_codes:
            stack, shape = f"{stack}{BLOCKS}", (num_outputs, target.shape[1] // BLOCK_INPUTS, BLOCK_INPUTS // 2)
        else:
            is_transposed = layout.is_transposed
            shape = (target.shape[1], num_outputs) if is_transposed else (num_outputs, target.shape[1])
        place = found.setdefault(stack, StackedTarget((0, *shape), is_transposed=is_transposed))
        assert isinstance(place, StackedTarget)
        place.experts.setdefault(int(expert), []).append((layout.rows(part, count), target))
        place.shape = (len(place.experts), *shape)
    return found


def stack_of(name: str, layout: StackLayout) -> str | None:
    """Return the stacked tensor of an expert's weight, without an ending; None: it is of no expert."""
    match = _EXPERT.fullmatch(name)
    return None if match is None else layout.tensor(match[1], match[3])
