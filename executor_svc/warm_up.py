"""The first steps of a worker on a GPU: kernels are compiled and libraries loaded before anybody waits for them."""

import numpy as np

from executor_svc.worker import Worker, execute
from shared.step import Admission, SamplingRow, Step, TableDelta, pairs

# A sequence that decodes greedily, and one that draws with every filter.
SAMPLINGS = (
    SamplingRow(),
    SamplingRow(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, typical_p=0.9, seed=1),
)
PROMPT_TOKENS = 8
NUM_DECODES = 2


def warm_up(worker: Worker) -> None:
    """Run prompts, a chunk beside a decode, and decodes; then empty the table. The first blocks hold garbage after it.

    Does nothing where the worker has no room for two short sequences.
    """
    info = worker.info
    num_tokens = PROMPT_TOKENS + NUM_DECODES + 2
    num_blocks = -(-num_tokens // info.block_size_tokens)
    has_room = min(info.max_model_len, info.max_num_batched_tokens) >= num_tokens and info.max_num_seqs >= 2
    if not has_room or info.num_device_blocks < 2 * num_blocks:
        return
    deltas = []
    for slot, sampling in enumerate(SAMPLINGS):
        blocks = np.arange(slot * num_blocks, (slot + 1) * num_blocks, dtype=np.int32)
        prompt = np.zeros(PROMPT_TOKENS, np.int32)
        admission = Admission(slot, 1, prompt, PROMPT_TOKENS, 0, blocks, sampling)
        deltas.append(TableDelta(admissions=(admission,), prefill_chunks=pairs((slot, PROMPT_TOKENS))))
    deltas += [TableDelta()] * NUM_DECODES
    for step_id, delta in enumerate(deltas, 1):
        execute(worker, Step(0, step_id, delta))
    worker.reset()
