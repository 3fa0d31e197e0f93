"""The probe: a request of the scheduler's own that says whether an executor works.

It computes a prompt of one token and decodes one more, in an attachment of its own, with a planner of its own. So
neither the fleet, nor the queue, nor any metric has it.
"""

import asyncio

import numpy as np

from octavo_shared.process.clock import monotonic_s
from octavo_shared.step_wire.executor_info import ExecutorInfo
from octavo_shared.step_wire.step import SamplingRow
from scheduler_svc.core.limits import CoreLimits, PoolLimits
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.waiting.policy import FcfsPolicy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.executors.session import ExecutorLostError, ExecutorSession
from scheduler_svc.request.parameters import StopConditions

# Two steps of one token. A process that has just started may compile before the first one.
PROBE_TIMEOUT_S = 60.0

_NUM_TOKENS = 3


async def probe(session: ExecutorSession, timeout_s: float = PROBE_TIMEOUT_S) -> None:
    """Run the probe on an executor that was just attached.

    Raises: ExecutorLostError, ExecutorFaultError: it does not work.
    """
    queue = WaitingQueue(FcfsPolicy())
    planner = ExecutorPlanner(_limits(session.info), queue, epoch=session.epoch)
    conditions = StopConditions(_NUM_TOKENS - 1, ignore_eos=True)
    token = np.zeros(1, np.int32)
    encoder_token_ids = token if session.info.max_encoder_tokens else None
    sampling = SamplingRow()
    group = SequenceGroup("probe", token, sampling, conditions, arrival=0, encoder_token_ids=encoder_token_ids)
    queue.add(group)
    try:
        async with asyncio.timeout(timeout_s):
            while group.live_sequences and (step := planner.schedule(monotonic_s()).step) is not None:
                await session.send(step)
                planner.process(await session.receive())
    except TimeoutError as error:
        raise ExecutorLostError(f"the probe returned no result within {timeout_s:g} s") from error


def _limits(info: ExecutorInfo) -> CoreLimits:
    """Return limits of a planner for the probe alone, which needs next to no memory."""
    first, *others = info.groups(agreed=True)
    return CoreLimits(
        max_num_seqs=1,
        max_num_batched_tokens=1,
        max_model_len=min(_NUM_TOKENS, info.max_model_len, info.max_cached_tokens),
        vocab_size=info.vocab_size,
        block_size=info.block_size_tokens,
        # Ids of blocks depend on the sizes of the cache groups before.
        num_blocks=first.num_device_blocks if others or info.has_encoder else min(_NUM_TOKENS, info.num_device_blocks),
        more_groups=tuple(PoolLimits(group.num_device_blocks) for group in others),
        max_encoder_tokens=min(1, info.max_encoder_tokens),
        num_encoder_blocks=min(1, info.max_encoder_tokens),
        prefix_caching=False,
    )
