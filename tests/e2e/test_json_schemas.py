"""Ten schemas on the demo model: whole and valid at any temperature, and the same alone as in a batch."""

from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from tests.support.json_schemas import BOUNDED, SCHEMAS, require_valid

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(540)]

NAMES = (
    *("flat", "nested", "enum of text", "pattern of words", "array of arrays", "tagged union", "references"),
    *("unicode keys", "dates", "tree"),
)

TEMPERATURES = (0.0, 0.7, 1.5)


def params(number: int) -> SamplingParams:
    """Return one of them; each schema has every temperature once."""
    name = NAMES[number % len(NAMES)]
    most = 600 if name in BOUNDED else 60
    temperature = TEMPERATURES[number // len(NAMES)]
    return SamplingParams(json_schema=SCHEMAS[name], temperature=temperature, seed=number, max_tokens=most)


def test_what_ends_by_itself_is_valid_and_an_output_is_the_same_alone(demo_model: Path) -> None:
    numbers = range(len(NAMES) * len(TEMPERATURES))
    prompts = [f"Number {number}, in JSON:" for number in numbers]
    with LLM(demo_model, progress=False, kv_cache_gib=0.25) as llm:
        together = llm.generate(prompts, [params(number) for number in numbers], progress=False)
        alone = [llm.generate(prompts[number], params(number), progress=False)[0] for number in numbers[::7]]
    for number, answer in zip(numbers, together, strict=True):
        name, [output] = NAMES[number % len(NAMES)], answer.outputs
        if output.finish_reason == "stop":
            require_valid(SCHEMAS[name], output.text)
        else:
            assert (output.finish_reason, name in BOUNDED) == ("length", False), (name, output.text)
    assert [answer.outputs[0].token_ids for answer in alone] == [
        answer.outputs[0].token_ids for answer in together[::7]
    ]
