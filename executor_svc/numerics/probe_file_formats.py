"""The probe of Q5_1 and the K formats: weights have them from files alone, and `probe.py` makes its own."""

import hashlib

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from executor_svc.native.library import NativeLibrary
from executor_svc.native.matrix import PackedMatrix
from executor_svc.native.structs import NumberFormat
from executor_svc.native.weight_memory import WeightMemory
from executor_svc.numerics.probe_models import counted_values

_NUM_OUTPUTS, _NUM_BLOCKS = 100, 3
_NUM_ROWS = (1, 6, 70)  # from a token alone to so many that codes are unpacked for them


def probe_file_format(library: NativeLibrary, number_format: NumberFormat) -> str:
    """Return the SHA-256 of counted rows and products of a format, 64 hexadecimal digits."""
    block_type = GGMLQuantizationType[number_format.name]
    block_inputs, block_bytes = GGML_QUANT_SIZES[block_type]
    counted = counted_values("blocks", (_NUM_OUTPUTS, _NUM_BLOCKS * block_bytes))
    # Without the second highest bit no float16 among the bytes is beyond 2: they are everywhere in a block.
    blocks = torch.from_numpy((counted * 2**20).astype("int64") & 0xBF).to(torch.uint8)
    num_inputs = _NUM_BLOCKS * block_inputs
    matrix = PackedMatrix(library, num_inputs, [(number_format, [_NUM_OUTPUTS])], has_bias=False, memory=WeightMemory())
    is_exact = matrix.weights[0].copy_blocks(blocks, int(block_type), None)
    assert is_exact, "all float16 of the blocks are numbers"
    hasher = hashlib.sha256(matrix.rows(torch.arange(_NUM_OUTPUTS)).numpy().tobytes())
    for num_rows in _NUM_ROWS:
        x = torch.from_numpy(counted_values(f"{num_rows} inputs", (num_rows, num_inputs)))
        hasher.update(matrix(x).numpy().tobytes())
    return hasher.hexdigest()
