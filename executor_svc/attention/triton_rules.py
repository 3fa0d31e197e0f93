"""What the Triton backend can do; imports nothing of Triton."""

from typing import Final

import torch

from executor_svc.attention.library_rules import dtype_name, why_not_device
from executor_svc.attention.needs import AttentionNeeds

# The first devices that copy to shared memory behind the back of the program's registers.
MIN_CAPABILITY: Final = (8, 0)
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_SIZES: Final = range(16, 257, 16)
HEAD_DIMS: Final = range(16, 257)


class TritonRules:
    """The rules of `TritonAttentionBackend`; see `BackendRules`."""

    name = "triton"
    preferred_block_size = 16

    def why_not_block_size(self, block_size: int) -> str | None:
        """Return that blocks are multiples of 16 tokens, if this one is not, or that it is too large."""
        if block_size in BLOCK_SIZES:
            return None
        return f"it takes block sizes that are multiples of 16 from 16 to 256, not {block_size}"

    def why_not(self, needs: AttentionNeeds) -> str | None:
        """Return what is wrong with the device, the number format or the heads."""
        if (problem := why_not_device(needs, MIN_CAPABILITY)) is not None:
            return problem
        if needs.dtype not in DTYPES:
            return f"it takes float32, bfloat16 and float16, not {dtype_name(needs.dtype)}"
        if needs.head_dim not in HEAD_DIMS:
            return f"it takes heads of 16 to 256 dimensions, not {needs.head_dim}"
        return None
