"""The slots that hold adapters beside a model: loads and drops of whole adapters, and the rows of each step."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from executor_svc.adapters.files import Adapter, read_adapter
from executor_svc.adapters.products import AdaptedPart, AdaptedProduct, LowRankWeights
from executor_svc.adapters.step_rows import CurrentRows, StepRows
from executor_svc.native.binding import WeightMemory


class AdapterSlots:
    """Slots of adapters, with the products that they change, which the model adds while it is made.

    A slot is written by one thread at a time, while no step uses it; steps go on with other slots meanwhile.

    Args:
        num_slots: How many adapters are held at a time.
        max_rank: The largest rank that is taken.
        device: Of the model.

    Attributes:
        of_sequences: The slot of the adapter of each sequence of the batch table, [max_num_seqs], or NO_ADAPTER; of
            the worker, which lays out steps by it.
    """

    def __init__(self, num_slots: int, max_rank: int, device: torch.device) -> None:
        self.of_sequences = np.empty(0, np.int32)
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.tokens, self.wanted = CurrentRows(device), CurrentRows(device)
        self._products: list[tuple[Sequence[AdaptedPart], AdaptedProduct]] = []

    @property
    def num_bytes(self) -> int:
        """Memory that all slots may take."""
        return self.num_slots * sum(product.num_bytes for _, product in self._products)

    def current(self, *, of_wanted: bool) -> CurrentRows:
        """Return the rows that a product works on: of all tokens of a step, or of the wanted ones."""
        return self.wanted if of_wanted else self.tokens

    def num_shrunk(self, parts: Sequence[AdaptedPart]) -> int:
        """Return the most numbers that an adapter shrinks a row to, of a product with these parts."""
        return self.max_rank * len({part.tensor for part in parts})

    def add(self, parts: Sequence[AdaptedPart], product: AdaptedProduct) -> None:
        """Add a product with all its parts, in the order of their outputs."""
        self._products.append((parts, product))

    @property
    def shapes(self) -> Mapping[str, tuple[int, int]]:
        """Outputs and inputs of the tensors that can have an adapter."""
        return {part.tensor: part.shape for parts, _ in self._products for part in parts}

    def read(self, directory: Path) -> Adapter:
        """Read an adapter for this model. Raises: ModelLoadError: see `read_adapter`."""
        return read_adapter(directory, self.shapes, self.max_rank)

    def load(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter into a slot that no step uses, on any thread."""
        memory = WeightMemory()
        for parts, product in self._products:
            product.put(slot, _weights_of(parts, adapter), memory)

    def drop(self, slot: int) -> None:
        """Empty a slot that no step uses."""
        for _, product in self._products:
            product.put(slot, None)


@contextmanager
def using(slots: AdapterSlots | None, rows: StepRows | None) -> Iterator[None]:
    """Let what runs inside have these rows: a step, but nothing that computes texts of its own."""
    if slots is None or rows is None:
        yield
        return
    slots.tokens.set(rows.tokens)
    slots.wanted.set(rows.wanted)
    try:
        yield
    finally:
        slots.tokens.set(None)
        slots.wanted.set(None)


def _weights_of(parts: Sequence[AdaptedPart], adapter: Adapter) -> LowRankWeights | None:
    """Return what an adapter has for a product on this rank; None: nothing."""
    begins: dict[str, int] = {}
    shrinks: list[torch.Tensor] = []
    num_shrunk = 0
    for part in parts:
        pair = adapter.pairs.get(part.tensor)
        if pair is not None and part.tensor not in begins:
            begins[part.tensor] = num_shrunk
            shrinks.append(pair.a if part.columns is None else pair.a[:, slice(*part.columns)])
            num_shrunk += len(pair.a)
    if not shrinks:
        return None
    expands, spans = [], []
    for part in parts:
        block = torch.zeros(part.num_outputs, num_shrunk)
        begin = end = 0
        if (pair := adapter.pairs.get(part.tensor)) is not None:
            begin = begins[part.tensor]
            end = begin + len(pair.a)
            block[:, begin:end] = torch.cat([pair.b[slice(*rows)] for rows in part.rows]).float() * pair.scale
        expands.append(block)
        spans.append((part.num_outputs, begin, end))
    return LowRankWeights(torch.cat(shrinks).float(), torch.cat(expands), spans)
