"""The steps that need the most memory: what they take is known before the rest is given to the KV cache.

They are real steps of a worker with a small cache, so that all that a step holds is there: the activations of as many
tokens as a step may have, logits of as many rows, and what the sampler takes for rows that ask for everything.
"""

import numpy as np

from executor_svc.worker.interface import Worker, execute
from octavo_shared.step_wire.cache_group import CacheKind
from octavo_shared.step_wire.executor_info import ExecutorInfo
from octavo_shared.step_wire.step import Admission, Int32Array, SamplingRow, Step, TableDelta, pairs
from octavo_shared.step_wire.token_rules import TokenRules

# Nothing is cut off by rank, so that the whole vocabulary is filtered; alternatives beside the token.
NUM_ALTERNATIVES = 20
NUM_CANDIDATES = 64
# All rows share these blocks: the results are not used.
NUM_DEVICE_BLOCKS = 8


def run_largest_steps(worker: Worker) -> None:
    """Run the steps one after the other, and empty the table; the blocks hold garbage after it.

    A chunk at the end of the longest prompt, or a shorter prompt where a state is of all tokens before, with its
    log-probabilities, beside one token for every other sequence;
    the same with beams; and a block that leaves and returns. All rows have penalties and rules.

    Args:
        worker: With one block or more, and as many host blocks as swaps are staged in, if it will have any.
    """
    info = worker.info
    if info.max_model_len < 2:  # no prompt has room for a token
        return
    num_alternatives = min(NUM_ALTERNATIVES, info.vocab_size)
    sampled = SamplingRow(
        temperature=1.0,
        typical_p=0.9,
        num_logprobs=num_alternatives,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        no_repeat_ngram_size=3,
    )
    beams = SamplingRow(
        num_candidates=min(NUM_CANDIDATES, info.vocab_size), repetition_penalty=1.1, no_repeat_ngram_size=3
    )
    lengths = prompt_lengths(info)
    deltas = (
        _prompts(info, lengths, sampled, generation=1),
        _prompts(info, lengths, beams, generation=2),
    )
    for step_id, delta in enumerate(deltas, 1):
        execute(worker, Step(0, step_id, delta))
    if info.num_host_blocks:  # no row decodes: beams wait for the scheduler
        execute(worker, Step(0, 3, TableDelta(), blocks_to_swap_out=pairs((0, 0))))
        execute(worker, Step(0, 4, TableDelta(), blocks_to_swap_in=pairs((0, 0))))
    worker.reset()


def prompt_lengths(info: ExecutorInfo) -> Int32Array:
    """Return how many tokens each prompt of the largest step has, ascending, [num_prompts].

    As many tokens as a step may have, in as many sequences, of which the last ones are as long as can be.
    """
    budget, longest = info.max_num_batched_tokens, info.max_model_len - 1
    lengths: list[int] = []
    for num_behind in reversed(range(info.max_num_seqs)):
        lengths.append(min(longest, budget - num_behind))
        budget -= lengths[-1]
    return np.array(lengths[::-1], np.int32)


def _prompts(info: ExecutorInfo, lengths: Int32Array, sampling: SamplingRow, generation: int) -> TableDelta:
    """Return the delta that computes the last tokens of a prompt in each slot, in place of those before."""
    has_states = any(group.kind is CacheKind.STATE for group in info.cache_groups)
    mask = np.packbits(np.ones(info.vocab_size, np.uint8), bitorder="little").tobytes()
    admissions = []
    for slot, length in enumerate(lengths.tolist()):
        num_tokens = info.max_model_len - 1 if length > 1 and not has_states else length
        num_blocks = -(-num_tokens // info.block_size_tokens)
        admissions.append(
            Admission(
                slot,
                generation,
                np.zeros(num_tokens, np.int32),
                num_tokens,
                num_tokens - length,
                np.arange(num_blocks, dtype=np.int32) % info.num_device_blocks,
                sampling,
                token_rules=TokenRules(allowed_mask=mask),
                num_prompt_logprobs=sampling.num_logprobs,
            )
        )
    slots = np.arange(len(lengths), dtype=np.int32)
    return TableDelta(
        released_slots=slots[:0] if generation == 1 else slots,
        admissions=tuple(admissions),
        prefill_chunks=pairs(*zip(slots.tolist(), lengths.tolist(), strict=True)),
    )
