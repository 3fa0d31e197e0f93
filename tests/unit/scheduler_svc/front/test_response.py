"""What becomes of the tokens of a request's outputs: deltas while it runs, the answer at its end."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_shared.errors import OctavoServiceError, RequestAbortedError
from octavo_shared.step_wire.step import NO_LOGPROBS, SamplingRow
from scheduler_svc.front.output import AnswerOptions, Delta, Output, PromptDelta
from scheduler_svc.front.response import Response
from scheduler_svc.front.text.output_text import TextOptions
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.outputs import Alternatives, FinishReason, Hypothesis
from scheduler_svc.request.parameters import StopConditions
from tests.support.each_row import each_row
from tests.support.live_requests import PlayedEngineSide
from tests.support.tokenizers import EOS, byte_level_backend, make_tokenizer

TOKENIZER = make_tokenizer(byte_level_backend())
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


class Played(PlayedEngineSide):
    """A response, and the engine's side of it in the hands of the test."""

    def __init__(self, request: EngineRequest, options: AnswerOptions) -> None:
        self.response = Response(request, options, TOKENIZER)
        super().__init__(request, self.response)

    @property
    def outputs(self) -> Sequence[Output]:
        return self.response.outputs

    async def next_delta(self) -> Delta | PromptDelta | None:
        return await self.response.next_delta()


def sampled_request(
    n: int = 1, best_of: int | None = None, *, logprobs: bool = False, stop: str = "", num_prompt_logprobs: int = -1
) -> Played:
    """Return a request for `n` outputs; tokens are bytes of text."""
    num_sampled = best_of or n
    has_logprobs = logprobs or num_sampled > n
    request = EngineRequest(
        "a",
        np.arange(3, dtype=np.int32),
        SamplingRow(num_logprobs=0 if has_logprobs else NO_LOGPROBS),
        StopConditions(),
        num_sequences=num_sampled,
        num_prompt_logprobs=num_prompt_logprobs,
    )
    return Played(request, AnswerOptions(n, num_sampled, logprobs, TextOptions((stop,) if stop else ())))


def beam_request(*, logprobs: bool = False) -> Played:
    request = EngineRequest("a", np.arange(3, dtype=np.int32), SamplingRow(), StopConditions())
    return Played(request, AnswerOptions(2, 0, logprobs, TextOptions()))


def hypothesis_of(text: str, score: float, reason: FinishReason = LENGTH, *, eos: bool = False) -> Hypothesis:
    token_ids = [*text.encode(), *([TOKENIZER.id_of(EOS)] if eos else [])]
    return Hypothesis(
        np.array(token_ids, np.int32), np.full(len(token_ids), -0.5, np.float32), score=score, finish_reason=reason
    )


def push_text(request: Played, output_index: int, text: str, logprob: float | None = None) -> bool:
    """Push a token a byte; return what the last push said."""
    return [request.push(output_index, token_id, logprob) for token_id in text.encode()][-1]


async def take_all(request: Played) -> list[Delta]:
    """Take the deltas of a request that has ended."""
    deltas = []
    while (delta := await next_delta(request)) is not None:
        deltas.append(delta)
    return deltas


async def next_delta(request: Played) -> Delta | None:
    """Take the next delta of an output."""
    delta = await request.next_delta()
    assert not isinstance(delta, PromptDelta), "nobody asked for log-probabilities of the prompt"
    return delta


def texts(request: Played) -> list[str]:
    return [output.text for output in request.outputs]


# One output ------------------------------------------------------------------------------------------


async def test_what_a_slow_client_has_not_taken_comes_in_one_delta() -> None:
    request = sampled_request()
    push_text(request, 0, "ab")
    assert await request.next_delta() == Delta(0, "ab", [97, 98], [])
    push_text(request, 0, "c")
    request.finish_output(0, LENGTH)
    assert await request.next_delta() == Delta(0, "c", [99], [])
    assert await request.next_delta() is None


async def test_a_client_that_waits_is_woken_by_a_token_and_by_the_end() -> None:
    request = sampled_request()
    waiting = asyncio.ensure_future(request.next_delta())
    await asyncio.sleep(0)
    push_text(request, 0, "a")
    assert await waiting == Delta(0, "a", [97], [])
    waiting = asyncio.ensure_future(request.next_delta())
    await asyncio.sleep(0)
    assert not waiting.done()
    request.finish_output(0, LENGTH)
    assert await waiting is None


