"""What a client of the scheduler meets that asks for several outputs: n, best_of, beams; and its account."""

from dataclasses import dataclass, field

import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.generation.v1 import generation_pb2
from octavo.generation.v1 import generation_service_pb2 as pb
from tests.support.stack import Stack, collect, running_stack, token_request

NUM_TOKENS = 12


@dataclass(slots=True)
class Streamed:
    """All that one call brought, by output index."""

    deltas: list[pb.OutputDelta] = field(default_factory=list)
    finished: pb.RequestFinished = field(default_factory=pb.RequestFinished)

    @property
    def outputs(self) -> list[generation_pb2.Output]:
        """The outputs of the last event."""
        return list(self.finished.outputs)

    @property
    def token_ids(self) -> list[list[int]]:
        """The tokens of each output."""
        return [list(output.token_ids) for output in self.outputs]


async def stream(stack: Stack, request: pb.GenerateRequest) -> Streamed:
    """Run a request to its end; check that the deltas of each output add up to it."""
    streamed = Streamed()
    async for event in stack.generation.Generate(request):
        if event.HasField("delta"):
            streamed.deltas.append(event.delta)
        elif event.HasField("finished"):
            streamed.finished = event.finished
    assert [output.output_index for output in streamed.outputs] == list(range(len(streamed.outputs)))
    for output in streamed.outputs:
        mine = [delta for delta in streamed.deltas if delta.output_index == output.output_index]
        assert [token_id for delta in mine for token_id in delta.token_ids] == list(output.token_ids)
        assert [logprob for delta in mine for logprob in delta.logprobs] == list(output.logprobs)
        assert "".join(delta.text for delta in mine) == output.text
    return streamed


def sampled(**params: object) -> pb.GenerateRequest:
    return token_request(5, NUM_TOKENS, **{"temperature": 1.0, "seed": 7, **params})  # type: ignore[arg-type]


async def test_n_outputs_differ_and_the_first_is_the_one_that_a_single_request_gets() -> None:
    async with running_stack() as stack:
        single = await stream(stack, sampled())
        several = await stream(stack, sampled(n=4))
        assert several.token_ids[0] == single.token_ids[0]
        assert len({tuple(token_ids) for token_ids in several.token_ids}) == 4
        assert several.finished.usage.num_output_tokens == 4 * NUM_TOKENS
        assert several.finished.usage.num_prompt_tokens == 5


async def test_outputs_end_one_by_one() -> None:
    async with running_stack() as stack:
        full = await stream(stack, sampled(n=3))
        stop_id = full.token_ids[1][4]
        cut = await stream(stack, sampled(n=3, stop_token_ids=[stop_id]))
        for complete, token_ids, output in zip(full.token_ids, cut.token_ids, cut.outputs, strict=True):
            if stop_id in complete:
                assert token_ids == complete[: complete.index(stop_id) + 1]
                assert output.stop_token_id == stop_id
            else:
                assert token_ids == complete
                assert output.finish_reason == generation_pb2.FINISH_REASON_LENGTH


async def test_a_stop_string_ends_one_output_and_not_its_siblings() -> None:
    async with running_stack() as stack:
        full = await stream(stack, sampled(n=3))
        texts = [output.text for output in full.outputs]
        stop = texts[1][3:6]
        cut = await stream(stack, sampled(n=3, stop=[stop]))
        assert [output.text for output in cut.outputs] == [text.partition(stop)[0] for text in texts]
        assert [output.stop_string for output in cut.outputs] == [stop if stop in text else "" for text in texts]
        # A token that was sampled after the stop was seen is neither returned nor billed.
        assert cut.finished.usage.num_output_tokens == sum(len(token_ids) for token_ids in cut.token_ids)


async def test_best_of_returns_the_likeliest_of_the_outputs_that_n_would_return() -> None:
    async with running_stack() as stack:
        every = await stream(stack, sampled(n=5, logprobs=0))
        best = await stream(stack, sampled(n=2, best_of=5))
        ranked = sorted(every.outputs, key=lambda output: output.cumulative_logprob, reverse=True)
        assert best.token_ids == [list(output.token_ids) for output in ranked[:2]]
        assert [output.cumulative_logprob for output in best.outputs] == pytest.approx(
            [output.cumulative_logprob for output in ranked[:2]]
        )
        assert all(not output.logprobs for output in best.outputs)
        assert [delta.output_index for delta in best.deltas] == [0, 1]
        assert best.finished.usage.num_output_tokens == 5 * NUM_TOKENS


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0])
async def test_beams_come_at_the_end_ranked_by_their_score(length_penalty: float) -> None:
    async with running_stack(FakeWorker(eos_probability=0.2)) as stack:
        request = token_request(5, NUM_TOKENS, beam_width=4, n=3, length_penalty=length_penalty, logprobs=0)
        found = await stream(stack, request)
        scores = [output.beam_score for output in found.outputs]
        assert len(scores) == 3
        assert scores == sorted(scores, reverse=True)
        assert [delta.output_index for delta in found.deltas] == [0, 1, 2]
        assert len({tuple(token_ids) for token_ids in found.token_ids}) == 3
        for output in found.outputs:
            assert output.cumulative_logprob == pytest.approx(sum(output.logprobs))
            expected = output.cumulative_logprob / len(output.token_ids) ** length_penalty
            assert output.beam_score == pytest.approx(expected)


async def test_beams_among_sampled_requests_are_the_same() -> None:
    async with running_stack() as stack:
        beams = token_request(5, NUM_TOKENS, beam_width=3, n=3)
        alone = await stream(stack, beams)
        call = stack.generation.Generate(token_request(9, 8000, first_id=3, temperature=1.0))
        await call.read()
        assert (await stream(stack, beams)).token_ids == alone.token_ids
        call.cancel()


async def test_cancelling_a_call_ends_all_its_outputs() -> None:
    async with running_stack(FakeWorker(step_ms=1)) as stack:
        for params in ({"n": 4, "temperature": 1.0}, {"beam_width": 4}):
            call = stack.generation.Generate(token_request(20, 8000, **params))
            await call.read()
            call.cancel()
        while stack.engine.requests:
            await collect(stack, token_request(4, 1, first_id=50))
        answer = await collect(stack, token_request(4, 4))
        assert len(answer.token_ids) == 4


async def test_a_prompt_is_cached_for_its_own_tenant_and_salt_only() -> None:
    async with running_stack() as stack:
        accounts = [("red", ""), ("blue", ""), ("red", "secret"), ("", "")]
        num_cached = []
        for tenant, cache_salt in [*accounts, *accounts]:
            request = token_request(100, 1)
            request.tenant, request.cache_salt = tenant, cache_salt
            num_cached.append((await stream(stack, request)).finished.usage.num_cached_tokens)
        assert num_cached[:4] == [0, 0, 0, 0]
        assert all(0 < num_tokens < 100 for num_tokens in num_cached[4:])
