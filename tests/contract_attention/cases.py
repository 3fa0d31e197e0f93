"""The kinds of steps that every library is called with."""

from dataclasses import dataclass

import torch

from executor_svc.attention.interface import AttentionLayer, DecodeBatch
from executor_svc.models.families.common import alibi_slopes
from tests.numerics.attention import LayerInput, Rows, Step

HEADS = (6, 2)
HEAD_DIM = 16
# Around the ends of blocks of 16, 64 and 256 tokens, and some blocks of 256.
DECODES: Rows = [(0, 1), (7, 1), (63, 1), (64, 1), (255, 1), (256, 1), (257, 1), (600, 1)]
CHUNKS: Rows = [(0, 2), (0, 33), (90, 40), (250, 20), (500, 7)]
MIXED: Rows = [CHUNKS[3], *DECODES[4:], CHUNKS[0], CHUNKS[4], *DECODES[:2]]
WINDOW = 70
TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class Case:
    """A step, and how its layer attends."""

    rows: Rows
    layer: AttentionLayer = AttentionLayer(0.25)  # noqa: RUF009 -- it is immutable

    def inputs(self, block_size: int, dtype: torch.dtype) -> LayerInput:
        """Return what the layer gets; blocks that its window has left behind are missing."""
        step = Step(self.rows, block_size, self.layer.window_tokens)
        return LayerInput(step, HEADS, HEAD_DIM, is_rotated=False, dtype=dtype)


CASES = {
    "decodes": Case(DECODES),
    "chunks": Case(CHUNKS),
    "decodes and chunks": Case(MIXED),
    "soft cap, decodes": Case(DECODES, AttentionLayer(0.25, soft_cap=1.5)),
    "soft cap, decodes and chunks": Case(MIXED, AttentionLayer(0.25, soft_cap=1.5)),
    "window, decodes": Case(DECODES, AttentionLayer(0.25, WINDOW)),
    "window, chunks": Case(CHUNKS, AttentionLayer(0.25, WINDOW)),
    "window of one token, decodes and chunks": Case(MIXED, AttentionLayer(0.25, 1)),
    "window and soft cap, decodes and chunks": Case(MIXED, AttentionLayer(0.25, WINDOW, 1.5)),
    "ALiBi, decodes": Case(DECODES, AttentionLayer(0.25, alibi_slopes=alibi_slopes(HEADS[0]))),
    "ALiBi, window, decodes and chunks": Case(MIXED, AttentionLayer(0.25, WINDOW, alibi_slopes=alibi_slopes(HEADS[0]))),
}


def decode_batch(step: Step) -> DecodeBatch:
    """Return a step of decodes as it is described on the device."""
    metadata = step.metadata
    return DecodeBatch(
        torch.from_numpy(metadata.starts + 1), torch.from_numpy(metadata.block_tables), metadata.slot_mapping
    )