async def test_a_stop_string_ends_the_output_and_push_says_so() -> None:
    request = sampled_request(stop="END")
    assert not push_text(request, 0, "aEN")
    assert push_text(request, 0, "D")
    [output] = request.outputs
    assert (output.text, output.stop_string, output.finish_reason) == ("a", "END", STOP)
    assert output.stop_token_id is None
    assert request.response.ended is not None


async def test_text_that_was_held_back_comes_with_the_end() -> None:
    request = sampled_request(stop="END")
    push_text(request, 0, "aE")
    assert (await next_delta(request) or Delta(0, "", [], [])).text == "a"
    request.finish_output(0, LENGTH)
    assert await take_all(request) == [Delta(0, "E", [], [])]


async def test_the_last_token_ended_an_output_that_stopped_without_a_stop_string() -> None:
    request = sampled_request()
    push_text(request, 0, "ab")
    request.finish_output(0, STOP)
    assert request.outputs[0].stop_token_id == ord("b")


@each_row(False, True)
async def test_logprobs_that_a_neighbour_asked_for_are_not_returned(is_wanted: bool) -> None:
    request = sampled_request(logprobs=is_wanted)
    push_text(request, 0, "ab", logprob=-0.25)
    request.finish_output(0, LENGTH)
    expected = [-0.25, -0.25] if is_wanted else []
    assert [delta.logprobs for delta in await take_all(request)] == [expected]
    assert request.outputs[0].logprobs == expected
    assert request.outputs[0].cumulative_logprob == (-0.5 if is_wanted else None)


async def test_a_failure_comes_after_what_was_made_before_it() -> None:
    request = sampled_request(n=2)
    push_text(request, 1, "a")
    request.fail(RequestAbortedError("aborted"))
    assert await request.next_delta() == Delta(1, "a", [97], [])
    with pytest.raises(RequestAbortedError):
        await request.next_delta()


@given(st.text(min_size=1), st.sampled_from(["", "a", "é🦊"]), st.sets(st.integers(0, 100)))
async def test_deltas_of_tokens_do_not_depend_on_when_they_are_taken(text: str, stop: str, taken_at: set[int]) -> None:
    async def deltas(places: set[int]) -> list[Delta]:
        request, taken = sampled_request(logprobs=True, stop=stop), []
        for place, byte in enumerate(text.encode()):
            if not request.outputs[0].finish_reason:
                request.push(0, byte, -float(place), Alternatives([byte, 1], [0.0, -1.0]))
            if place in places and request.response.has_news:
                taken += request.outputs[0].take_each()
                request.response.take_changed()
        request.finish_output(0, LENGTH)
        while (more := await request.response.next_token_deltas()) is not None:
            taken += more
        return taken

    made = await deltas(set())
    assert await deltas(taken_at) == made
    assert all(delta.text for delta in made)
    assert all(
        len(delta.alternatives.token_ids) == 2 * len(delta.token_ids) == 2 * len(delta.logprobs) for delta in made
    )
    assert "".join(delta.text for delta in made) == text.partition(stop)[0] if stop else text


# It ends once ----------------------------------------------------------------------------------------


async def test_nothing_changes_after_the_end() -> None:
    request = sampled_request(n=2)
    for index in range(2):
        push_text(request, index, "a")
        request.finish_output(index, LENGTH)
    assert not request.push(0, 98, None)
    request.finish_output(0, STOP)
    request.fail(OctavoServiceError("too late"))
    assert [delta.text for delta in await take_all(request)] == ["a", "a"]
    assert [output.finish_reason for output in request.outputs] == [LENGTH, LENGTH]
    assert request.response.error is None


async def test_nothing_changes_after_a_failure() -> None:
    request = sampled_request()
    request.fail(RequestAbortedError("first"))
    assert not request.push(0, 97, None)
    request.finish_output(0, LENGTH)
    request.fail(OctavoServiceError("second"))
    with pytest.raises(RequestAbortedError, match="first"):
        await request.next_delta()
    assert request.outputs[0].token_ids == []


