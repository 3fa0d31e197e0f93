"""The policy by which a client goes on with an answer: what it sends, how long it waits, when it gives up."""

from collections.abc import Callable

import pytest

from octavo.calls.resumption import ResumableRequest, ResumeWindow
from octavo.errors import (
    DeadlineError,
    InvalidRequestError,
    LostTooOftenError,
    NotConnectedError,
    OctavoError,
    OverloadedError,
    RequestAbortedError,
    RequestExistsError,
    TlsHandshakeError,
    UnavailableError,
)
from octavo.generation.v1 import generation_pb2
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.values.outputs import Accepted, Delta, Event, Finished, FinishReason, Output, Provenance, Usage
from tests.support.each_row import each_row

LOST = UnavailableError("the connection to the scheduler at a:1 was lost")


def window(timeout_s: float = 30.0, random: Callable[[], float] = lambda: 0.0) -> ResumeWindow:
    return ResumeWindow(timeout_s, random)


def accepted(**fields: object) -> pb.Accepted:
    return pb.Accepted(
        request_id="mine",
        num_prompt_tokens=2,
        sampling_params=generation_pb2.SamplingParams(seed=7, max_tokens=9),
        **fields,  # type: ignore[arg-type]
    )


def take(request: ResumableRequest, event: Event) -> Event | None:
    """Let an event come, as the client does it."""
    return request.told(request.answer.take(event))


def accept(request: ResumableRequest, message: pb.Accepted) -> Event | None:
    request.answer.accepted = request.answer.accepted or message
    return request.told(Accepted(message.request_id, message.num_prompt_tokens))


def text_request() -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text="Hi", tenant="red", priority=3, lean_finished=True, include_prompt_token_ids=True, include_provenance=True
    )


def begun(timeout_s: float = 30.0) -> ResumableRequest:
    """Return a request that was accepted, and of which two tokens came."""
    request = ResumableRequest(text_request(), window(timeout_s))
    request.message()
    accept(request, accepted(prompt_token_ids=[72, 105]))
    take(request, Delta(0, "ab", (4, 5), ()))
    return request


def test_pauses_double_up_to_a_second_and_begin_anew_with_news() -> None:
    tried = window()
    pauses = [tried.pause_s(LOST, float(number)) for number in range(7)]
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    tried.note_news()
    assert tried.pause_s(LOST, 8.0) == 0.05


def test_chance_shortens_a_pause_by_up_to_half() -> None:
    assert window(random=lambda: 1.0).pause_s(LOST, 0.0) == 0.025
    assert window(random=lambda: 0.5).pause_s(LOST, 0.0) == pytest.approx(0.0375)


def test_the_time_counts_from_the_first_loss_since_something_new_came() -> None:
    tried = window(10.0)
    tried.pause_s(LOST, 100.0)
    assert tried.pause_s(LOST, 109.99) == pytest.approx(0.01)  # the last call is made when the time is over
    with pytest.raises(UnavailableError, match=r"was lost, and no scheduler resumed it within 10 s$"):
        tried.pause_s(LOST, 110.0)
    tried.note_news()
    assert tried.pause_s(LOST, 200.0) == 0.05
    assert tried.left_s(204.0) == 6.0


def test_what_is_raised_in_the_end_is_the_first_loss_and_tells_the_last_one() -> None:
    tried = window(1.0)
    tried.pause_s(NotConnectedError("a:1"), 0.0)
    with pytest.raises(NotConnectedError) as caught:
        tried.pause_s(LOST, 2.0)
    assert caught.value.address == "a:1"
    assert str(caught.value) == (
        f"no scheduler is reachable at a:1, and no scheduler resumed it within 1 s; the last time, {LOST}"
    )


def test_without_time_the_error_is_raised_as_it_is() -> None:
    with pytest.raises(UnavailableError) as caught:
        window(0.0).pause_s(LOST, 0.0)
    assert caught.value is LOST


def test_a_continuation_has_the_prompt_as_tokens_the_parameters_in_effect_and_what_came() -> None:
    request = begun()
    message = request.message()
    assert (message.request_id, list(message.token_ids.ids)) == ("mine", [72, 105])
    assert (message.sampling_params.seed, message.sampling_params.max_tokens) == (7, 9)
    assert (message.tenant, message.priority, message.include_provenance) == ("red", 3, True)
    assert not message.include_prompt_token_ids
    [output] = message.continuation.outputs
    assert (list(output.token_ids), output.num_characters) == ([4, 5], 2)


def test_a_continuation_says_who_made_the_last_of_the_answer() -> None:
    request = begun()
    assert request.message().continuation.numerics_id == ""
    take(request, Delta(0, "c", (6,), (), provenance=(Provenance(2, "one", "digest"),)))
    take(request, Delta(0, "d", (7,), ()))
    continuation = request.message().continuation
    assert (continuation.numerics_id, continuation.weights_digest) == ("one", "digest")


