"""Outputs that follow what was asked for, by gRPC and the Python client, and refusals that harm nobody."""

import re

import pydantic
import pytest

from executor_svc.fake.worker import FakeWorker
from octavo import Client, SamplingParams
from octavo.errors import InvalidRequestError
from tests.support.stack import running_stack


class City(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=12)
    people: int = pydantic.Field(ge=0, le=99)


HELD: list[tuple[SamplingParams, str]] = [
    (SamplingParams(json_schema=City, temperature=2.0), ""),
    (SamplingParams(regex=r"[a-z]{3}-\d", n=4), r"[a-z]{3}-\d"),
    (SamplingParams(regex="a{0,9}", ignore_eos=True, min_tokens=9, seed=1), "a{9}"),
    (SamplingParams(choice=["yes", "no"], best_of=3), "yes|no"),
    (SamplingParams(grammar='start: "é" /[01]{2}/', temperature=0), "é[01]{2}"),
]


async def test_the_python_client_gets_what_it_asked_for_and_a_bad_grammar_ends_one_request() -> None:
    async with (
        running_stack(FakeWorker(num_device_blocks=256, max_model_len=512)) as stack,
        Client(stack.address) as client,
    ):
        for params, whole in HELD:
            answer = await client.generate("Name a city.", params)
            for output in answer.outputs:
                assert output.finish_reason == "stop"
                if whole:
                    assert re.fullmatch(whole, output.text), output.text
                else:
                    City.model_validate_json(output.text)
        for params, says in (
            (SamplingParams(regex="(?=a)"), "look-around"),
            (SamplingParams(json_schema={"$ref": "#"}), "no text satisfies it"),
            (
                SamplingParams(json_schema={"properties": {"a": {"uniqueItems": True}}}),
                '"uniqueItems" at #/properties/a',
            ),
            (SamplingParams(grammar="start: a"), "at 1"),
        ):
            with pytest.raises(InvalidRequestError) as caught:
                await client.generate("Name a city.", params)
            assert says in str(caught.value)
            assert (caught.value.field or "").startswith("sampling_params.grammar.")
        await client.generate("Name a city.", SamplingParams(max_tokens=2))