async def test_a_search_that_ends_after_a_failure_changes_nothing() -> None:
    request = beam_request()
    request.fail(RequestAbortedError("first"))
    request.finish_search([hypothesis_of("a", -1.0)])
    with pytest.raises(RequestAbortedError):
        await request.next_delta()
    assert list(request.outputs) == []


# Several outputs -------------------------------------------------------------------------------------


async def test_outputs_are_streamed_interleaved_in_the_order_in_which_they_changed() -> None:
    request = sampled_request(n=3)
    for index, text in [(2, "x"), (0, "a"), (2, "y"), (1, "m")]:
        push_text(request, index, text)
    deltas = [await request.next_delta() for _ in range(3)]
    assert deltas == [Delta(2, "xy", [120, 121], []), Delta(0, "a", [97], []), Delta(1, "m", [109], [])]


async def test_each_output_ends_by_itself_and_the_request_with_the_last() -> None:
    request = sampled_request(n=3, stop="!")
    assert push_text(request, 1, "b!")
    push_text(request, 0, "a")
    request.finish_output(0, LENGTH)
    had_ended = request.response.ended is not None
    assert not request.push(1, 98, None), "output 1 has ended"
    push_text(request, 2, "c")
    request.finish_output(2, STOP)
    assert (had_ended, request.response.ended is not None) == (False, True)
    assert texts(request) == ["a", "b", "c"]
    assert [output.finish_reason for output in request.outputs] == [LENGTH, STOP, STOP]
    assert [output.stop_string for output in request.outputs] == [None, "!", None]
    assert request.live.num_output_tokens == 4


async def test_characters_are_put_together_for_each_output_alone() -> None:
    request = sampled_request(n=2)
    fox = "🦊".encode()
    for token_id in fox:
        request.push(0, token_id, None)
        request.push(1, token_id, None)
    for index in range(2):
        request.finish_output(index, LENGTH)
    assert texts(request) == ["🦊", "🦊"]


@given(
    num_outputs=st.integers(1, 4),
    num_dropped=st.integers(0, 2),
    moves=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([*b"ab!", 0xF0]), st.booleans()), max_size=60),
)
def test_deltas_add_up_to_the_answer_whatever_the_interleaving(
    num_outputs: int, num_dropped: int, moves: list[tuple[int, int, bool]]
) -> None:
    """Each move pushes a token to one output, and may let the client take a delta; each output has a token."""
    num_sampled = num_outputs + num_dropped
    request = sampled_request(num_outputs, num_sampled, logprobs=True, stop="!")
    taken: list[Delta] = []

    async def drive() -> None:
        first_tokens = [(output, ord("a"), False) for output in range(num_sampled)]
        for position, (output, token_id, takes) in enumerate(first_tokens + moves):
            request.push(output % num_sampled, token_id, -1.0 / (1 + position))
            if takes and not num_dropped and any(output.is_announced for output in request.outputs):
                taken.append(await next_delta(request) or pytest.fail("the request has not ended"))
        for output in range(num_sampled):
            request.finish_output(output, LENGTH)
        taken.extend(await take_all(request))

    asyncio.run(drive())
    assert len(request.outputs) == num_outputs
    for index, output in enumerate(request.outputs):
        mine = [delta for delta in taken if delta.output_index == index]
        assert output.output_index == index
        assert "".join(delta.text for delta in mine) == output.text
        assert [token_id for delta in mine for token_id in delta.token_ids] == output.token_ids
        assert [logprob for delta in mine for logprob in delta.logprobs] == output.logprobs
        assert len(output.logprobs) == len(output.token_ids)
        assert output.finish_reason is (STOP if output.stop_string else LENGTH)


# Ranked outputs --------------------------------------------------------------------------------------


async def test_best_of_returns_the_best_by_cumulative_logprob_in_one_delta_each() -> None:
    request = sampled_request(n=2, best_of=4)
    for index, (text, logprob) in enumerate([("aa", -1.0), ("b", -0.5), ("cc", -0.125), ("d", -3.0)]):
        push_text(request, index, text, logprob)
    assert list(request.outputs) == []
    for index in range(4):
        request.finish_output(index, LENGTH)
    assert await take_all(request) == [Delta(0, "cc", [99, 99], []), Delta(1, "b", [98], [])]
    assert [output.cumulative_logprob for output in request.outputs] == [-0.25, -0.5]
    assert [output.output_index for output in request.outputs] == [0, 1]


