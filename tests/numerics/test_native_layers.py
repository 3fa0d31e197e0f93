"""The loop over the layers in C gives bit for bit what segments and attentions give when they are called in turn."""

from collections.abc import Sequence

import pytest
import torch

from executor_svc.attention.interface import AttentionLayer, LayerCache, Rotation
from executor_svc.attention.native_backend import NativeAttentionBackend
from executor_svc.models.dense import HeadNorms, LayerEnd, Mlp, Norm, Segment
from executor_svc.models.families.common import alibi_slopes
from executor_svc.models.layer_loop import LayerByLayer, LayerLoop
from executor_svc.models.native_dense import NativeDense
from executor_svc.models.native_layers import NativeLayers
from executor_svc.native.library import NativeLibrary
from executor_svc.native.matrix import PackedMatrix
from executor_svc.native.structs import NumberFormat
from tests.numerics.attention import CHUNKS, DECODES, Rows, Step
from tests.numerics.native import FORMATS, LANES, native_library

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 16
HIDDEN_SIZE, INTERMEDIATE_SIZE = 72, 100
SCALE = HEAD_DIM**-0.5
LAYERS = [
    AttentionLayer(SCALE),
    AttentionLayer(SCALE, window_tokens=40),
    AttentionLayer(SCALE),
    AttentionLayer(SCALE, None, 1.5, alibi_slopes(NUM_HEADS)),
]
IS_ROTATED = [True, True, False, False]  # layers that attend alike may differ in this


def make_segments(library: NativeLibrary, *, number_format: NumberFormat) -> list[Segment]:
    """Return the segments of a model of as many layers as LAYERS."""
    generator = torch.Generator().manual_seed(3)
    kernels = NativeDense(library, number_format=number_format)

    def matrix(num_inputs: int, num_outputs: int) -> PackedMatrix:
        made = kernels.matrix(num_inputs, [num_outputs], has_bias=True)
        made.weights[0].copy_(torch.randn(num_outputs, num_inputs, generator=generator) / num_inputs**0.5)
        made.biases[0].copy_(torch.randn(num_outputs, generator=generator))
        return made

    def norm(size: int = HIDDEN_SIZE) -> Norm:
        return Norm(torch.rand(size, generator=generator) + 0.5, None, 1e-5)

    segments = []
    layer_end: LayerEnd[PackedMatrix] | None = None
    for index in range(len(LAYERS)):
        head_norms = HeadNorms(norm(HEAD_DIM), norm(HEAD_DIM), NUM_HEADS, NUM_KV_HEADS) if index % 2 else None
        projection = matrix(HIDDEN_SIZE, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
        segments.append(kernels.segment(layer_end, norm(), projection, head_norms))
        gate, up = matrix(HIDDEN_SIZE, INTERMEDIATE_SIZE), matrix(HIDDEN_SIZE, INTERMEDIATE_SIZE)
        mlp = Mlp(gate, up, matrix(INTERMEDIATE_SIZE, HIDDEN_SIZE), "silu")
        layer_end = LayerEnd(matrix(NUM_HEADS * HEAD_DIM, HIDDEN_SIZE), None, norm(), mlp, None)
    return segments


def run(loop: LayerLoop, library: NativeLibrary, step: Step, times: int = 1) -> Sequence[torch.Tensor]:
    """Return what the last layer attended, the residual stream and all caches after running a step."""
    generator = torch.Generator().manual_seed(5)
    shape = (step.num_blocks, step.block_size, NUM_KV_HEADS, HEAD_DIM)
    caches = [LayerCache(*torch.randn(2, *shape, generator=generator)) for _ in LAYERS]
    num_tokens = len(step.metadata.slot_mapping)
    residual = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator)
    angles = 6 * torch.rand(num_tokens, HEAD_DIM // 2, generator=generator)
    rotation = Rotation(torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1))
    rotations = [rotation if is_rotated else None for is_rotated in IS_ROTATED]
    for _ in range(times):
        plan = NativeAttentionBackend(library).plan(step.metadata, caches[0])
        attended = loop(residual, rotations, caches, plan)
    return [attended, residual, *(pool for cache in caches for pool in (cache.keys, cache.values))]


@pytest.mark.parametrize("number_format", FORMATS, ids=lambda one: one.name)
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(
    "rows",
    [[(0, 1)], [(150, 1)], [(900, 1)], DECODES, CHUNKS, [*DECODES, *CHUNKS], [(700, 140)]],
    ids=["first", "one", "split", "decodes", "chunks", "mixed", "long"],
)
def test_the_loop_in_c_equals_the_layers_one_by_one(rows: Rows, lanes: str, number_format: NumberFormat) -> None:
    library = native_library(lanes)
    segments, step = make_segments(library, number_format=number_format), Step(rows, block_size=16)

    ours = run(NativeLayers(library, segments, LAYERS), library, step)

    theirs = run(LayerByLayer(segments, LAYERS), library, step)
    for our, their in zip(ours, theirs, strict=True):
        assert torch.equal(our, their)
    assert bool(torch.isfinite(ours[0]).all())
    assert not torch.equal(ours[2], run(lambda residual, *_: residual, library, step)[2])  # the caches were written


@pytest.mark.parametrize("lanes", LANES)
def test_steps_that_follow_each_other_leave_nothing_behind(lanes: str) -> None:
    library = native_library(lanes)
    segments = make_segments(library, number_format=NumberFormat.FLOAT32)
    loop, step = NativeLayers(library, segments, LAYERS), Step(CHUNKS, block_size=16)

    first = run(loop, library, step, times=3)
    run(loop, library, Step([(0, 1)], block_size=16))

    for before, after in zip(first, run(loop, library, step, times=3), strict=True):
        assert torch.equal(before, after)
