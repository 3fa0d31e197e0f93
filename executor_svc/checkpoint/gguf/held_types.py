"""The types of GGUF files that are held exactly, by the memory that each takes; others are refused, or rounded."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as FileType

# Bits of a weight, with its scales, in memory. `HOLDERS` of executor_svc/models/file_formats.py has the formats;
# tests/unit/executor_svc/models/test_memory_needs.py compares them with the formats that hold them.
HELD_BITS: Final[Mapping[FileType, float]] = MappingProxyType(
    {
        FileType.F32: 32,
        FileType.F16: 32,
        FileType.BF16: 16,
        FileType.Q8_0: 8.5,
        FileType.Q5_0: 8.5,
        FileType.IQ4_NL: 8.5,
        FileType.Q4_0: 5,
        FileType.Q4_1: 5,
        FileType.Q5_1: 9,
        FileType.MXFP4: 8.5,
        **{
            kind: 8 * GGML_QUANT_SIZES[kind][1] / GGML_QUANT_SIZES[kind][0]
            for kind in (FileType.Q2_K, FileType.Q3_K, FileType.Q4_K, FileType.Q5_K, FileType.Q6_K)
        },
    }
)
