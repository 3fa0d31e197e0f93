"""Octavo: LLM inference in two tiers, a CPU-only scheduler and executors that hold the KV cache.

Public names load lazily, since both services import the gRPC stubs below this package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.client import Client
    from octavo.local.llm import LLM
    from octavo.values.sampling_params import SamplingParams

__version__ = "0.3.0.dev0"

_HOMES = {"Client": "octavo.client", "LLM": "octavo.local.llm", "SamplingParams": "octavo.values.sampling_params"}

__all__ = ["LLM", "Client", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