@each_row(True, False)
def test_an_answer_of_two_calls_has_the_spans_of_both_for_who_asked(shows: bool) -> None:
    request = ResumableRequest(text_request(), window(), shows_provenance=shows)
    request.message()
    accept(request, accepted(prompt_token_ids=[72, 105]))
    first, second = Provenance(0, "one", "digest"), Provenance(2, "two", "digest")
    told = [take(request, Delta(0, "ab", (4, 5), (), provenance=(first,)))]
    request.message()
    told.append(take(request, Delta(0, "c", (6,), (), provenance=(second,))))
    assert [event.provenance for event in told if isinstance(event, Delta)] == (
        [(first,), (second,)] if shows else [(), ()]
    )
    output = Output(0, "", (), (), FinishReason.LENGTH, None, provenance=(Provenance(0, "two", "digest"),))
    finished = take(request, Finished((output,), Usage(2, 3, 0)))
    assert isinstance(finished, Finished)
    assert finished.outputs[0].provenance == ((first, second) if shows else ())
    assert finished.continued_on_other_numerics


def test_each_continuation_has_a_larger_attempt() -> None:
    request = begun()
    assert [request.message().continuation.attempt for _ in range(3)] == [1, 2, 3]


def test_a_prompt_of_token_ids_stays_as_it_is() -> None:
    sent = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), lean_finished=True)
    request = ResumableRequest(sent, window())
    assert request.message() is sent
    accept(request, accepted())
    assert request.pause_s(LOST, 0.0) == 0.05
    assert list(request.message().token_ids.ids) == [1, 2, 3]


def test_callers_get_one_accepted_and_the_number_of_continuations_that_were_accepted() -> None:
    request = ResumableRequest(text_request(), window())
    request.message()
    message = accepted(prompt_token_ids=[1])
    assert accept(request, message) == Accepted("mine", 2)
    request.message()  # one that nobody accepts
    request.message()
    assert accept(request, message) is None
    end = take(request, Finished((), Usage(1, 1, 0)))
    assert isinstance(end, Finished)
    assert end.num_resumptions == 1


def test_a_scheduler_that_does_not_know_the_accepted_length_is_asked_without_it() -> None:
    request = ResumableRequest(text_request(), window())
    accept(request, accepted(prompt_token_ids=[72, 105], max_model_len=200))
    request.pause_s(LOST, 0.0)
    assert request.message().continuation.max_model_len == 200
    assert request.pause_s(InvalidRequestError("unknown", field="field 6 of Continuation"), 0.0) > 0
    assert request.message().continuation.max_model_len == 0
    request.pause_s(LOST, 0.0)
    assert request.message().continuation.max_model_len == 200  # the next one may know it


@each_row(InvalidRequestError("field 14 of GenerateRequest is unknown"), RequestExistsError("'mine' is in use"))
def test_a_continuation_that_is_refused_is_unavailable_and_says_what_was_lost_and_why(error: OctavoError) -> None:
    request = begun()
    request.pause_s(LOST, 0.0)
    request.message()
    with pytest.raises(UnavailableError) as caught:
        request.pause_s(error, 1.0)
    assert str(caught.value) == f"{LOST}, and the answer, cut off after 2 tokens, cannot be resumed: {error}"


@each_row(
    DeadlineError("over"), RequestAbortedError("aborted"), LostTooOftenError("lost"), TlsHandshakeError("a:1", "")
)
def test_what_no_other_call_can_mend_is_raised_as_it_is(error: OctavoError) -> None:
    request = begun()
    request.pause_s(LOST, 0.0)
    request.message()
    with pytest.raises(type(error)) as caught:
        request.pause_s(error, 1.0)
    assert caught.value is error


def test_a_continuation_waits_as_long_as_a_full_queue_asks_for() -> None:
    request = begun()
    request.pause_s(LOST, 0.0)
    request.message()
    assert request.pause_s(OverloadedError("the queue is full", retry_after_s=2.5), 1.0) == 2.5
    accept(request, accepted())
    with pytest.raises(OverloadedError):
        request.pause_s(OverloadedError("the queue is full", retry_after_s=2.5), 2.0)


@each_row(pb.Accepted(request_id="mine"), accepted())
def test_what_an_earlier_scheduler_accepted_is_not_continued(told: pb.Accepted) -> None:
    request = ResumableRequest(text_request(), window())
    request.message()
    accept(request, told)
    with pytest.raises(UnavailableError) as caught:
        request.pause_s(LOST, 0.0)
    assert caught.value is LOST


def test_a_loss_before_the_first_token_is_told_so() -> None:
    request = ResumableRequest(text_request(), window())
    request.message()
    accept(request, accepted(prompt_token_ids=[1]))
    request.pause_s(LOST, 0.0)
    request.message()
    with pytest.raises(UnavailableError, match="cut off before its first token, cannot be resumed"):
        request.pause_s(RequestExistsError("'mine' is in use"), 0.0)
