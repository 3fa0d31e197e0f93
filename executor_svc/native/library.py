"""ctypes bindings of the compiled library: tensors in, pointers out.

The library is loaded without linking to torch. It needs OpenMP's runtime, libgomp; torch has loaded its own by
then under the same name, and the loader takes that one, so that there is one pool of threads.
"""

import ctypes
from collections.abc import Sequence
from ctypes import byref
from pathlib import Path

import torch

from executor_svc.native.errors import NativeUnavailableError

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_ALIGNMENT = 64  # bytes; what scratch memory must begin at


class MatrixStruct(ctypes.Structure):
    """`Matrix` of dense.h."""

    _fields_ = (
        ("num_outputs", _LONG),
        ("num_inputs", _LONG),
        ("panels", _POINTER),
        ("scales", _POINTER),
        ("bias", _POINTER),
    )


class SegmentStruct(ctypes.Structure):
    """`Segment` of layers.h."""

    _fields_ = (
        ("attention_output", MatrixStruct),
        ("gate", MatrixStruct),
        ("up", MatrixStruct),
        ("down", MatrixStruct),
        ("post_attention_norm", _POINTER),
        ("projection", MatrixStruct),
        ("norm", _POINTER),
        ("hidden_size", _LONG),
        ("intermediate_size", _LONG),
        ("has_layer_end", _LONG),
        ("norm_epsilon", _FLOAT),
    )


class StepStruct(ctypes.Structure):
    """`Step` of step.h."""

    _fields_ = (
        ("num_heads", _LONG),
        ("num_kv_heads", _LONG),
        ("head_dim", _LONG),
        ("block_size", _LONG),
        ("num_tokens", _LONG),
        ("table_width", _LONG),
        ("window", _LONG),
        ("scale", _FLOAT),
        ("soft_cap", _FLOAT),
        ("slopes", _POINTER),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("slot_mapping", _POINTER),
        ("block_tables", _POINTER),
        ("tiles", _POINTER),
        ("num_tiles", _LONG),
        ("most_tokens", _LONG),
        ("tasks", _POINTER),
        ("num_tasks", _LONG),
        ("num_partials", _LONG),
    )


class LayerStruct(ctypes.Structure):
    """`Layer` of layers.c."""

    _fields_ = (
        ("segment", _POINTER),
        ("step", _POINTER),
        ("keys", _POINTER),
        ("values", _POINTER),
    )


_FUNCTIONS: tuple[tuple[str, type | None, Sequence[type]], ...] = (
    ("octavo_panel_columns", _LONG, ()),
    ("octavo_lanes", _LONG, ()),
    ("octavo_pack_float", None, (_POINTER, _LONG, _LONG, _POINTER, _INT)),
    ("octavo_pack_int8", None, (_POINTER, _LONG, _LONG, _POINTER, _INT)),
    ("octavo_read_rows_float", None, (_POINTER, _LONG, _POINTER, _POINTER, _INT)),
    ("octavo_read_rows_int8", None, (_POINTER, _LONG, _POINTER, _POINTER, _INT)),
    ("octavo_segment_scratch_bytes", _LONG, (_POINTER, _LONG)),
    ("octavo_segment", None, (_POINTER, _LONG, _POINTER, _POINTER, _POINTER, _POINTER, _INT)),
    ("octavo_attention_scratch_bytes", _LONG, (_POINTER, _INT)),
    ("octavo_attention", None, (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _INT)),
    ("octavo_layers_scratch_bytes", _LONG, (_POINTER, _LONG, _LONG, _INT)),
    ("octavo_layers", None, (_POINTER, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _POINTER, _INT)),
)


class NativeLibrary:
    """The functions of the library, and the scratch memory that they share: one call at a time.

    Tensors are float32, contiguous and on the CPU, token ids int64; shapes are the caller's to get right.

    Args:
        path: The compiled library.
        num_threads: Threads of every parallel region.

    Raises: NativeUnavailableError: the file cannot be loaded.
    """

    def __init__(self, path: Path, num_threads: int) -> None:
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeUnavailableError(f"{path} cannot be loaded: {error}") from error
        for name, result, arguments in _FUNCTIONS:
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self._library = library
        self._scratch: dict[str, torch.Tensor] = {}
        self.num_threads = num_threads
        self.panel_columns: int = library.octavo_panel_columns()
        self.num_lanes: int = library.octavo_lanes()

    def pack(self, matrix: MatrixStruct, first_row: int, weight: torch.Tensor) -> None:
        """Write `weight`, [num_rows, num_inputs], into a matrix from `first_row`; quantize it for an int8 one."""
        pack = self._library.octavo_pack_int8 if matrix.scales else self._library.octavo_pack_float
        pack(byref(matrix), first_row, len(weight), weight.data_ptr(), self.num_threads)

    def read_rows(self, matrix: MatrixStruct, row_ids: torch.Tensor, out: torch.Tensor) -> None:
        """Copy rows of a matrix to `out`, [num_ids, num_inputs]."""
        read = self._library.octavo_read_rows_int8 if matrix.scales else self._library.octavo_read_rows_float
        read(byref(matrix), len(row_ids), row_ids.data_ptr(), out.data_ptr(), self.num_threads)

    def segment(
        self, segment: SegmentStruct, attended: torch.Tensor | None, residual: torch.Tensor, out: torch.Tensor | None
    ) -> None:
        """Run a segment; see octavo_segment in segment.c. `out` is None if it has no projection."""
        assert residual.is_contiguous(), "rows lie one after the other"
        assert attended is None or attended.is_contiguous(), "rows lie one after the other"
        num_rows = residual.shape[0]  # len() of a tensor costs several times as much
        num_bytes = self._library.octavo_segment_scratch_bytes(byref(segment), num_rows)
        self._library.octavo_segment(
            byref(segment),
            num_rows,
            None if attended is None else attended.data_ptr(),
            residual.data_ptr(),
            None if out is None else out.data_ptr(),
            self._scratch_memory("segment", num_bytes),
            self.num_threads,
        )

    def attention(
        self, step: StepStruct, qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Run the attention of a layer; see octavo_attention in attention.c."""
        num_bytes = self._library.octavo_attention_scratch_bytes(byref(step), self.num_threads)
        self._library.octavo_attention(
            byref(step),
            qkv.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            self._scratch_memory("attention", num_bytes),
            self.num_threads,
        )

    def layers(
        self,
        layers: ctypes.Array[LayerStruct],
        residual: torch.Tensor,
        qkv: torch.Tensor,
        attended: torch.Tensor,
    ) -> None:
        """Run segments and attentions in turn; see octavo_layers. `qkv` is scratch, `attended` the result."""
        assert residual.is_contiguous(), "rows lie one after the other"
        num_rows = residual.shape[0]
        num_bytes = self._library.octavo_layers_scratch_bytes(layers, len(layers), num_rows, self.num_threads)
        self._library.octavo_layers(
            layers,
            len(layers),
            num_rows,
            residual.data_ptr(),
            qkv.data_ptr(),
            attended.data_ptr(),
            self._scratch_memory("layers", num_bytes),
            self.num_threads,
        )

    def _scratch_memory(self, name: str, num_bytes: int) -> int:
        """Return the address of at least `num_bytes`, aligned; kept, so that no call pays for page faults again."""
        memory = self._scratch.get(name)
        if memory is None or memory.nbytes < num_bytes + _ALIGNMENT:
            memory = torch.empty(num_bytes + num_bytes // 4 + _ALIGNMENT, dtype=torch.uint8)
            self._scratch[name] = memory
        return -(-memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT
