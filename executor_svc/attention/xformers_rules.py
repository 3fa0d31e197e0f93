"""What xformers can do on a paged cache."""

from executor_svc.attention.library_rules import version_numbers, why_not_device, why_not_dtype, why_not_version
from executor_svc.attention.needs import AttentionNeeds

# What its split-K kernel is written for, as far as flash-attn goes.
HEAD_DIMS = (16, 32, 64, 128, 256)
# The first Triton without block pointers, which the kernel of xformers 0.0.35 is written with.
TRITON_WITHOUT_BLOCK_POINTERS = (3, 8)


class XformersRules:
    """The rules of `XformersBackend`; see `BackendRules`.

    Args:
        installed: Version of the package xformers; None: it is not installed.
        triton: Version of the package triton; None: nobody knows.
    """

    name = "xformers"
    # The keys that the kernel reads at once, from within one block. Large blocks cost prefix hits.
    preferred_block_size = 64

    def __init__(self, installed: str | None, triton: str | None) -> None:
        self._installed = installed
        self._triton = triton

    def why_not_block_size(self, block_size: int) -> str | None:
        """Return that the kernel needs multiples of 64."""
        return None if block_size % 64 == 0 else f"it takes blocks of a multiple of 64 tokens, not {block_size}"

    def why_not(self, needs: AttentionNeeds) -> str | None:
        """Return what it lacks, the installation last."""
        problem = why_not_device(needs, lowest=(8, 0)) or why_not_dtype(needs)
        wanted = {"sliding window": needs.has_window, "soft cap": needs.has_soft_cap, "ALiBi": needs.has_alibi}
        for feature, is_wanted in wanted.items():
            if problem is None and is_wanted:
                problem = f"it has no {feature} on a paged cache, which this model needs"
        if problem is None and needs.head_dim not in HEAD_DIMS:
            problem = f"it takes a head_dim of {', '.join(map(str, HEAD_DIMS))}, not {needs.head_dim}"
        problem = problem or why_not_version("xformers", "xformers", self._installed, needed=(0, 0, 35))
        if problem is None and self._triton and version_numbers(self._triton) >= TRITON_WITHOUT_BLOCK_POINTERS:
            problem = f"its kernel needs a Triton before 3.8, not {self._triton}"
        return problem
