"""A model that runs through transformers' code, and one with a window in every layer, behind both services."""

from pathlib import Path
from typing import Any

import pytest

from octavo import Client, SamplingParams
from tests.numerics.architectures import save_tiny_architecture
from tests.numerics.reference import reference_continuation
from tests.support.processes import running_service
from tests.support.tokenizers import byte_level_backend

pytestmark = pytest.mark.timeout(300)

PROMPTS = [list(range(97, 97 + length)) for length in (3, 40, 100)]
NUM_NEW_TOKENS = 60


def save(directory: Path, architecture: str, settings: dict[str, object]) -> Any:
    """Save a tiny model with a tokenizer of bytes; return transformers' form of it."""
    tokenizer = byte_level_backend()
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 512}
    reference = save_tiny_architecture(directory, architecture, {**sizes, **settings})
    tokenizer.save(str(directory / "tokenizer.json"))
    return reference


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("OlmoForCausalLM", {}),
        pytest.param("MistralForCausalLM", {"sliding_window": 24}, marks=pytest.mark.slow),  # numerics/ has windows
    ],
)
async def test_greedy_answers_are_those_of_transformers(
    architecture: str, settings: dict[str, object], tmp_path: Path
) -> None:
    reference = save(tmp_path, architecture, settings)
    # A pool that holds one and a half of the longest sequences: with a window freed blocks are used again.
    flags = ["--model", str(tmp_path), "--num-device-blocks", "16", "--block-size-tokens", "16"]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    async with (
        running_service("executor_svc", *flags) as executor,
        running_service("scheduler_svc", "--executor", executor.address) as scheduler,
        Client(scheduler.address) as client,
    ):
        await client.wait_until_ready(60)
        outputs = [await client.generate(prompt, params) for prompt in PROMPTS]

    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == reference_continuation(reference, prompt, NUM_NEW_TOKENS)
