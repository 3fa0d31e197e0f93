"""Which part of which tensor of a checkpoint goes where, on one rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from octavo_shared.errors import ModelLoadError

if TYPE_CHECKING:
    from executor_svc.checkpoint.gguf.rounding import RoundingErrors

Range = tuple[int, int]  # begin and end


class WeightTarget(Protocol):
    """Where the loader puts weights. A `torch.Tensor` is one."""

    @property
    def nbytes(self) -> int:
        """Size of what is put there, for the progress bar."""

    def copy_(self, source: torch.Tensor, /) -> object:
        """Take over the values of a tensor of the right shape, converted as needed."""


@runtime_checkable
class HasMemory(Protocol):
    """A place for weights that is no tensor."""

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        """What holds the weights."""


def memory_of(destination: WeightTarget) -> Sequence[torch.Tensor]:
    """Return the tensors that hold the weights of a place."""
    if isinstance(destination, torch.Tensor):
        return (destination,)
    assert isinstance(destination, HasMemory), "the others say it"
    return destination.memory


@runtime_checkable
class BlockTarget(Protocol):
    """A place for weights that keeps the codes of a file as they are."""

    def copy_blocks(self, blocks: torch.Tensor, block_type: int, order: torch.Tensor | None) -> bool:
        """Take over the codes of rows of blocks; return whether all of them are held exactly.

        Args:
            blocks: [num_rows, num_bytes] uint8.
            block_type: What a block is, by ggml's numbers.
            order: Which of the rows to take, in this order, int64; None: all.
        """


@runtime_checkable
class RoundingTarget(Protocol):
    """A place for weights that tells what it makes of them."""

    @property
    def shape(self) -> torch.Size:
        """Of the weights, [num_rows, num_inputs]."""

    def round_rows(self, first_row: int, source: torch.Tensor) -> torch.Tensor:
        """Quantize some rows; return them as they are held, [num_rows, num_inputs] float32."""


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows of a quantized tensor, still in their file; the arguments of `BlockTarget.copy_blocks`.

    `rounding` restores and rounds them, and measures what that changes, if no place holds them exactly; None: they are
    refused then. `is_held`: places may hold them exactly. `why_not`: the end of the refusal.
    """

    name: str  # of the tensor, and of its file
    blocks: torch.Tensor
    block_type: int
    order: torch.Tensor | None
    rounding: "RoundingErrors | None" = None
    is_held: bool = True
    why_not: str = "has a scale or a minimum that is no number, or beyond float16, which would hold it"

    def copy_to(self, destination: object) -> None:
        """Copy the codes. Raises: ModelLoadError: the place does not hold them exactly, and they are not rounded."""
        assert isinstance(destination, BlockTarget), "what is planned for a quantized tensor takes codes"
        if self.is_held and destination.copy_blocks(self.blocks, self.block_type, self.order):
            return
        if self.rounding is not None:
            assert isinstance(destination, RoundingTarget), "what takes codes quantizes too"
            self.rounding.round_rows(self.name, self.block_type, self.blocks, self.order, destination)
        else:
            raise ModelLoadError(f"{self.name} {self.why_not}")


class TensorSource(Protocol):
    """A tensor that may still be in a file: indexing reads that part of it. A `torch.Tensor` is one."""

    def __getitem__(self, index: slice | tuple[slice, ...], /) -> torch.Tensor | BlockRows:
        """Return a part; of a quantized tensor where it lies."""


# More ranges of rows are one read of all that is between them: a read takes as long as that of 100 KB.
_MANY_RANGES = 32


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor and its place."""

    rows: tuple[Range, ...]  # read one after the other
    columns: Range | None  # None: all, or the tensor is a vector
    destination: WeightTarget
    # Added to every value.
    offset: float = 0.0
    # Multiplies every value before.
    factor: float = 1.0

    def copy_from(self, source: TensorSource) -> None:
        """Read the part and put it to its place."""
        columns = () if self.columns is None else (slice(*self.columns),)
        if len(self.rows) > _MANY_RANGES:
            self._copy_rows_of(source[slice(self._first, max(end for _, end in self.rows)), *columns])
            return
        parts: list[torch.Tensor] = []
        codes: list[BlockRows] = []
        for rows in self.rows:
            part = source[slice(*rows), *columns]
            if isinstance(part, BlockRows):
                codes.append(part)
            else:
                parts.append(part)
        if codes:
            assert len(codes) == 1 or codes[0].order is None, "no family with an order takes rows from several ranges"
            joined = codes[0].blocks if len(codes) == 1 else torch.cat([each.blocks for each in codes])
            replace(codes[0], blocks=joined).copy_to(self.destination)
            return
        self._copy_values(parts[0] if len(parts) == 1 else torch.cat(parts))

    @property
    def _first(self) -> int:
        return min(begin for begin, _ in self.rows)

    def _copy_rows_of(self, part: torch.Tensor | BlockRows) -> None:
        """Put the rows of a part that begins with the first of them to their place, in their order."""
        rows = torch.cat([torch.arange(*each) for each in self.rows]) - self._first
        if isinstance(part, BlockRows):
            assert part.order is None, "no family with an order takes rows from several ranges"
            replace(part, blocks=part.blocks[rows]).copy_to(self.destination)
        else:
            self._copy_values(part[rows])

    def _copy_values(self, values: torch.Tensor) -> None:
        is_changed = self.offset or self.factor != 1
        self.destination.copy_(values.float() * self.factor + self.offset if is_changed else values)


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

    @property
    def num_bytes(self) -> int:
        """What the weights take."""
        return sum(piece.destination.nbytes for target in self.targets.values() for piece in target.pieces)

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        destination: WeightTarget,
        *,
        rows: Sequence[Range] | None = None,
        columns: Range | None = None,
        offset: float = 0.0,
        factor: float = 1.0,
    ) -> None:
        """Say where a part of a tensor goes.

        Args:
            name: Of the tensor.
            shape: Of all of it.
            destination: For the part.
            rows: The rows of the part, in this order; None: all.
            columns: Its columns; None: all.
            offset: Added to every value.
            factor: Multiplies every value before.
        """
        self.ignore(name, shape)
        rows = ((0, shape[0]),) if rows is None else tuple(rows)
        self.targets[name].pieces.append(Piece(rows, columns, destination, offset, factor))

    @property
    def memory(self) -> list[torch.UntypedStorage]:
        """The memory that holds the weights."""
        pieces = (piece for target in self.targets.values() for piece in target.pieces)
        storages = [tensor.untyped_storage() for piece in pieces for tensor in memory_of(piece.destination)]
        return list({storage.data_ptr(): storage for storage in storages}.values())

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
