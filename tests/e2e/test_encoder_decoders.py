"""Models with an encoder from end to end: the tokens of transformers, alone, in mixed batches and in small pools."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.client import Client
from tests.numerics.real_model import RealModel
from tests.numerics.test_encoder_decoders import FAMILIES, load
from tests.support.stack import running_stack

INPUTS = [[5 + number, *range(3, 8 + 4 * number)] for number in range(4)]
NUM_TOKENS = 24
GREEDY: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}


def greedy(reference: Any, token_ids: list[int], start: list[int]) -> list[int]:
    """Return what transformers gives behind an input, without an end."""
    tokens = list(start)
    with torch.inference_mode():
        encoded = reference.get_encoder()(input_ids=torch.tensor([token_ids]))
        for _ in range(NUM_TOKENS):
            logits = reference(encoder_outputs=encoded, decoder_input_ids=torch.tensor([tokens])).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(start) :]


@pytest.mark.parametrize("block_size", [8, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FAMILIES)
async def test_tokens_are_those_of_transformers(tmp_path: Path, name: str, block_size: int) -> None:
    *_, reference = load(tmp_path, name)
    given = {"decoder_start_token_id": 7, **({"forced_bos_token_id": 9} if name.startswith("Bart") else {})}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    start = list(given.values())
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 40}
    worker = RealModel(tmp_path, block_size, {8: 10, 16: 6}[block_size], **sizes).new_worker()
    speculate = "on" if block_size == 8 else "off"
    async with running_stack(worker, speculate=speculate) as stack, Client(stack.address) as client:

        async def tokens_of(token_ids: list[int], **params: Any) -> list[tuple[int, ...]]:
            answer = await client.generate(token_ids, **{**GREEDY, **params})
            return [tuple(output.token_ids) for output in answer.outputs]

        expected = [[tuple(greedy(reference, token_ids, start))] for token_ids in INPUTS]
        assert [await tokens_of(token_ids) for token_ids in INPUTS] == expected
        assert await asyncio.gather(*map(tokens_of, INPUTS)) == expected
        for params in ({"temperature": 1.0, "seed": 3, "n": 3}, {"beam_width": 2, "n": 2}):
            alone = [await tokens_of(token_ids, **params) for token_ids in INPUTS]
            assert await asyncio.gather(*(tokens_of(token_ids, **params) for token_ids in INPUTS)) == alone


@pytest.mark.parametrize("width", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("name", FAMILIES)
async def test_beams_are_those_of_transformers(tmp_path: Path, name: str, width: int) -> None:
    *_, reference = load(tmp_path, name)
    (tmp_path / "generation_config.json").write_text(json.dumps({"decoder_start_token_id": 7}))
    no_ids = dict.fromkeys(("eos_token_id", "forced_eos_token_id", "forced_bos_token_id"))
    beams = {
        "num_beams": width,
        "num_return_sequences": width,
        "max_new_tokens": 10,
        "do_sample": False,
        "use_cache": False,
    }
    worker = RealModel(tmp_path, 8, 64, max_num_seqs=16, max_model_len=40).new_worker()
    async with running_stack(worker) as stack, Client(stack.address) as client:
        for token_ids in INPUTS:
            given = torch.tensor([token_ids])
            found = reference.generate(given, decoder_start_token_id=7, pad_token_id=1, **beams, **no_ids)
            answer = await client.generate(token_ids, max_tokens=10, beam_width=width, n=width, ignore_eos=True)
            assert [list(output.token_ids) for output in answer.outputs] == found[:, 1:].tolist()
