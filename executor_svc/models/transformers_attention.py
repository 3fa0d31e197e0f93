"""Our attention behind transformers' attention interface.

transformers looks an attention function up by name for every call, in a table of the process. The function that
is entered there holds no state: it goes to the hook that `attach_hook` has left on the module that calls, so
models do not know of each other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from executor_svc.attention.interface import AttentionLayer, AttentionPlan, LayerCache

# Without an entry in the table of masks under this name, transformers makes no mask.
PAGED_ATTENTION = "octavo_paged"
# As above, but masks are made: as values that say what may be seen (`MaskDescription`).
PROBED_ATTENTION = "octavo_probed"

_HOOK_NAME = "octavo_attention_hook"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What an attention layer calls with."""

    module: nn.Module  # the layer
    query: torch.Tensor  # [1, num_heads, num_tokens, head_dim], rotated
    key: torch.Tensor  # [1, num_kv_heads, num_tokens, head_dim], rotated
    value: torch.Tensor  # [1, num_kv_heads, num_tokens, head_dim]
    mask: object  # what the mask function made; None for paged attention
    options: Mapping[str, Any]  # every other argument


# Answers the calls of one forward pass with [1, num_tokens, num_heads, head_dim].
AttentionHandler = Callable[[AttentionCall], torch.Tensor]


class AttentionHook:
    """Where the attention layers of one model go. Owned by that model; answers inside `handled_by` only."""

    def __init__(self) -> None:
        self._handler: AttentionHandler | None = None

    @contextmanager
    def handled_by(self, handler: AttentionHandler) -> Iterator[None]:
        """Give the calls of the forward passes inside to `handler`."""
        self._handler = handler
        try:
            yield
        finally:
            self._handler = None

    @property
    def handler(self) -> AttentionHandler:
        """What answers at this moment."""
        assert self._handler is not None, "the attention of a model is called inside its own forward pass only"
        return self._handler


@dataclass(frozen=True, slots=True)
class PagedStep:
    """The attention of one step, on the paged cache."""

    plan: AttentionPlan
    caches: Sequence[LayerCache]  # one a layer
    layers: Sequence[AttentionLayer]  # one a layer

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        """Write keys and values into the cache of the layer, then attend."""
        layer_idx = call.module.layer_idx
        assert isinstance(layer_idx, int), "the probe has seen the index of every layer"
        qkv = torch.cat([heads[0].transpose(0, 1) for heads in (call.query, call.key, call.value)], dim=1)
        attended = self.plan.attend(qkv, None, self.caches[layer_idx], self.layers[layer_idx])
        _, num_heads, num_tokens, head_dim = call.query.shape
        return attended.view(1, num_tokens, num_heads, head_dim)


@dataclass(frozen=True, slots=True)
class MaskDescription:
    """A mask as transformers describes it: a function of batch, head, query position and key position."""

    function: Any
    local_size: int | None  # of a sliding window or a chunk

    def visible(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        """Return which keys the queries see, bool [num_queries, num_keys], for two lists of positions."""
        zero = torch.zeros((), dtype=torch.int64)
        visible = self.function(zero, zero, query_positions[:, None], key_positions[None, :])
        return torch.as_tensor(visible).expand(len(query_positions), len(key_positions))


def attach_hook(model: nn.Module) -> AttentionHook:
    """Make a hook and leave it on every module of `model`; enter our functions into transformers' tables."""
    AttentionInterface.register(PAGED_ATTENTION, _call_hook)
    AttentionInterface.register(PROBED_ATTENTION, _call_hook)
    AttentionMaskInterface.register(PROBED_ATTENTION, _describe_mask)
    hook = AttentionHook()
    for module in model.modules():
        setattr(module, _HOOK_NAME, hook)
    return hook


def _call_hook(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **options: object,
) -> tuple[torch.Tensor, None]:
    hook: AttentionHook = getattr(module, _HOOK_NAME)
    return hook.handler(AttentionCall(module, query, key, value, attention_mask, options)), None


# Any: transformers calls it with arguments of many types.
def _describe_mask(*, mask_function: Any, local_size: int | None = None, **_: Any) -> MaskDescription:
    return MaskDescription(mask_function, local_size)
