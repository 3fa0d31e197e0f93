"""The first steps of a worker on a GPU: kernels are compiled and libraries loaded before a request waits for them."""

import numpy as np

from executor_svc.worker.interface import Worker, execute
from octavo_shared.step_wire.step import Admission, SamplingRow, Step, TableDelta, pairs

# Sequences decode greedily, and draw with every filter, penalties and log-probabilities.
SAMPLINGS = (
    SamplingRow(),
    SamplingRow(
        temperature=1.0,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        typical_p=0.9,
        seed=1,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        no_repeat_ngram_size=3,
        num_logprobs=1,
    ),
)
# Decodes beside a prompt, as a large batch has them: kernels for few rows differ from kernels for many.
MANY_SEQUENCES = 160
PROMPT_TOKENS = 3
NUM_DECODES = 2


def warm_up(worker: Worker) -> None:
    """Run steps of every kind, and empty the table; the blocks hold garbage after it.

    A prompt alone, a prompt beside one decode, many prompts, a prompt beside many decodes, and decodes alone; as far
    as the worker has room for them.
    """
    info = worker.info
    num_tokens = PROMPT_TOKENS + NUM_DECODES + 4
    num_blocks = -(-num_tokens // info.block_size_tokens)
    room = (MANY_SEQUENCES, info.max_num_seqs, info.num_device_blocks // num_blocks)
    num_sequences = min(*room, info.max_num_batched_tokens // PROMPT_TOKENS)
    if info.max_model_len < num_tokens or num_sequences < len(SAMPLINGS):
        return
    first, last = [0], [num_sequences - 1]
    waves = [first, last] if num_sequences == 2 else [first, [1], list(range(2, num_sequences - 1)), last]
    deltas = [_admit(wave, num_blocks) for wave in waves if wave]
    for step_id, delta in enumerate([*deltas, *[TableDelta()] * NUM_DECODES], 1):
        execute(worker, Step(0, step_id, delta))
    worker.reset()


def _admit(slots: list[int], num_blocks: int) -> TableDelta:
    """Return the delta that computes a short prompt in each slot, of the blocks that belong to it here."""
    prompt = np.zeros(PROMPT_TOKENS, np.int32)
    admissions = tuple(
        Admission(
            slot,
            1,
            prompt,
            PROMPT_TOKENS,
            0,
            np.arange(slot * num_blocks, (slot + 1) * num_blocks, dtype=np.int32),
            SAMPLINGS[slot % len(SAMPLINGS)],
        )
        for slot in slots
    )
    return TableDelta(admissions=admissions, prefill_chunks=pairs(*[(slot, PROMPT_TOKENS) for slot in slots]))
