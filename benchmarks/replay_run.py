"""A recorded run with everything that can happen to a request, and its replay in both modes.

    python -m benchmarks.replay_run [--seconds 600] [--streams 32] [--fake] [--log DIR]

Two executors with the demo model (`--fake`: with none), so small that requests preempt each other and swap; streams
that are greedy, sampled by a seed, several for a prompt, beams, with log-probabilities and stop strings. After a third
of the time one executor is killed, and comes back. Then `octavo replay` decides all steps again, and with `--executor`
runs them on a fresh executor. The exit status is 0 if both agree to the last step.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import grpc.aio
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.client import Client
from octavo.errors import OctavoError
from octavo.models.store import find_model
from octavo.sampling_params import SamplingParams
from tests.support.processes import Service, running_service, start_service

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
    directory = find_model("smollm2")
    if directory is None:
        raise SystemExit("the demo model is not prepared: run `octavo model prepare smollm2`, or use --fake")
    return "executor_svc", (*flags, "--model", str(directory), "--max-model-len", "1024")


def request_of(generator: np.random.Generator, number: int) -> tuple[list[int], SamplingParams]:
    """Return a prompt and how to sample, of another kind for each number."""
    prompt = generator.choice(VOCAB, int(generator.integers(8, 160))).tolist()
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
        scheduler_flags = ("--executor", f"{kept.address},{lost.address}", "--log-level", "warning")
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
    begun_s = time.monotonic()
    process = await asyncio.create_subprocess_exec(*command)
    status = await process.wait()
    print(f"exit status {status} after {time.monotonic() - begun_s:.0f} s", flush=True)
    return status


async def until_ready(address: str) -> None:
    """Return once an executor has loaded its model."""
    async with grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        request = health_pb2.HealthCheckRequest(service="readiness")
        while (await health.Check(request)).status != health_pb2.HealthCheckResponse.SERVING:  # noqa: ASYNC110
            await asyncio.sleep(0.2)


async def run(directory: Path, seconds: float, num_streams: int, *, is_fake: bool) -> int:
    """Record, replay, replay on an executor; return 0 if all agrees."""
    done = await record(directory, seconds, num_streams, is_fake=is_fake)
    print(f"{num_streams} streams for {seconds:g} s: {dict(done)}", flush=True)
    print("octavo replay ./step-log", flush=True)
    statuses = [await replay(str(directory))]
    module, flags = executor_command(is_fake=is_fake)
    async with running_service(module, *flags) as executor:
        await until_ready(executor.address)
        print("octavo replay ./step-log --executor ...", flush=True)
        statuses.append(await replay(str(directory), "--executor", executor.address))
    return max(statuses)


def main() -> int:
    """Run and return the exit status."""
    parser = argparse.ArgumentParser(description="Record a run, and replay it in both modes.")
    parser.add_argument("--seconds", type=float, default=600.0, help="of the recorded run (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--fake", action="store_true", help="executors without a model")
    parser.add_argument("--log", type=Path, help="keep the log in this folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = arguments.log or Path(folder, "step-log")
        return asyncio.run(run(directory, arguments.seconds, arguments.streams, is_fake=arguments.fake))


if __name__ == "__main__":
    sys.exit(main())
