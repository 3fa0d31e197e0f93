"""Groups that wait, for tests of the queue and its policies, and the one loop that takes them from it."""

from collections.abc import Mapping

import numpy as np

from octavo_shared.step_wire.step import SamplingRow
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting.tenant_shares import TenantShare, TenantShares
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.request.parameters import StopConditions


def shares_of(weights: Mapping[str, float] | None, max_num_seqs: int | None = None) -> TenantShares:
    """Return shares with weights by tenant, and the same number of sequences for each."""
    named = {tenant: TenantShare(weight, max_num_seqs) for tenant, weight in (weights or {}).items()}
    return TenantShares(named, TenantShare(max_num_seqs=max_num_seqs))


def waiting_group(
    arrival: int, tenant: str = "", *, num_prompt_tokens: int = 1, priority: int = 0, has_run: bool = False
) -> SequenceGroup:
    """Return a group that says nothing but who it is and how long its prompt is."""
    prompt = np.zeros(num_prompt_tokens, np.int32)
    group = SequenceGroup(
        f"{tenant}{arrival}", prompt, SamplingRow(), StopConditions(), arrival, priority=priority, tenant=tenant
    )
    group.has_run = has_run
    return group


def take(queue: WaitingQueue, num_tokens: int | None = None) -> SequenceGroup:
    """Admit the first group of the queue; charge its prompt, or so many tokens."""
    group = next(queue.in_order())
    queue.remove(group)
    queue.charge(group.tenant, group.num_prompt_tokens if num_tokens is None else num_tokens)
    return group
