"""A recorded run of real processes, decided and computed again to the last step.

Two executors, so small that requests preempt each other and swap; streams that are greedy, sampled by a seed, several
for a prompt, beams, with log-probabilities and stop strings, and half of them with prefixes that come back. After a
third of the time one executor is killed, and comes back. Then `octavo replay` decides all steps again, and with
`--executor` runs them on a fresh executor.
"""

import asyncio
import sys
import time
from collections import Counter
from pathlib import Path

import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.client import Client
from octavo.errors import OctavoError
from octavo.models.store import find_model
from octavo.values.sampling_params import SamplingParams
from tests.support.processes import Service, running_service, start_service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

BLOCK_SIZE = 16
SIZES = (
    *("--block-size-tokens", str(BLOCK_SIZE), "--num-device-blocks", "144", "--num-host-blocks", "64"),
    *("--max-num-seqs", "32", "--max-num-batched-tokens", "256"),
)
DOWN_S = 2.0
VOCAB = range(33, 127)  # letters of the fake executor, and ordinary tokens of the demo model


def executor_command(*, is_fake: bool) -> tuple[str, tuple[str, ...]]:
    """Return the module of an executor and its flags."""
    flags = (*SIZES, "--log-level", "warning")
    if is_fake:
        return "executor_svc.fake", (*flags, "--max-model-len", "1024", "--step-ms", "5")
    model = find_model("smollm2")
    assert model is not None, "the fixture demo_model has prepared it"
    return "executor_svc", (*flags, "--model", str(model), "--max-model-len", "1024")


def request_of(generator: np.random.Generator, number: int) -> tuple[list[int], SamplingParams]:
    """Return a prompt and how to sample, of another kind for each number."""
    prompt = generator.choice(VOCAB, int(generator.integers(8, 160))).tolist()
    if generator.random() < 0.5:  # one of some prefixes, which are evicted, copied to the host, and sent
        prompt = np.random.default_rng(int(generator.integers(12))).choice(VOCAB, 128).tolist() + prompt[:32]
    seed, max_tokens = int(generator.integers(2**31)), int(generator.integers(16, 128))
    kinds = (
        SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=seed, logprobs=2),
        SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, n=3, top_p=0.9),
        SamplingParams(max_tokens=min(max_tokens, 40), beam_width=3, n=2),
        SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, stop=["e "], prompt_logprobs=1),
        SamplingParams(max_tokens=max_tokens, temperature=0.0, repetition_penalty=1.2, ignore_eos=True),
    )
    return prompt, kinds[number % len(kinds)]


async def stream(client: Client, number: int, deadline_s: float, done: Counter[str]) -> None:
    """Send one request after the other until the time is over."""
    generator = np.random.default_rng(number)
    while time.monotonic() < deadline_s:
        prompt, params = request_of(generator, number + done.total())
        try:
            await client.generate(prompt, params)
            done["finished"] += 1
        except OctavoError as error:
            done[type(error).__name__] += 1


async def record(directory: Path, seconds: float, num_streams: int, *, is_fake: bool) -> Counter[str]:
    """Run the load with a step log; return what became of the requests."""
    module, flags = executor_command(is_fake=is_fake)
    done: Counter[str] = Counter()
    async with running_service(module, *flags) as kept:
        lost: Service = await start_service(module, *flags)
        scheduler_flags = (
            "--executor",
            f"{kept.address},{lost.address}",
            "--log-level",
            "warning",
            "--speculate",
            "auto",
        )
        async with (
            running_service("scheduler_svc", *scheduler_flags, "--step-log", str(directory)) as scheduler,
            Client(scheduler.address) as client,
        ):
            await client.wait_until_ready()
            begun_s = time.monotonic()
            streams = [
                asyncio.create_task(stream(client, number, begun_s + seconds, done)) for number in range(num_streams)
            ]
            await asyncio.sleep(seconds / 3)
            await lost.kill()
            await asyncio.sleep(DOWN_S)
            lost = await start_service(module, *flags, "--listen", lost.address)
            await asyncio.gather(*streams)
            await scheduler.terminate()
        await lost.kill()
    return done


async def replay(*arguments: str) -> int:
    """Run `octavo replay`; return its exit status."""
    command = [sys.executable, "-P", "-m", "octavo.cli", "replay", *arguments]
    process = await asyncio.create_subprocess_exec(*command)
    return await process.wait()


async def until_ready(address: str) -> None:
    """Return once an executor has loaded its model."""
    async with grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        request = health_pb2.HealthCheckRequest(service="readiness")
        while (await health.Check(request)).status != health_pb2.HealthCheckResponse.SERVING:
            await asyncio.sleep(0.2)


async def run(directory: Path, seconds: float, num_streams: int, *, is_fake: bool) -> int:
    """Record, replay, replay on an executor; return 0 if all agrees."""
    done = await record(directory, seconds, num_streams, is_fake=is_fake)
    assert done["finished"] >= num_streams, done
    statuses = [await replay(str(directory))]
    module, flags = executor_command(is_fake=is_fake)
    async with running_service(module, *flags) as executor:
        await until_ready(executor.address)
        statuses.append(await replay(str(directory), "--executor", executor.address))
    return max(statuses)


@pytest.mark.model
async def test_a_run_of_the_demo_model_is_computed_again_bit_for_bit(demo_model: Path, tmp_path: Path) -> None:
    assert await run(tmp_path / "step-log", seconds=30.0, num_streams=32, is_fake=False) == 0


async def test_a_run_of_fake_executors_is_computed_again_bit_for_bit(tmp_path: Path) -> None:
    assert await run(tmp_path / "step-log", seconds=15.0, num_streams=32, is_fake=True) == 0
