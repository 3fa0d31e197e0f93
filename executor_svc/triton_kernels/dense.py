"""The small operations between matrix products, each in one launch: add and norm, activation and product.

They are bound by memory: what is read once and written once is as fast as it can be. All compute in float32, whatever
the number format, and round once, when they write.

No row depends on the others: a program has one row, or a part of one, and the machine code follows from the length of a
row and from whether rows begin at multiples of 16 bytes. In a model they always do, or never.
"""

import torch
import triton
import triton.language as tl

# Elements that a program of an activation writes.
ACTIVATION_TILE = 1024

SQRT_HALF = tl.constexpr(0.7071067811865476)
# Hendrycks and Gimpel 2016, "Gaussian Error Linear Units": 2 sqrt(2 / pi), and the factor of the cube.
TANH_SCALE = tl.constexpr(1.5957691216057308)
TANH_CUBE = tl.constexpr(0.044715)
# Of the gated activation of gpt-oss. Source: https://github.com/openai/gpt-oss.
OAI_ALPHA = tl.constexpr(1.702)
OAI_LIMIT = tl.constexpr(7.0)


@triton.jit
def norm_kernel(
    residual,
    residual_stride,
    addend,
    addend_stride,
    weight,
    bias,
    normed,
    epsilon,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    IS_LAYER_NORM: tl.constexpr,
):
    """Add a row to a row of the residual stream, and norm the sum; a program a row.

    Args:
        residual: [num_rows, SIZE], rows `residual_stride` apart; updated if there is an addend.
        residual_stride: In elements.
        addend: [num_rows, SIZE], rows `addend_stride` apart, or None.
        addend_stride: In elements.
        weight: [SIZE].
        bias: [SIZE], or None.
        normed: [num_rows, SIZE], contiguous, written.
        epsilon: Added to the variance.
        SIZE: Of a row.
        SIZE_PADDED: The next power of two.
        IS_LAYER_NORM: Whether the mean is subtracted.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE_PADDED)
    is_inside = columns < SIZE
    residual += row * residual_stride + columns
    x = tl.load(residual, mask=is_inside, other=0.0)
    factor = tl.load(weight + columns, mask=is_inside, other=0.0).to(tl.float32)
    if addend is not None:
        added = tl.load(addend + row * addend_stride + columns, mask=is_inside, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(residual, x, mask=is_inside)
    x = x.to(tl.float32)
    if IS_LAYER_NORM:
        x = tl.where(is_inside, x - tl.sum(x, axis=0) / SIZE, 0.0)
    x *= tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + epsilon)
    x *= factor
    if bias is not None:
        x += tl.load(bias + columns, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(normed + row * SIZE + columns, x.to(normed.dtype.element_ty), mask=is_inside)


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)); exp never overflows."""
    decay = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, decay, 1.0) / (1.0 + decay)


