"""Models with an encoder from end to end: the tokens of transformers, alone, in mixed batches and in small pools."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor_svc.sampler.filters import draw
from executor_svc.sampler.sample_rows import uniforms
from octavo.client import Client
from tests.numerics.encoder_decoders import FAMILIES, load
from tests.numerics.real_model import RealModel
from tests.support.stack import running_stack

INPUTS = [[5 + number, *range(3, 8 + 4 * number)] for number in range(4)]
NUM_TOKENS = 24
# The others differ in their logits alone, which `tests/numerics/test_encoder_decoders.py` compares.
QUICK = ("BartForConditionalGeneration", "MarianMTModel", "T5ForConditionalGeneration", "Flan-T5")
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
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
@pytest.mark.parametrize("name", NAMES)
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


# Many tokens end an output, so that beams end at different lengths.
ENDS = [*range(5, 99, 12)]


@pytest.mark.parametrize("width", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("name", NAMES)
async def test_beams_are_those_of_transformers(tmp_path: Path, name: str, width: int) -> None:
    *_, reference = load(tmp_path, name)
    (tmp_path / "generation_config.json").write_text(json.dumps({"decoder_start_token_id": 7}))
    fixed: dict[str, Any] = {
        "num_beams": width,
        "num_return_sequences": width,
        "max_new_tokens": 10,
        "do_sample": False,
    }
    fixed |= {"decoder_start_token_id": 7, "pad_token_id": 1, "use_cache": False}
    fixed |= dict.fromkeys(("forced_eos_token_id", "forced_bos_token_id"))
    ours: dict[str, Any] = {"max_tokens": 10, "beam_width": width, "n": width, "ignore_eos": True}
    ways = [(None, 1.0, False), (ENDS, 0.0, False), (ENDS, 1.0, "never"), (ENDS, 2.0, True), (ENDS, -1.0, False)]
    worker = RealModel(tmp_path, 8, 64, max_num_seqs=16, max_model_len=40).new_worker()
    async with running_stack(worker) as stack, Client(stack.address) as client:
        for token_ids, (ends, length_penalty, early_stopping) in zip([*INPUTS, INPUTS[0]], ways, strict=True):
            score: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": early_stopping}
            found = reference.generate(torch.tensor([token_ids]), eos_token_id=ends, **fixed, **score)
            answer = await client.generate(token_ids, stop_token_ids=ends or [], **ours, **score)
            lengths = [len(output.token_ids) for output in answer.outputs]
            expected = [row[1 : 1 + length] for row, length in zip(found.tolist(), lengths, strict=True)]
            assert [list(output.token_ids) for output in answer.outputs] == expected
            assert all(set(row[1 + length :]) <= {1} for row, length in zip(found.tolist(), lengths, strict=True))


async def test_tokens_that_no_output_has_are_those_of_transformers(tmp_path: Path) -> None:
    *_, reference = load(tmp_path, "MarianMTModel")
    token_ids = INPUTS[2]
    fixed: dict[str, Any] = {"decoder_start_token_id": 7, "pad_token_id": 1, "do_sample": False}
    fixed |= {"max_new_tokens": 10, "eos_token_id": None, "forced_eos_token_id": None, "use_cache": False}
    banned = greedy(reference, token_ids, [7])[:2]
    given = {"decoder_start_token_id": 7, "bad_words_ids": [[token_id] for token_id in banned]}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    worker = RealModel(tmp_path, 8, 64, max_num_seqs=16, max_model_len=40).new_worker()
    async with running_stack(worker) as stack, Client(stack.address) as client:
        for width in (1, 3):
            found = reference.generate(
                torch.tensor([token_ids]), num_beams=width, bad_words_ids=given["bad_words_ids"], **fixed
            )
            beams: dict[str, Any] = {"temperature": 0.0} if width == 1 else {"beam_width": width}
            answer = await client.generate(token_ids, max_tokens=10, ignore_eos=True, **beams)
            assert list(answer.outputs[0].token_ids) == found[0, 1:].tolist()
            assert not {*banned} & {*answer.outputs[0].token_ids}


@pytest.mark.parametrize("name", NAMES)
async def test_draws_are_those_of_the_probabilities_of_transformers(tmp_path: Path, name: str) -> None:
    *_, reference = load(tmp_path, name)
    (tmp_path / "generation_config.json").write_text(json.dumps({"decoder_start_token_id": 7}))
    worker = RealModel(tmp_path, 8, 64, max_num_seqs=16, max_model_len=40).new_worker()
    async with running_stack(worker) as stack, Client(stack.address) as client:
        for token_ids in INPUTS:
            answer = await client.generate(token_ids, max_tokens=NUM_TOKENS, seed=42, n=3, ignore_eos=True)
            for index, output in enumerate(answer.outputs):
                ids = torch.tensor([[7, *output.token_ids[:-1]]])
                logits = reference(input_ids=torch.tensor([token_ids]), decoder_input_ids=ids).logits[0]
                sizes = np.full(NUM_TOKENS, 42, np.uint64), np.full(NUM_TOKENS, index, np.int32)
                expected = draw(logits.detach(), uniforms(*sizes, np.arange(NUM_TOKENS, dtype=np.int32)))
                assert list(output.token_ids) == expected.tolist()
