"""What flash-attn can do, version 2 and version 3; both are `--attention-backend flash_attn`.

Version 2 is the package flash-attn. Version 3 is for Hopper devices alone, is built from source and comes as the module
`flash_attn_interface`.
"""

from executor_svc.attention.library_rules import why_not_device, why_not_dtype, why_not_version
from executor_svc.attention.needs import AttentionNeeds

MAX_HEAD_DIM = 256
# Other sizes would be padded: a copy of the whole cache at each call.
HEAD_DIM_MULTIPLE = 8


class FlashAttention2Rules:
    """The rules of `FlashAttention2Backend`; see `BackendRules`.

    Args:
        installed: Version of the package flash-attn; None: it is not installed.
    """

    name = "flash_attn"
    # The least that the library takes. A block is shared by equal prefixes only as a whole, so large ones cost hits.
    preferred_block_size = 256

    def __init__(self, installed: str | None) -> None:
        self._installed = installed

    def why_not_block_size(self, block_size: int) -> str | None:
        """Return that the library insists on multiples of 256."""
        return (
            None if block_size % 256 == 0 else f"version 2 takes blocks of a multiple of 256 tokens, not {block_size}"
        )

    def why_not(self, needs: AttentionNeeds) -> str | None:
        """Return what it lacks, the installation last."""
        return (
            why_not_device(needs, lowest=(8, 0))
            or why_not_dtype(needs)
            or _why_not_head_dim(needs)
            or why_not_version("flash-attn", "flash-attn", self._installed, needed=(2, 8))
        )


class FlashAttention3Rules:
    """The rules of `FlashAttention3Backend`; see `BackendRules`.

    Args:
        is_installed: Whether the module `flash_attn_interface` is there.
    """

    name = "flash_attn"
    # Small blocks waste little and give prefixes more hits. Where there are many queries, multiples of the kernel's
    # tile would let it load keys by TMA instead of asynchronous copies.
    preferred_block_size = 16

    def __init__(self, *, is_installed: bool) -> None:
        self._is_installed = is_installed

    def why_not_block_size(self, block_size: int) -> str | None:
        """Return None: it takes all."""
        del block_size
        return None

    def why_not(self, needs: AttentionNeeds) -> str | None:
        """Return what it lacks, the installation last."""
        return (
            why_not_device(needs, lowest=(9, 0), highest_major=9)
            or why_not_dtype(needs)
            or _why_not_head_dim(needs)
            or ("version 3 has no ALiBi, which this model needs" if needs.has_alibi else None)
            or (None if self._is_installed else "flash-attn 3 (the module flash_attn_interface) is not installed")
        )


def _why_not_head_dim(needs: AttentionNeeds) -> str | None:
    if needs.head_dim <= MAX_HEAD_DIM and needs.head_dim % HEAD_DIM_MULTIPLE == 0:
        return None
    return f"it takes a head_dim of up to {MAX_HEAD_DIM}, in steps of {HEAD_DIM_MULTIPLE}, not {needs.head_dim}"
