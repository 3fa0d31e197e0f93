"""Which part of which tensor of a checkpoint goes where, on one rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

Range = tuple[int, int]  # begin and end


class WeightTarget(Protocol):
    """Where the loader puts weights. A `torch.Tensor` is one."""

    @property
    def nbytes(self) -> int:
        """Size of what is put there, for the progress bar."""

    def copy_(self, source: torch.Tensor, /) -> object:
        """Take over the values of a tensor of the right shape, converted as needed."""


class TensorSource(Protocol):
    """A tensor that may still be in a file: indexing reads that part of it. A `torch.Tensor` is one."""

    def __getitem__(self, index: slice | tuple[slice, ...], /) -> torch.Tensor:
        """Return a part."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor and its place."""

    rows: tuple[Range, ...]  # read one after the other
    columns: Range | None  # None: all, or the tensor is a vector
    destination: WeightTarget
    # Added to every value.
    offset: float = 0.0

    def copy_from(self, source: TensorSource) -> None:
        """Read the part and put it to its place."""
        columns = () if self.columns is None else (slice(*self.columns),)
        parts = [source[slice(*rows), *columns] for rows in self.rows]
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        self.destination.copy_(values.float() + self.offset if self.offset else values)


@dataclass(slots=True)
class TensorTarget:
    """What becomes of one tensor of a checkpoint. No pieces: this rank needs nothing of it."""

    shape: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Size of what this rank takes, for the progress bar."""
        return sum(piece.destination.nbytes for piece in self.pieces)

    def fill(self, source: TensorSource) -> None:
        """Read what is needed of a tensor of this shape."""
        for piece in self.pieces:
            piece.copy_from(source)


class WeightMap:
    """The targets of a model by the names of a checkpoint."""

    def __init__(self) -> None:
        self.targets: dict[str, TensorTarget] = {}

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        destination: WeightTarget,
        *,
        rows: Sequence[Range] | None = None,
        columns: Range | None = None,
        offset: float = 0.0,
    ) -> None:
        """Say where a part of a tensor goes.

        Args:
            name: Of the tensor.
            shape: Of all of it.
            destination: For the part.
            rows: The rows of the part, in this order; None: all.
            columns: Its columns; None: all.
            offset: Added to every value.
        """
        self.ignore(name, shape)
        rows = ((0, shape[0]),) if rows is None else tuple(rows)
        self.targets[name].pieces.append(Piece(rows, columns, destination, offset))

    def ignore(self, name: str, shape: tuple[int, ...]) -> None:
        """Say that the model has a tensor, whether or not this rank needs a part of it."""
        target = self.targets.setdefault(name, TensorTarget(shape))
        assert target.shape == shape, "all parts of a tensor agree on its shape"


class WeightSource(Protocol):
    """What fills the weights of a model: a checkpoint."""

    def load_into(
        self, targets: Mapping[str, TensorTarget], is_redundant: Callable[[str], bool], optional_prefix: str = ""
    ) -> None:
        """Fill the targets; see `executor_svc.checkpoint.weights.Checkpoint.load_into`."""