async def test_a_ranked_output_has_the_same_text_whether_a_stop_string_is_looked_for_or_not() -> None:
    tokens = [*"é🦊 a".encode(), TOKENIZER.id_of(EOS), 0xF0, 0x9F]  # it ends inside a character
    found = []
    for stop in ("", "never"):
        request = sampled_request(n=1, best_of=2, stop=stop)
        for token_id in tokens:
            assert token_id is not None
            request.push(0, token_id, -0.5)
        request.push(1, 65, -50.0)
        for index in (0, 1):
            request.finish_output(index, LENGTH)
        [delta] = await take_all(request)
        found.append(delta.text)
        assert request.response._made[1].text == ("" if not stop else "A")  # nobody gets it
    assert found == ["é🦊 a\ufffd"] * 2


async def test_best_of_streams_nothing_before_the_last_output_has_ended() -> None:
    request = sampled_request(n=1, best_of=2, stop="!")
    waiting = asyncio.ensure_future(request.next_delta())
    push_text(request, 0, "a!", -1.0)
    push_text(request, 1, "b", -2.0)
    await asyncio.sleep(0)
    assert not waiting.done()
    request.finish_output(1, LENGTH)
    assert await waiting == Delta(0, "a", [97, 33], [])
    assert await request.next_delta() is None


async def test_equally_likely_outputs_are_ranked_by_their_index() -> None:
    request = sampled_request(n=2, best_of=3)
    for index in (2, 0, 1):
        push_text(request, index, "abc"[index], -1.0)
        request.finish_output(index, LENGTH)
    assert texts(request) == ["a", "b"]


async def test_a_failed_best_of_hands_out_nothing() -> None:
    request = sampled_request(n=1, best_of=2)
    push_text(request, 0, "a", -1.0)
    request.fail(RequestAbortedError("aborted"))
    with pytest.raises(RequestAbortedError):
        await request.next_delta()


@each_row(False, True)
async def test_hypotheses_come_at_the_end_in_their_order(is_wanted: bool) -> None:
    request = beam_request(logprobs=is_wanted)
    waiting = asyncio.ensure_future(request.next_delta())
    await asyncio.sleep(0)
    request.finish_search([hypothesis_of("é!", -0.25, STOP, eos=True), hypothesis_of("b", -0.75)])

    first, second = request.outputs
    assert await waiting == Delta(0, "é!", first.token_ids, first.logprobs)
    assert await take_all(request) == [Delta(1, "b", [98], second.logprobs)]
    assert (first.output_index, first.beam_score, first.finish_reason) == (0, -0.25, STOP)
    assert first.stop_token_id == TOKENIZER.id_of(EOS)
    assert (first.cumulative_logprob, first.logprobs) == (-2.0, [-0.5] * 4 if is_wanted else [])
    assert (second.output_index, second.beam_score, second.finish_reason) == (1, -0.75, LENGTH)
    assert request.response.ended is not None


def test_an_output_that_is_still_made_has_no_stop_token() -> None:
    output = Output(0, returns_logprobs=False)
    output.append_token(97, None)
    assert output.stop_token_id is None
    assert output.take() == Delta(0, "", [97], [])


async def test_prompt_logprobs_come_before_the_tokens_each_once_and_stay_readable() -> None:
    played = sampled_request(num_prompt_logprobs=2)
    request = played.response
    request.push_prompt([-0.5], Alternatives([7, 8], [-0.1, -0.2]))
    push_text(played, 0, "a")
    request.push_prompt([-1.0], Alternatives([9, 3], [-0.3, -0.4]))

    assert await request.next_delta() == PromptDelta([-0.5, -1.0], Alternatives([7, 8, 9, 3], [-0.1, -0.2, -0.3, -0.4]))
    assert (await next_delta(played) or Delta(0, "", [], [])).text == "a"
    request.push_prompt([-2.0], Alternatives([1, 2], [-0.5, -0.6]))
    assert await request.next_delta() == PromptDelta([-2.0], Alternatives([1, 2], [-0.5, -0.6]))
    assert request.prompt_logprobs == [-0.5, -1.0, -2.0]
