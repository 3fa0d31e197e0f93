"""Which kind of executor made which tokens: spans begin where another kind goes on."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.request.continuation import Continuation, ContinuedOutput
from scheduler_svc.request.provenance import ENDED, Numerics, Progress, Provenance
from tests.support.driving import group as make_group
from tests.support.live_requests import RecordingSink, live_request

ONE, OTHER = Numerics("1"), Numerics("2")


def at(*num_tokens: int, num_prompt_logprobs: int = 0) -> Progress:
    return Progress(num_tokens, num_prompt_logprobs)


def test_executors_of_one_kind_make_one_span() -> None:
    made = Provenance()
    made.go_on(ONE, at(0))
    made.go_on(ONE, at(3))

    assert made.of_output(0, 5) == [(0, ONE)]


def test_another_kind_begins_a_span_at_the_tokens_of_each_output() -> None:
    made = Provenance()
    made.go_on(ONE, at(0, 0, 0))
    made.go_on(OTHER, at(3, ENDED, 4))

    assert [made.of_output(index, 5) for index in range(3)] == [
        [(0, ONE), (3, OTHER)],
        [(0, ONE)],
        [(0, ONE), (4, OTHER)],
    ]
    assert made.of_output(2, 4) == [(0, ONE)]  # it ended by its stop string after all


def test_a_kind_that_brought_one_output_nothing_is_no_span_of_it() -> None:
    made = Provenance()
    made.go_on(ONE, at(0, 0))
    made.go_on(OTHER, at(2, 3))
    made.go_on(ONE, at(4, 3))

    assert made.of_output(0, 6) == [(0, ONE), (2, OTHER), (4, ONE)]
    assert made.of_output(1, 6) == [(0, ONE)]


def test_an_executor_that_was_lost_before_a_result_made_nothing() -> None:
    made = Provenance()
    made.go_on(OTHER, at(0))
    made.go_on(ONE, at(0))
    made.go_on(OTHER, at(2))
    made.go_on(ONE, at(2))

    assert made.of_output(0, 5) == [(0, ONE)]


def test_the_kind_that_made_the_last_tokens_is_to_go_on() -> None:
    made = Provenance()
    assert made.preferred(at(0)) is None
    made.go_on(ONE, at(0))
    assert made.preferred(at(0)) is None  # nothing to agree with
    assert made.preferred(at(2)) == ONE
    made.go_on(OTHER, at(2))
    assert made.preferred(at(2)) == ONE
    assert made.preferred(at(3)) == OTHER


def test_log_probabilities_of_the_prompt_are_part_of_it() -> None:
    made = Provenance()
    made.go_on(ONE, at(0))
    assert made.preferred(at(0, num_prompt_logprobs=5)) == ONE
    made.go_on(OTHER, at(0, num_prompt_logprobs=5))

    assert made.has_mixed_prompt_logprobs(9)
    assert not made.has_mixed_prompt_logprobs(5)
    assert made.of_output(0, 2) == [(0, OTHER)]


KINDS = st.sampled_from([ONE, OTHER, Numerics("3")])


@given(
    before=st.none() | st.tuples(KINDS, st.integers(0, 2)),
    admissions=st.lists(st.tuples(KINDS, st.integers(0, 2)), min_size=1, max_size=8),
)
def test_a_sink_that_is_told_the_new_spans_has_all_of_them(
    before: tuple[Numerics, int] | None, admissions: list[tuple[Numerics, int]]
) -> None:
    """However executors come and are lost, with and without a result, and wherever the answer was cut."""
    group, num_tokens = make_group(0, 3), 0
    if before is not None:
        numerics, num_tokens = before
        output = ContinuedOutput(np.arange(num_tokens, dtype=np.int32))
        group.continuation = Continuation((output,), numerics=numerics)
        group.provenance.go_on_behind(numerics, 1)
    live = live_request(group)
    sink = live.sink
    assert isinstance(sink, RecordingSink)
    if before is not None:
        sink.provenance.go_on_behind(before[0], 1)
    for numerics, num_new in admissions:
        group.provenance.go_on(numerics, at(num_tokens))
        live.tell_span()
        num_tokens += num_new
        assert sink.provenance.spans == group.provenance.spans
