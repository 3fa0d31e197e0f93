"""What the fake worker finds wrong with what sequences attend to, and that their tokens depend on it."""

from dataclasses import replace

import numpy as np
import pytest

from executor_svc.fake.worker import FakeWorker
from octavo_shared.errors import InvalidStepError, StepFailedError
from octavo_shared.step_wire.step import Admission, EncoderInput, Fork, SamplingRow, TableDelta, pairs
from tests.support.fake_runs import Run, admission, small_worker

# Blocks 0 to 15 are of the decoder, 16 to 23 of the encoder.
LONG = "an input of several blocks"


def attending(
    text: str, first_block: int, *, slot: int = 0, salt: int = 0, computes: bool = True, generation: int = 1
) -> Admission:
    """Return the admission of one prompt that attends to a text, in blocks that begin with `first_block`."""
    blocks = np.arange(first_block, first_block - len(text) // -4, dtype=np.int32)
    token_ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    entry = admission("abc", (slot, slot + 4), slot=slot, salt=salt, generation=generation)
    return replace(entry, encoder_input=EncoderInput(len(text), blocks, token_ids if computes else None))


def worker() -> FakeWorker:
    made = small_worker(max_encoder_tokens=40, num_encoder_blocks=8, num_encoder_host_blocks=8)
    made.reset(uses_groups=True)
    return made


def first_token(text: str, slot: int = 0) -> int:
    return Run(worker()).prefill(attending(text, 16, slot=slot))[0]


def test_tokens_depend_on_the_whole_input_and_on_nothing_else() -> None:
    tokens = [first_token(text) for text in (LONG, LONG[:-1], "An" + LONG[2:], LONG[:-1] + "z")]
    assert len(set(tokens)) == len(tokens)
    assert first_token(LONG, slot=2) == tokens[0]


def test_who_names_the_blocks_of_an_input_attends_to_it_and_so_do_forks_also_after_a_swap() -> None:
    run = Run(worker())
    first = run.prefill(attending(LONG, 16))
    assert run.prefill(attending(LONG, 16, slot=1, computes=False))[-1:] == first
    forks = (Fork(0, 2, 1, SamplingRow(seed=3)),)
    run.step(TableDelta(forks=forks, replaced_blocks=pairs((0, 1, 8))))
    run.step(TableDelta(replaced_blocks=pairs((2, 1, 9))), {"blocks_to_copy": pairs((8, 9))})
    blocks = [(block, block - 16) for block in range(16, 23)]
    run.step(TableDelta(released_slots=np.array([0, 1, 2], np.int32)), {"blocks_to_swap_out": pairs(*blocks)})
    again = attending(LONG, 16, computes=False, generation=2)
    assert run.prefill(again, moves={"blocks_to_swap_in": pairs(*[(host, block) for block, host in blocks])}) == first


def test_blocks_that_hold_something_else_fail_the_step() -> None:
    run = Run(worker())
    with pytest.raises(StepFailedError, match="slot 0 attends to encoder token 0 in block 0, which is unwritten there"):
        run.prefill(attending(LONG, 16, computes=False))
    run = Run(worker())
    run.prefill(attending(LONG, 16))
    with pytest.raises(StepFailedError, match="slot 0 attends to encoder token 8 in block 2, which has the output of"):
        run.prefill(attending("other", 18, slot=1))


def test_sequences_need_an_input_and_inputs_count_as_tokens_of_the_step() -> None:
    with pytest.raises(InvalidStepError, match="slot 0 has no encoder_input; the model has an encoder"):
        Run(worker()).prefill(admission("abc", (0,)))
    made = small_worker(max_encoder_tokens=40, num_encoder_blocks=8, max_num_batched_tokens=28)
    made.reset(uses_groups=True)
    with pytest.raises(StepFailedError, match="step 1 computes 29 tokens; the limit is 28"):
        Run(made).prefill(attending(LONG, 16))
