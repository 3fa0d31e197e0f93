"""Each release beside the current code: as executor, as scheduler, and both in the middle of an upgrade."""

import asyncio
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from executor_svc.fake.worker import FakeWorker
from octavo import Client
from octavo.values.outputs import FinishReason
from tests.skew.peers import (
    CURRENT,
    FAKE,
    RELEASES,
    SCHEDULER,
    Code,
    State,
    attached_executors,
    each,
    executor_here,
    running,
    scheduler_state,
    state_when,
)
from tests.skew.requests import (
    NUM_TOKENS,
    REQUESTS,
    STOPPED_BY_STRING,
    Stream,
    prompt_of,
    run_all,
    until_all_stream,
    watch,
)
from tests.support.patience import PATIENCE_S
from tests.support.stack import running_stack

pytestmark = pytest.mark.timeout(120)

# Room for any request by itself, not for two of the larger ones; all of them want about 300 blocks.
TINY_CACHE = (
    *("--block-size-tokens", "4", "--num-device-blocks", "90", "--num-host-blocks", "90"),
    *("--max-num-batched-tokens", "64", "--max-num-seqs", "32"),
)
# Slow enough that every stream is in its middle when an executor ends.
STEP_MS = 10

PRINT_HOMES = """
import importlib, sys
import executor_svc.fake, octavo.client, octavo.execution.v1.step_pb2
for name in sys.argv[1:]:
    importlib.import_module(name)
ours = ("executor_svc", "octavo", "scheduler_svc", "octavo_shared", "shared")
found = (m.__file__ for name, m in sorted(sys.modules.items()) if name.partition(".")[0] in ours)
print(*filter(None, found), sep="\\n")
"""
# Where the scheduler and the wire are, or were.
HOMES = ("scheduler_svc.service", "scheduler_svc.processes.service", "shared.wire", "octavo_shared.step_wire.wire")

GENERATE = """
import asyncio, json, sys
from octavo import Client, SamplingParams
from tests.support.patience import PATIENCE_S
async def run(address, prompt, max_tokens):
    async with Client(address) as client:
        await client.wait_until_ready(30)
        output = await client.generate(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=2))
        print(list(output.outputs[0].token_ids))
asyncio.run(run(sys.argv[1], *json.loads(sys.argv[2])))
"""


@each(RELEASES)
def test_a_process_of_a_release_imports_nothing_of_the_working_tree(release: Code) -> None:
    assert release.archive is not None
    files = zipfile.ZipFile(release.archive).namelist()
    done = subprocess.run(
        [sys.executable, "-P", "-c", PRINT_HOMES, *(name for name in HOMES if f"{name.replace('.', '/')}.py" in files)],
        env=release.environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    homes = done.stdout.splitlines()
    assert len(homes) > 50, done.stderr
    assert [home for home in homes if not Path(home).is_relative_to(release.archive)] == []


@each(RELEASES)
@pytest.mark.parametrize("is_scheduler", [False, True], ids=["executor", "scheduler"])
async def test_requests_of_every_kind_are_the_same_with_the_other_side_from_a_release(
    release: Code, is_scheduler: bool, undisturbed: list[Stream]
) -> None:
    scheduler_code, executor_code = (release, CURRENT) if is_scheduler else (CURRENT, release)
    streams = [Stream() for _ in REQUESTS]
    async with (
        running(executor_code, FAKE, *TINY_CACHE) as executor,
        running(scheduler_code, SCHEDULER, "--executor", executor.address, "--check-batch-table") as scheduler,
        Client(scheduler.address) as client,
    ):
        await client.wait_until_ready(60)
        await run_all(client, streams)
        state = await scheduler_state(scheduler)
        assert await executor.terminate() == 0
    assert state.num_recompute_preemptions > 0
    assert state.num_swap_preemptions > 0
    assert state.num_used_blocks == 0
    assert state.executors[0].num_losses == 0
    assert streams == undisturbed
    assert streams[STOPPED_BY_STRING].outputs[0].finish_reason is FinishReason.STOP
    assert [len(stream.outputs) for stream in streams] == [params.n or 1 for params in REQUESTS]


def have_all_work(state: State) -> bool:
    """Whether every executor runs some request."""
    return min(executor.num_running_requests for executor in state.executors) > 0


@each(RELEASES)
@pytest.mark.parametrize("ending", ["kill", "drain"], ids=["schedulers first", "executors first"])
async def test_requests_move_to_the_current_executor_of_a_mixed_fleet_when_that_of_a_release_ends(
    release: Code, ending: str, undisturbed: list[Stream]
) -> None:
    scheduler_code = CURRENT if ending == "kill" else release
    streams = [Stream() for _ in REQUESTS]
    async with (
        running(release, FAKE, "--step-ms", str(STEP_MS)) as leaving,
        executor_here(FakeWorker(step_ms=STEP_MS)) as staying,
        running(scheduler_code, SCHEDULER, "--executor", f"{leaving.address},{staying.address}") as scheduler,
        Client(scheduler.address) as client,
    ):
        await attached_executors(scheduler, 2)
        everything = asyncio.create_task(run_all(client, streams))
        await state_when(scheduler, have_all_work)
        await until_all_stream(streams, 3, everything.done)
        assert not any(stream.outputs for stream in streams), "a stream ended before the executor did"
        if ending == "kill":
            await leaving.kill()
        else:
            assert await leaving.terminate() == 0
        await everything
        assert [e.num_losses for e in (await attached_executors(scheduler, 1)).values()] == [0]
    assert streams == undisturbed


@each(RELEASES)
@pytest.mark.parametrize("is_current", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["current", "release"])
async def test_schedulers_of_both_releases_hand_one_executor_on_at_once_and_what_it_has_cached(
    release: Code, is_current: bool, undisturbed: list[Stream], tmp_path: Path
) -> None:
    key_file = tmp_path / "prefix.key"
    key_file.write_bytes(bytes(32))
    streams, owners = [Stream(), Stream(), Stream()], []
    async with running(CURRENT if is_current else release, FAKE, "--step-ms", "2") as executor:
        # A lease that outlasts the test: only a scheduler with the same id may have the executor meanwhile.
        flags = ("--executor", executor.address, "--scheduler-id", "one", "--lease-s", "600")
        for code, stream in zip([release, CURRENT, release], streams, strict=True):
            key = ("--prefix-key-file", str(key_file)) if code.keeps_names else ()
            async with running(code, SCHEDULER, *flags, *key) as scheduler, Client(scheduler.address) as client:
                [owner] = (await attached_executors(scheduler, 1)).values()
                owners.append(owner)
                last = asyncio.create_task(watch(client, 0, stream))
                while not stream.num_tokens and not last.done():
                    await asyncio.sleep(0.001)
                exit_code = asyncio.create_task(scheduler.terminate())
                await last
                assert await exit_code == 0
    assert streams == [undisturbed[0]] * 3
    assert [(owner.instance_id, owner.epoch) for owner in owners] == [(owners[0].instance_id, i) for i in (1, 2, 3)]
    assert [stream.num_cached_tokens for stream in streams] == [0, *(16 * release.keeps_names,) * 2]


@each(RELEASES)
async def test_a_client_of_a_release_gets_the_same_from_the_current_scheduler(
    release: Code, undisturbed: list[Stream]
) -> None:
    async with running_stack() as stack:
        command = [sys.executable, "-P", "-c", GENERATE, stack.address, json.dumps([prompt_of(0), NUM_TOKENS])]
        client = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, env=release.environment()
        )
        answer, _ = await client.communicate()
    assert json.loads(answer) == undisturbed[0].token_ids[0]
