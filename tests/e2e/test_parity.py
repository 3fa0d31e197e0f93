"""Greedy output through both services is what transformers' `generate` answers, whatever happens on the way.

"The same" means the same ids, or, at the first difference, a tie in the reference: the two best logits
closer than 1e-4. Matrix kernels round differently for different batch shapes; a test that ignores that
fails now and then.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo import Client, SamplingParams
from octavo.admin.v1 import admin_service_pb2, admin_service_pb2_grpc
from octavo.local.services import LocalServices

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

TIE = 1e-4
NUM_OUTPUT_TOKENS = 24
LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 200, 333, 512, 1000, 1500)
QUICK_LENGTHS = (1, 16, 17, 200)
TEXT = Path(__file__).parents[2] / "LICENSE"


@dataclass(frozen=True, slots=True)
class Reference:
    """The demo model in plain transformers, and what it answers to each prompt."""

    model: torch.nn.Module
    prompts: list[list[int]]
    outputs: list[list[int]]

    def assert_same(self, index: int, output: Sequence[int]) -> None:
        """Fail unless `output` is the reference's answer to the prompt, or differs from it by a tie."""
        expected = self.outputs[index]
        for position, (ours, theirs) in enumerate(zip(output, expected, strict=True)):
            if ours != theirs:
                best, second = self.top_two_logits(self.prompts[index] + expected[:position])
                gap = best - second
                assert gap < TIE, f"prompt {index}: token {position} is {ours}, not {theirs}; gap {gap:.2e}"
                return

    def top_two_logits(self, token_ids: list[int]) -> tuple[float, float]:
        with torch.inference_mode():
            logits = self.model(torch.tensor([token_ids])).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        return best, second


@pytest.fixture(scope="module")
def reference(float32_model: Path, request: pytest.FixtureRequest) -> Reference:
    """Answer the prompts of the lengths that the test module's parameter names, each with so many tokens."""
    lengths, num_tokens = request.param
    model = AutoModelForCausalLM.from_pretrained(float32_model, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(float32_model)(TEXT.read_text()).input_ids
    prompts = [ids[37 * i : 37 * i + length] for i, length in enumerate(lengths)]
    outputs = []
    for prompt in prompts:
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
            )
        outputs.append(output[0, len(prompt) :].tolist())
    return Reference(model, prompts, outputs)


@asynccontextmanager
async def running_services(float32_model: Path, *executor_flags: str) -> AsyncIterator[LocalServices]:
    """Run both services as two processes, the executor with these flags."""
    executor = [sys.executable, "-P", "-m", "executor_svc", "--model", str(float32_model), *executor_flags]
    scheduler = [sys.executable, "-P", "-m", "scheduler_svc", "--admin-listen", "127.0.0.1:0"]
    common = ["--listen", "127.0.0.1:0", "--exit-on-stdin-close"]
    async with LocalServices([*executor, *common], [*scheduler, *common]) as running:
        yield running


@asynccontextmanager
async def services(float32_model: Path, *executor_flags: str) -> AsyncIterator[Client]:
    """Run both services; return a client of them."""
    async with running_services(float32_model, *executor_flags) as running, Client(running.address) as client:
        yield client


async def assert_answer(client: Client, reference: Reference, index: int) -> None:
    """Ask a prompt, and fail unless the answer is the reference's."""
    params = SamplingParams(temperature=0.0, max_tokens=len(reference.outputs[index]), ignore_eos=True)
    output = await client.generate(reference.prompts[index], params)
    reference.assert_same(index, output.outputs[0].token_ids)


async def scheduler_state(running: LocalServices) -> admin_service_pb2.GetSchedulerStateResponse:
    async with grpc.aio.insecure_channel(running.admin_address) as channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        return await stub.GetSchedulerState(admin_service_pb2.GetSchedulerStateRequest())


async def assert_all_at_once(client: Client, reference: Reference, num_prompts: int | None = None) -> None:
    """Ask the first `num_prompts` prompts together, by default all."""
    indices = range(len(reference.prompts))[:num_prompts]
    await asyncio.gather(*(assert_answer(client, reference, index) for index in indices))


quick = pytest.mark.parametrize("reference", [(QUICK_LENGTHS, 10)], indirect=True, ids=["quick"])
full = pytest.mark.parametrize(
    "reference", [pytest.param((LENGTHS, NUM_OUTPUT_TOKENS), marks=pytest.mark.slow)], indirect=True, ids=["24 prompts"]
)


@quick
async def test_greedy_output_equals_transformers(float32_model: Path, reference: Reference) -> None:
    async with services(float32_model) as client:
        await assert_answer(client, reference, 3)
        await assert_all_at_once(client, reference)


@full
async def test_one_at_a_time(float32_model: Path, reference: Reference) -> None:
    async with services(float32_model) as client:
        for index in range(len(reference.prompts)):
            await assert_answer(client, reference, index)


@full
async def test_all_at_once(float32_model: Path, reference: Reference) -> None:
    async with services(float32_model) as client:
        await assert_all_at_once(client, reference)


@full
async def test_with_a_pool_so_small_that_sequences_are_preempted(float32_model: Path, reference: Reference) -> None:
    num_blocks = -(-(max(LENGTHS) + NUM_OUTPUT_TOKENS) // 16)
    async with services(float32_model, "--num-device-blocks", str(num_blocks)) as client:
        await assert_all_at_once(client, reference)
    # The short prompts enter together, fill the pool with their first tokens, and grow by a block or two each.
    async with (
        running_services(float32_model, "--num-device-blocks", "20") as running,
        Client(running.address) as client,
    ):
        await assert_all_at_once(client, reference, num_prompts=16)
        state = await scheduler_state(running)
        assert state.num_preemptions > 0
        assert state.num_used_blocks == 0


@full
async def test_with_a_budget_so_small_that_every_prompt_is_chunked(float32_model: Path, reference: Reference) -> None:
    flags = ("--max-num-seqs", "4", "--max-num-batched-tokens", "4")
    async with services(float32_model, *flags) as client:
        for index in range(16):
            await assert_answer(client, reference, index)
    async with services(float32_model, "--max-num-seqs", "24", "--max-num-batched-tokens", "48") as client:
        await assert_all_at_once(client, reference)
