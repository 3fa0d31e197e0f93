"""The choice of an attention backend: by name, or the best that can run the model.

`--attention-backend auto` takes, on a CUDA device, flash-attn 3 where it is installed, else our Triton kernels, else
plain torch. flash-attn 2 and xformers are used only by name: a prefix is shared in whole blocks, and their
blocks of 256 and 64 tokens cost hits. On a CPU there are the C library, which `cpu_kernels` decides on
(`executor_svc/models/kernels.py`), and plain torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

import torch

from executor_svc.attention.installed_libraries import InstalledLibraries, find_installed_libraries
from executor_svc.attention.interface import AttentionBackend
from executor_svc.attention.rules import (
    AttentionNeeds,
    BackendRules,
    FlashAttention2Rules,
    FlashAttention3Rules,
    InvariantRules,
    TorchRules,
    TritonRules,
    XformersRules,
    dtype_name,
)
from executor_svc.attention.torch_backend import TorchAttentionBackend
from octavo_shared.errors import ModelLoadError

BackendName = Literal["auto", "triton", "flash_attn", "xformers", "torch"]

# In the order in which they are proposed.
CUDA_BACKENDS: Sequence[BackendName] = ("triton", "flash_attn", "xformers", "torch")
# The first devices that compute with bfloat16.
BFLOAT16_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class ChosenBackend:
    """A backend that can run the model."""

    rules: BackendRules
    block_size: int  # tokens
    reason: str  # for the log

    def make(self) -> AttentionBackend:
        """Make the backend. Raises: ModelLoadError: its library cannot be imported."""
        try:
            return _make(self.rules)
        except ImportError as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ModelLoadError(
                f"attention_backend is {self.rules.name}, but its library cannot be imported ({reason})"
            ) from error


def choose_backend(
    name: BackendName,
    needs: AttentionNeeds,
    block_size: int | None = None,
    installed: InstalledLibraries | None = None,
    *,
    is_invariant: bool = False,
) -> ChosenBackend:
    """Return the backend to run a model with.

    Args:
        name: What was asked for.
        needs: What the model, its settings and its device ask for.
        block_size: Tokens in a block; None: what the backend prefers.
        installed: The libraries; None: look for them.
        is_invariant: Whether outputs must not depend on the batch. On a GPU one backend sees to that, in Triton.

    Raises: ModelLoadError: it cannot run the model; one sentence that names what would work.
    """
    situation = _Situation(needs, block_size, find_installed_libraries() if installed is None else installed)
    capability = needs.compute_capability
    if needs.dtype == torch.bfloat16 and capability is not None and capability < BFLOAT16_CAPABILITY:
        raise ModelLoadError(
            f"dtype is bfloat16, which this device (capability {capability[0]}.{capability[1]}) does not support; use "
            "--dtype float16"
        )
    if is_invariant and capability is not None:
        return _choose_invariant(name, situation)
    problems: dict[str, str] = {}
    for rules in situation.candidates(name):
        problem = situation.why_not(rules)
        if problem is None:
            reasons = [f"not {other}: {what}" for other, what in problems.items()] or [situation.why(name)]
            return ChosenBackend(rules, block_size or rules.preferred_block_size, "; ".join(reasons))
        problems.setdefault(rules.name, problem)
    raise ModelLoadError(
        f"attention_backend is {name}, but {problems[name]}; use {' or '.join(situation.what_works(name))}"
    )


def _choose_invariant(name: BackendName, situation: "_Situation") -> ChosenBackend:
    if name not in ("auto", "triton"):
        raise ModelLoadError(
            f"numerics is invariant, but attention_backend is {name}, whose summation order depends on the batch; "
            "remove --attention-backend"
        )
    rules = InvariantRules()
    problem = situation.why_not(rules)
    if problem is not None:
        raise ModelLoadError(
            f"numerics is invariant, which on a GPU requires Triton attention, but {problem}; remove --numerics"
        )
    return ChosenBackend(rules, situation.block_size or rules.preferred_block_size, "numerics is invariant")


@dataclass(frozen=True, slots=True)
class _Situation:
    """What a backend is chosen for."""

    needs: AttentionNeeds
    block_size: int | None
    installed: InstalledLibraries

    def candidates(self, name: BackendName) -> Sequence[BackendRules]:
        flash_attn_3 = FlashAttention3Rules(is_installed=self.installed.has_flash_attn_3)
        match name:
            case "auto":
                return [TorchRules()] if self._is_cpu else [flash_attn_3, TritonRules(), TorchRules()]
            case "flash_attn":
                flash_attn_2 = FlashAttention2Rules(self.installed.flash_attn)
                return [flash_attn_3, flash_attn_2] if self._has_flash_attn_3 else [flash_attn_2]
            case "triton":
                return [TritonRules()]
            case "xformers":
                return [XformersRules(self.installed.xformers, self.installed.triton)]
            case "torch":
                return [TorchRules()]

    def why_not(self, rules: BackendRules) -> str | None:
        """Return why a backend cannot run the model, as the end of a sentence; None: it can."""
        problem = rules.why_not(self.needs)
        if problem is None and self.block_size is not None:
            problem = rules.why_not_block_size(self.block_size)
        if problem is None and rules.module is not None:
            problem = self.installed.why_not_loaded(rules.module)
        return problem

    def why(self, name: BackendName) -> str:
        if name != "auto":
            return "asked for"
        return "cpu_kernels decides" if self._is_cpu else "the best"

    def what_works(self, name: BackendName) -> list[str]:
        """Return a setting that makes the backend work, if there is one, and another backend that works."""
        return [*_first(self._settings_for(name)), *_first(self._others(name))]

    @property
    def _is_cpu(self) -> bool:
        return self.needs.compute_capability is None

    @property
    def _has_flash_attn_3(self) -> bool:
        capability = self.needs.compute_capability
        return self.installed.has_flash_attn_3 and capability is not None and capability[0] == 9

    def _settings_for(self, name: BackendName) -> Iterator[str]:
        if replace(self, needs=replace(self.needs, cache_dtype=None))._can_run(name):
            yield "--kv-cache-dtype auto"
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            has_it = dtype != torch.bfloat16 or (self.needs.compute_capability or (0, 0)) >= BFLOAT16_CAPABILITY
            if has_it and replace(self, needs=replace(self.needs, dtype=dtype))._can_run(name):
                yield f"--dtype {dtype_name(dtype)}"
        any_block_size = replace(self, block_size=None)
        for rules in any_block_size.candidates(name):
            if any_block_size.why_not(rules) is None:
                yield f"--block-size-tokens {rules.preferred_block_size}"

    def _others(self, name: BackendName) -> Iterator[str]:
        if self._is_cpu:
            yield "--attention-backend auto"
        for other in CUDA_BACKENDS:
            if other != name and self._can_run(other):
                yield f"--attention-backend {other}"

    def _can_run(self, name: BackendName) -> bool:
        return any(self.why_not(rules) is None for rules in self.candidates(name))


def _first(settings: Iterator[str]) -> list[str]:
    return list(islice(settings, 1))


def _make(rules: BackendRules) -> AttentionBackend:
    """Make the backend of some rules. What is not used is not imported: Triton takes seconds, others may be missing."""
    if isinstance(rules, TorchRules):
        return TorchAttentionBackend()
    if isinstance(rules, InvariantRules):
        from executor_svc.attention.invariant_triton_backend import InvariantAttentionBackend

        return InvariantAttentionBackend()
    if isinstance(rules, TritonRules):
        from executor_svc.attention.triton_backend import TritonAttentionBackend

        return TritonAttentionBackend()
    from executor_svc.attention.flash_attn_backend import FlashAttention2Backend, FlashAttention3Backend
    from executor_svc.attention.xformers_backend import XformersBackend
    from executor_svc.triton_kernels.key_value_write import write_in_triton

    if isinstance(rules, XformersRules):
        return XformersBackend(write_in_triton)
    if isinstance(rules, FlashAttention2Rules):
        return FlashAttention2Backend(write_in_triton)
    assert isinstance(rules, FlashAttention3Rules), "these are all rules"
    return FlashAttention3Backend(write_in_triton)
