"""Groups that wait, for tests of the queue and its policies, and the one loop that takes them from it."""

import numpy as np

from octavo_shared.step_wire.step import SamplingRow
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.request.parameters import StopConditions


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
