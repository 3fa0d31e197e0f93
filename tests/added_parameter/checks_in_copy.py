"""What must hold in a copy of the tree that has `epsilon_cutoff`; `test_added_parameter.py` runs this there."""

import asyncio
import os
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

from executor_svc.native.sampling import load_sampling
from executor_svc.sampler.device_sampling import sample_on_device
from executor_svc.sampler.filters import draw, filtered_scores
from executor_svc.sampler.sampler import Sampler
from octavo import Client, SamplingParams
from octavo.cli import main
from octavo_shared.step_wire.sampling_row import SamplingRow
from tests.added_parameter.edits import NAME
from tests.support.sample_rows import Row, sample_rows, sampling_of
from tests.support.stack import Stack, collect, running_stack, token_request

CUTOFFS = (0.0, 0.01, 0.04)
OTHERS: tuple[dict[str, Any], ...] = ({}, {"top_k": 20}, {"top_p": 0.9}, {"typical_p": 0.8}, {"min_p": 0.05})


def cut(value: float) -> dict[str, Any]:
    """Return the parameter as a keyword: no type checker of the tree itself knows it."""
    return {NAME: value}


def cutoff_of_last_request(stack: Stack) -> float:
    """Return what the executor's batch table has, where the last request was."""
    return float(stack.executor.worker.table.sampling[NAME].max())


async def test_a_request_by_grpc_brings_it_to_the_executor() -> None:
    async with running_stack() as stack:
        answer = await collect(stack, token_request(3, 4, **cut(0.25)))

        assert len(answer.token_ids) == 4
        assert cutoff_of_last_request(stack) == 0.25


async def test_the_client_and_the_command_line_bring_it_to_the_executor() -> None:
    async with running_stack() as stack:
        async with Client(stack.address) as client:
            await client.generate([65, 66], SamplingParams(max_tokens=2, **cut(0.5)))
        assert cutoff_of_last_request(stack) == 0.5

        command = ["generate", "Why?", "--address", stack.address, "--max-tokens", "2", "--epsilon-cutoff", "0.75"]
        with pytest.raises(SystemExit) as end:
            await asyncio.to_thread(main, command)
        assert end.value.code == 0
        assert cutoff_of_last_request(stack) == 0.75


async def test_what_is_out_of_range_is_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    async with running_stack() as stack:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stack, token_request(3, 4, **cut(1.5)))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == "sampling_params.epsilon_cutoff is 1.5; it must be from 0 to 1"

        with pytest.raises(SystemExit):
            await asyncio.to_thread(main, ["generate", "Why?", "--address", stack.address, "--epsilon-cutoff", "1.5"])
        assert "--epsilon-cutoff is 1.5; it must be from 0 to 1" in capsys.readouterr().err


@pytest.mark.parametrize("others", OTHERS, ids=str)
def test_torch_c_and_triton_draw_the_same(others: dict[str, Any]) -> None:
    rows = [SamplingRow(temperature=1.0, seed=seed, **cut(value), **others) for value in CUTOFFS for seed in range(4)]
    logits = 2.0 * torch.randn(len(rows), 300, generator=torch.Generator().manual_seed(1))
    index, sampling = np.arange(len(rows), dtype=np.int32), sampling_of(*rows)
    draws = np.random.default_rng(2).random(len(rows))

    in_c = load_sampling(1).choose(logits, index, sampling, draws)
    in_triton = sample_on_device(logits, index, sampling, draws)[0].numpy()
    in_torch = draw(filtered_scores(logits, sampling), draws).numpy()

    assert in_c.tolist() == in_torch.tolist() == in_triton.tolist()


@pytest.mark.parametrize("others", OTHERS, ids=str)
def test_the_shortcut_of_the_torch_form_draws_the_same(others: dict[str, Any]) -> None:
    rows = [Row(SamplingRow(temperature=1.0, seed=seed, **cut(0.05), **others)) for seed in range(8)]
    logits, index = 2.0 * torch.randn(8, 300, generator=torch.Generator().manual_seed(1)), np.arange(8, dtype=np.int32)

    with_c = Sampler(load_sampling(1)).sample(logits, index, sample_rows(*rows))
    with_torch = Sampler().sample(logits, index, sample_rows(*rows))

    assert with_c.token_ids.tolist() == with_torch.token_ids.tolist()


def test_no_unlikely_token_is_drawn() -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(1))
    probs = logits[0].softmax(-1)
    cutoff = float(probs.sort().values[-5])
    draws = np.linspace(0, 1, 1000, endpoint=False)
    sampling = sampling_of(*[SamplingRow(temperature=1.0, **cut(cutoff))] * len(draws))

    token_ids = load_sampling(1).choose(logits, np.zeros(len(draws), np.int32), sampling, draws)

    assert set(token_ids.tolist()) == set(torch.nonzero(probs >= cutoff).flatten().tolist())