@triton.jit
def activation_kernel(
    gate,
    gate_stride,
    up,
    up_stride,
    output,
    size,
    ACTIVATION: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write activation(gate) * up for a tile of a row; the grid is (rows, tiles of a row).

    "swiglu_oai" adds 1 to `up`, and bounds both.

    Args:
        gate: [num_rows, size], rows `gate_stride` apart.
        gate_stride: In elements.
        up: [num_rows, size], rows `up_stride` apart, or None: not multiplied.
        up_stride: In elements.
        output: [num_rows, size], contiguous, written.
        size: Of a row.
        ACTIVATION: Its name.
        TILE: Elements of a program, a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_inside = columns < size
    x = tl.load(gate + row * gate_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    if ACTIVATION == "swiglu_oai":
        x = tl.where(x > OAI_LIMIT, OAI_LIMIT, x)  # so a NaN stays
        x = x * sigmoid(x * OAI_ALPHA)
    elif ACTIVATION == "silu":
        x = x * sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        # 1 + tanh(y) is 2 sigmoid(2y).
        x = x * sigmoid((x + x * x * x * TANH_CUBE) * TANH_SCALE)
    else:
        tl.static_assert(ACTIVATION == "relu" or ACTIVATION == "relu2")
        x = tl.where(x < 0.0, 0.0, x)
        if ACTIVATION == "relu2":
            x = x * x
    if up is not None:
        factor = tl.load(up + row * up_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
        if ACTIVATION == "swiglu_oai":
            factor = tl.where(factor > OAI_LIMIT, OAI_LIMIT, factor)
            factor = tl.where(factor < -OAI_LIMIT, -OAI_LIMIT, factor) + 1.0
        x *= factor
    tl.store(output + row * size + columns, x.to(output.dtype.element_ty), mask=is_inside)


def add_rms_norm(
    residual: torch.Tensor, addend: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Add in place, and return the RMSNorm of the sum, [num_rows, size], contiguous, in the format of `residual`.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".

    Args:
        residual: [num_rows, size], updated.
        addend: The same shape; None: nothing is added.
        weight: [size], maybe of another number format.
        epsilon: Added to the mean square.
    """
    return _add_norm(residual, addend, weight, None, epsilon, is_layer_norm=False)


def add_layer_norm(
    residual: torch.Tensor,
    addend: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
) -> torch.Tensor:
    """Add in place, and return the LayerNorm of the sum, as `add_rms_norm` does.

    Source: Ba, Kiros and Hinton 2016, "Layer Normalization".

    Args:
        residual: [num_rows, size], updated.
        addend: The same shape; None: nothing is added.
        weight: [size], maybe of another number format.
        bias: [size], of the format of the weight; None: nothing is added behind.
        epsilon: Added to the variance.
    """
    return _add_norm(residual, addend, weight, bias, epsilon, is_layer_norm=True)


def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) * up, [num_rows, size], contiguous.

    Args:
        gate: [num_rows, size]; rows may be any distance apart, as in a part of wider rows.
        up: The same shape and number format; the same holds.
        activation: Its name, as in `MlpConfig`.
    """
    return _activate(gate, up, activation)


def plain_activation(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(x), [num_rows, size], contiguous; rows of `x` may be any distance apart."""
    return _activate(x, None, activation)


def _add_norm(
    residual: torch.Tensor,
    addend: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
    *,
    is_layer_norm: bool,
) -> torch.Tensor:
    assert residual.stride(1) == 1, "it is updated in place"
    num_rows, size = residual.shape
    addend = None if addend is None else _with_dense_rows(addend)
    normed = torch.empty((num_rows, size), dtype=residual.dtype, device=residual.device)
    size_padded = triton.next_power_of_2(size)
    norm_kernel[(num_rows,)](
        residual,
        residual.stride(0),
        addend,
        0 if addend is None else addend.stride(0),
        weight,
        bias,
        normed,
        epsilon,
        SIZE=size,
        SIZE_PADDED=size_padded,
        IS_LAYER_NORM=is_layer_norm,
        num_warps=num_warps_of_norm(size_padded),
    )
    return normed


def num_warps_of_norm(size_padded: int) -> int:
    """Return how many warps a program of `norm_kernel` has: 8 elements a thread, or more where 16 warps are too few."""
    return min(max(size_padded // 256, 1), 16)


def _activate(gate: torch.Tensor, up: torch.Tensor | None, activation: str) -> torch.Tensor:
    gate = _with_dense_rows(gate)
    up = None if up is None else _with_dense_rows(up)
    num_rows, size = gate.shape
    output = torch.empty((num_rows, size), dtype=gate.dtype, device=gate.device)
    activation_kernel[(num_rows, triton.cdiv(size, ACTIVATION_TILE))](
        gate,
        gate.stride(0),
        up,
        0 if up is None else up.stride(0),
        output,
        size,
        ACTIVATION=activation,
        TILE=ACTIVATION_TILE,
        num_warps=4,
    )
    return output


def _with_dense_rows(x: torch.Tensor) -> torch.Tensor:
    """Return a matrix with contiguous rows; products have them, on a GPU."""
    return x if x.stride(1) == 1 else x.contiguous()
