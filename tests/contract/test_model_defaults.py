"""What a model's generation_config.json sets counts where a request says nothing; a flag turns that off."""

from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from executor_svc.fake.worker import FakeWorker
from octavo import Client, SamplingParams
from octavo.errors import UnavailableError
from octavo_shared.step_wire.step import SamplingRow
from tests.support.stack import Stack, running_stack, token_request

# Numbers that float32 holds exactly.
DEFAULTS: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.75,
    "top_k": 7,
    "repetition_penalty": 1.25,
    "no_repeat_ngram_size": 3,
}


async def row_of(stack: Stack, **params: Any) -> dict[str, float]:
    """Run a request and return what the executor's table had for it."""
    async with Client(stack.address) as client:
        await client.generate([65, 66], SamplingParams(max_tokens=2, seed=1, **params))
    table = stack.executor.worker.table
    return dict(zip(SamplingRow.__dataclass_fields__, table.sampling[0].item(), strict=True))


async def test_an_unset_field_has_the_models_default_and_a_set_one_has_its_own() -> None:
    async with running_stack(FakeWorker(sampling_defaults=DEFAULTS)) as stack:
        unset = await row_of(stack)
        some = await row_of(stack, temperature=1.0, top_p=1.0, top_k=0)

    assert {name: unset[name] for name in DEFAULTS} == DEFAULTS
    assert (unset["min_p"], unset["typical_p"]) == (0, 1)
    assert (some["temperature"], some["top_p"], some["top_k"], some["repetition_penalty"]) == (1, 1, 0, 1.25)


async def test_beams_have_the_models_penalty_and_are_not_refused_for_its_temperature() -> None:
    async with running_stack(FakeWorker(sampling_defaults=DEFAULTS)) as stack:
        row = await row_of(stack, beam_width=2)

    assert (row["temperature"], row["top_p"], row["top_k"], row["repetition_penalty"]) == (0, 1, 0, 1.25)


async def test_the_flag_turns_them_off() -> None:
    async with running_stack(FakeWorker(sampling_defaults=DEFAULTS), generation_config="none") as stack:
        row = await row_of(stack)
        async with Client(stack.address) as client:
            model = await client.get_model()

    assert (row["temperature"], row["top_p"], row["top_k"], row["repetition_penalty"]) == (1, 1, 0, 1)
    assert model.default_sampling_params == SamplingParams()


@pytest.mark.parametrize("defaults", [(DEFAULTS, None), (None, DEFAULTS)], ids=["first", "second"])
async def test_the_defaults_hold_beside_an_executor_that_does_not_tell_them(defaults: tuple[Any, Any]) -> None:
    workers = [FakeWorker(sampling_defaults=told) for told in defaults]
    async with running_stack(*workers) as stack, Client(stack.address) as client:
        model = await client.get_model()

    assert model.default_sampling_params == SamplingParams(**DEFAULTS)


async def test_a_greedy_model_refuses_equal_outputs_and_says_whose_temperature_it_is() -> None:
    async with running_stack(FakeWorker(sampling_defaults={"temperature": 0})) as stack:
        request = token_request(2, 2, n=2)
        request.sampling_params.ClearField("temperature")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stack.generation.Generate(request):
                pass

    assert caught.value.details() == (
        "sampling_params.n is 2; it must be 1 with temperature 0, this model's default, because greedy outputs are "
        "all equal: use a temperature above 0"
    )


async def test_n_grams_are_banned_where_the_sampler_can_and_refused_by_name_where_none_can() -> None:
    lacking, having = FakeWorker(), FakeWorker()
    lacking.info = replace(lacking.info, bans_ngrams=False)
    async with running_stack(lacking, having) as stack, Client(stack.address) as client:
        for _ in range(4):
            answer = await client.generate([65, 66], max_tokens=40, temperature=0, no_repeat_ngram_size=1)
            token_ids = answer.outputs[0].token_ids
            assert len({65, 66, *token_ids}) == 2 + len(token_ids)
        assert not lacking.table.sampling["no_repeat_ngram_size"].any()
    async with running_stack(lacking) as stack, Client(stack.address) as client:
        with pytest.raises(UnavailableError, match="NO_REPEAT_NGRAM"):
            await client.generate([65, 66], max_tokens=2, no_repeat_ngram_size=1)
