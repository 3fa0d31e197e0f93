"""Steps with sizes that no scheduler sends: each is refused by a short sentence, and the executor goes on."""

from collections.abc import Callable

import grpc
import pytest

from octavo.execution.v1 import sampling_params_pb2, step_pb2
from tests.contract.execution_harness import Executor, first_step, refusal

Request = step_pb2.ExecuteModelRequest
MOST = 2**32 - 1
MOST_SIGNED = 2**31 - 1
MANY = 100_000  # of anything: the message stays below its limit of 1 MiB


def admitting(**changes: object) -> Request:
    """Return step 1 with some fields of its admission changed."""
    step = first_step(0)
    for name, value in changes.items():
        field = getattr(step.admissions[0], name)
        if hasattr(field, "extend"):
            del field[:]
            field.extend(value)
        else:
            setattr(step.admissions[0], name, value)
    return step


def sampling(**fields: object) -> Request:
    step = first_step(0)
    step.admissions[0].sampling_params.MergeFrom(sampling_params_pb2.SamplingParams(**fields))  # type: ignore[arg-type]
    return step


def ruling(**fields: object) -> Request:
    step = first_step(0)
    step.admissions[0].token_rules.MergeFrom(step_pb2.TokenRules(**fields))  # type: ignore[arg-type]
    return step


def adding(**fields: object) -> Request:
    """Return step 1 with more fields."""
    step = first_step(0)
    step.MergeFrom(Request(**fields))  # type: ignore[arg-type]
    return step


def chunked(num_tokens: int) -> Request:
    step = first_step(0)
    step.prefill_chunks[1] = num_tokens
    return step


HOSTILE: dict[str, tuple[Callable[[], Request], str]] = {
    "a step far ahead": (lambda: Request(step_id=2**64 - 1), "arrived after step 0"),
    "a slot far out": (lambda: admitting(slot=MOST), f"slot {MOST} is admitted; slots are 0 to 3"),
    "a generation far ahead": (lambda: admitting(generation=MOST), f"with generation {MOST} after 0"),
    "a prompt longer than any": (lambda: admitting(token_ids=bytes(4 * MANY)), f"has {MANY} tokens; the limit is 200"),
    "more prompt than tokens": (lambda: admitting(num_prompt_tokens=MOST), f"has {MOST} prompt tokens of 3"),
    "more computed than tokens": (lambda: admitting(num_computed_tokens=MOST), f"has {MOST} computed tokens of 3"),
    "a long block table": (lambda: admitting(block_ids=[0] * MANY), f"has {MANY} blocks, more than a table holds"),
    "a block far out": (
        lambda: admitting(block_ids=[MOST_SIGNED]),
        f"is given block {MOST_SIGNED}; blocks are 0 to 63",
    ),
    "a token far out": (lambda: admitting(token_ids=b"\xff\xff\xff\x7f" * 3), f"token id {MOST_SIGNED}; ids are 0 to"),
    "alternatives of a whole prompt": (lambda: admitting(num_prompt_logprobs=MOST), "alternatives"),
    "a candidate for every number": (lambda: sampling(num_candidates=MOST), f"asks for {MOST} candidates"),
    "an alternative for every number": (lambda: sampling(num_logprobs=MOST), f"asks for {MOST} alternatives"),
    "the largest top-k": (lambda: sampling(top_k=MOST), "sampling parameters out of range"),
    "the largest min_tokens": (lambda: sampling(min_tokens=MOST), "sampling parameters out of range"),
    "the largest output index": (lambda: sampling(output_index=MOST), "sampling parameters out of range"),
    "a rule for a token far out": (lambda: ruling(banned_token_ids=[MOST_SIGNED]), f"token id {MOST_SIGNED}; ids are"),
    "a mask for another vocabulary": (lambda: ruling(allowed_mask=bytes(MANY)), f"has a mask of {MANY} bytes"),
    "words without tokens": (lambda: ruling(banned_word_lengths=[MOST] * MANY), "have 0 tokens"),
    "many words beside a long one": (
        lambda: ruling(banned_word_lengths=[2000, *[2] * 2000], banned_word_token_ids=[97] * 6000),
        "2001 banned words of up to 2000 tokens",
    ),
    "many admissions": (
        lambda: Request(step_id=1, admissions=[first_step(0).admissions[0]] * 10_000),
        "slot 0 is admitted but live",
    ),
    "many forks": (
        lambda: adding(forks=[step_pb2.Fork(parent_slot=0, slot=MOST, generation=1)] * 10_000),
        f"slot {MOST} is forked into",
    ),
    "a fork of a slot far out": (
        lambda: adding(beam_forks=[step_pb2.Fork(parent_slot=MOST)]),
        f"slot {MOST} is forked",
    ),
    "a chunk without end": (lambda: chunked(MOST_SIGNED), "would compute more tokens than it has"),
    "a slot released often": (lambda: adding(released_slots=[0] * MANY), "slot 0 is released but not live"),
    "a slot that gets many tokens": (lambda: adding(appended_tokens=[0, 97] * MANY), "longer than max_model_len"),
    "a slot that gets many blocks": (lambda: adding(appended_blocks=[0, 1] * MANY), "more blocks than a block table"),
    "a place far out in a block table": (lambda: adding(replaced_blocks=[0, MOST_SIGNED, 1]), "no block to replace"),
    "a copy of blocks far out": (lambda: adding(blocks_to_copy=[MOST_SIGNED, 0]), "there are 64 device blocks"),
    "a swap of blocks far out": (lambda: adding(blocks_to_swap_in=[MOST_SIGNED, 0]), "there are 0 host blocks"),
    "many moves of one block": (lambda: adding(blocks_to_copy=[1, 2] * MANY), "copies to block 2 twice"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_step_of_absurd_size_is_refused_in_words_and_harms_nothing(name: str, executor: Executor) -> None:
    make, sentence = HOSTILE[name]
    step = make()
    step.epoch = await executor.attach()

    code, details = await refusal(executor.stub.ExecuteModel(step))

    assert code not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE)
    assert sentence in details
    assert len(details) < 500
    assert (await executor.stub.ExecuteModel(first_step(step.epoch))).step_id == 1
