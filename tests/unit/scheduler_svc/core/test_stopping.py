"""Why and when outputs end by themselves."""

import numpy as np

from scheduler_svc.core.stopping import StopChecker
from scheduler_svc.request.outputs import FinishReason
from scheduler_svc.request.parameters import StopConditions
from tests.support.each_row import each_row

EOS = 7
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
MAX_MODEL_LEN = 20

# conditions, output so far (the prompt has 3 tokens), why it ends
CASES = {
    "an ordinary token goes on": (StopConditions(max_tokens=4), [1], None),
    "eos": (StopConditions(), [1, EOS], STOP),
    "the second of two eos tokens": (StopConditions(), [8], STOP),
    "ignore_eos goes on": (StopConditions(ignore_eos=True), [EOS], None),
    "a stop id": (StopConditions(stop_token_ids=frozenset({5, 6})), [6], STOP),
    "a stop id that is eos, with ignore_eos": (
        StopConditions(ignore_eos=True, stop_token_ids=frozenset({EOS})),
        [EOS],
        STOP,
    ),
    "one below max_tokens goes on": (StopConditions(max_tokens=3), [1, 1], None),
    "max_tokens": (StopConditions(max_tokens=3), [1, 1, 1], LENGTH),
    "one below max_model_len goes on": (StopConditions(), [1] * (MAX_MODEL_LEN - 4), None),
    "max_model_len": (StopConditions(), [1] * (MAX_MODEL_LEN - 3), LENGTH),
    "max_model_len before max_tokens": (StopConditions(max_tokens=1000), [1] * (MAX_MODEL_LEN - 3), LENGTH),
    "eos at max_tokens is a stop": (StopConditions(max_tokens=1), [EOS], STOP),
    "a stop id at max_tokens is a stop": (StopConditions(max_tokens=1, stop_token_ids=frozenset({5})), [5], STOP),
    "ignored eos at max_tokens is a length": (StopConditions(max_tokens=1, ignore_eos=True), [EOS], LENGTH),
}


@each_row(*CASES)
def test_a_running_and_a_waiting_sequence_end_for_the_same_reason(case: str) -> None:
    conditions, output, expected = CASES[case]
    checker = StopChecker(max_num_seqs=2, max_model_len=MAX_MODEL_LEN, eos_token_ids=(EOS, 8))
    checker.set_slot(1, num_prompt_tokens=3, conditions=conditions)
    token_ids = np.array([100, 101, 102, *output], np.int32)
    position = np.array([3 + len(output) - 1], np.int32)

    running = checker.finished(np.array([1], np.int32), position, np.array(output[-1:], np.int32))

    assert running == ({} if expected is None else {0: expected})
    assert checker.finished_without_slot(token_ids, 3, conditions) is expected


def test_a_slot_forgets_the_conditions_of_its_last_user() -> None:
    checker = StopChecker(max_num_seqs=1, max_model_len=MAX_MODEL_LEN, eos_token_ids=(EOS,))
    checker.set_slot(0, 3, StopConditions(max_tokens=1, stop_token_ids=frozenset({5}), ignore_eos=True))

    checker.set_slot(0, 3, StopConditions())

    slots, positions = np.zeros(2, np.int32), np.full(2, 5, np.int32)
    assert checker.finished(slots, positions, np.array([5, EOS], np.int32)) == {1: STOP}
    checker.set_slot(0, 3, StopConditions(stop_token_ids=frozenset({6})))
    assert checker.finished(slots, positions, np.array([5, 6], np.int32)) == {1: STOP}
