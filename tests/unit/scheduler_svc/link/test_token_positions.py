"""Tokens on the link have positions: what comes twice is dropped, and what is missing ends the session."""

import asyncio
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.v1 import core_service_pb2 as pb
from octavo_shared.step_wire.step import SamplingRow
from scheduler_svc.link.front_session import AnswerBatch
from scheduler_svc.link.remote_engine import RemoteEngine
from scheduler_svc.link.remote_request import RemoteRequest, TokenGapError
from scheduler_svc.request.continuation import Continuation, ContinuedOutput
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.outputs import Alternatives, FinishReason
from scheduler_svc.request.parameters import StopConditions
from scheduler_svc.request.served_model import Reproducibility, ServedModel
from tests.support.each_row import each_row

NUM_OUTPUTS = 2
NO_CONDITIONS = StopConditions()

# A token with its log-probability and its likeliest tokens.
Token = tuple[int, float | None, tuple[int, ...]]

ANSWERS = st.lists(
    st.lists(
        st.tuples(st.integers(0, 99), st.none() | st.sampled_from((-0.5, -2.0)), st.sampled_from(((), (3,), (4, 5)))),
        max_size=8,
    ),
    min_size=NUM_OUTPUTS,
    max_size=NUM_OUTPUTS,
)


@dataclass
class Answer:
    """A sink that keeps what it is given."""

    outputs: list[list[Token]] = field(default_factory=lambda: [[] for _ in range(NUM_OUTPUTS)])
    ended: set[int] = field(default_factory=set)

    def push(self, index: int, token_id: int, logprob: float | None, alternatives: Alternatives | None) -> None:
        """Keep a token."""
        self.outputs[index].append((token_id, logprob, tuple(alternatives.token_ids) if alternatives else ()))

    def finish_output(self, index: int, _: FinishReason) -> None:
        """Keep that an output has ended."""
        self.ended.add(index)

    def so_far(self) -> Continuation:
        """See `AnswerSink`."""
        kept = (np.array([token_id for token_id, *_ in output], np.int32) for output in self.outputs)
        return Continuation(tuple(ContinuedOutput(token_ids) for token_ids in kept))


def front_of(
    answer: Answer, conditions: StopConditions = NO_CONDITIONS
) -> tuple[RemoteEngine, RemoteRequest, ServedModel]:
    """Return a front that has one request, number 1."""
    model = ServedModel(
        Mock(model_hash="m", eos_token_ids=(2,)),
        99,
        8,
        None,
        Reproducibility((), "", ""),  # of the model nothing else is looked at
    )
    core = RemoteEngine(Mock(), "0", Mock(), Mock())
    request = EngineRequest("r", np.zeros(1, np.int32), SamplingRow(), conditions, num_sequences=NUM_OUTPUTS)
    remote = core._requests[1] = RemoteRequest(core, 1, request, answer, model)  # type: ignore[arg-type]
    return core, remote, model


def message(tokens: list[tuple[int, int, Token]]) -> pb.JoinResponse:
    """Return what an engine sends: (output, position, token)."""
    batch = AnswerBatch()
    for index, position, (token_id, logprob, alternatives) in tokens:
        likeliest = Alternatives(list(alternatives), [-1.0] * len(alternatives)) if alternatives else None
        batch.add_token(1, index, position, token_id, logprob, likeliest)
    return batch.message()


async def _take(core: RemoteEngine, *messages: pb.JoinResponse) -> None:
    for each in messages:
        await core.take(each, Mock())


def ends(answer: list[list[Token]]) -> pb.JoinResponse:
    """Return the message behind all tokens."""
    found = pb.JoinResponse()
    for index, tokens in enumerate(answer):
        found.output_ends.add(number=1, output_index=index, num_tokens=len(tokens), reason=pb.END_REASON_LENGTH)
    return found


@settings(max_examples=settings().max_examples // 2)  # each example has tens of messages
@given(ANSWERS, st.data())
def test_any_end_that_is_sent_again_changes_nothing(answer: list[list[Token]], data: Any) -> None:
    async def run() -> None:
        got = Answer()
        core, *_ = front_of(got)
        sent = [0] * NUM_OUTPUTS
        while any(sent[index] < len(answer[index]) for index in range(NUM_OUTPUTS)):
            index = data.draw(st.integers(0, NUM_OUTPUTS - 1))
            begin = data.draw(st.integers(0, sent[index]))
            end = data.draw(st.integers(begin, len(answer[index])))
            await _take(core, message([(index, place, answer[index][place]) for place in range(begin, end)]))
            sent[index] = max(sent[index], end)
        await _take(core, ends(answer), ends(answer))
        assert got.outputs == answer
        assert got.ended == set(range(NUM_OUTPUTS))

    asyncio.run(run())


@given(ANSWERS.filter(any), st.data())
def test_any_gap_ends_the_session_and_the_next_one_goes_on_behind_what_there_is(
    answer: list[list[Token]], data: Any
) -> None:
    rows = [(index, place, token) for index, output in enumerate(answer) for place, token in enumerate(output)]
    first = data.draw(st.integers(0, len(rows) - 1))
    num_lost = data.draw(st.integers(1, len(answer[rows[first][0]]) - rows[first][1]))
    batches = message(rows[:first]), message(rows[first + num_lost :]), ends(answer)

    async def run() -> None:
        got = Answer()
        core, remote, model = front_of(got)
        with pytest.raises(TokenGapError, match=r"tokens \d+ to \d+ of output \d of request 'r' are missing"):
            await _take(core, *batches)
        for index, output in enumerate(got.outputs):
            assert output == answer[index][: len(output)]
        behind = [len(np.frombuffer(output.token_ids, "<i4")) for output in continued(remote.resubmission(model))]
        assert behind == [len(output) for output in got.outputs]
        await _take(core, message([row for row in rows if row[1] >= behind[row[0]]]), ends(answer))
        assert got.outputs == answer

    asyncio.run(run())


def continued(submission: pb.Submission) -> Any:
    """Return the outputs that a submission goes on with."""
    return submission.continuation.outputs


def test_a_token_again_and_one_that_is_too_far_make_no_wrong_list() -> None:
    async def run() -> None:
        got = Answer()
        core, *_ = front_of(got)
        with pytest.raises(TokenGapError, match="tokens 2 to 8 of output 0 of request 'r' are missing on the link"):
            await _take(core, message([(0, place, (place, None, ())) for place in (0, 1, 1, 9)]))
        assert [token_id for token_id, *_ in got.outputs[0]] == [0, 1]

    asyncio.run(run())


@each_row(
    (StopConditions(max_tokens=3), 7, True),
    (StopConditions(max_tokens=4), 7, False),
    (StopConditions(max_tokens=4), 2, True),
    (StopConditions(max_tokens=4, ignore_eos=True), 2, False),
    (StopConditions(stop_token_ids=frozenset({7})), 7, True),
    (StopConditions(accepted_len=4), 7, True),
)
async def test_an_output_whose_last_token_ends_it_has_ended_though_no_core_said_so(
    conditions: StopConditions, last_token: int, ends: bool
) -> None:
    """Its core went between the token and the word of its end: the next one computes nothing more."""
    answer = Answer()
    _, remote, model = front_of(answer, conditions)
    for position, token_id in enumerate((9, 9, last_token)):
        remote.push(1, position, token_id, None, None)
    remote.resubmission(model)
    assert answer.ended == ({1} if ends else set())
