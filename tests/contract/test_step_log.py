"""A scheduler that records, an executor that is killed: the log is replayed, shown, and run on an executor again."""

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.commands.command_line import run
from octavo.generation.v1 import generation_pb2
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.steplog.v1 import step_log_pb2 as steplog
from octavo_shared.step_wire.cache_group import CacheGroup, CacheKind
from scheduler_svc.step_log import writer
from scheduler_svc.step_log.log_files import FileName, files_in
from tests.support.stack import ExecutorProcess, Stack, running_stack, token_request, until
from tests.support.step_logs import check_replay, rewrite

REQUESTS = [
    token_request(30, 40, request_id="greedy", first_id=1),
    token_request(17, 40, request_id="seeded", first_id=2, temperature=0.8, seed=11, logprobs=1),
    token_request(44, 40, request_id="stopped", first_id=3, temperature=1.0, seed=12, stop=["zz", "q"]),
    token_request(21, 24, request_id="beams", first_id=11, beam_width=3, n=2),
    token_request(12, 40, request_id="several", first_id=13, temperature=1.0, seed=15, n=3, prompt_logprobs=1),
]


def worker(**options: Any) -> FakeWorker:
    """An executor so small that requests preempt each other."""
    sizes: dict[str, Any] = {"num_device_blocks": 24, "num_host_blocks": 20, "block_size_tokens": 8}
    return FakeWorker(**{**sizes, "max_model_len": 128, "max_num_seqs": 16, **options})


async def finish(stack: Stack, request: pb.GenerateRequest) -> None:
    """Run a request to its end."""
    kinds = [event.WhichOneof("event") async for event in stack.generation.Generate(request)]
    assert kinds[-1] == "finished"


@pytest.fixture(scope="module")
def log_of_a_loss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a scheduler with two executors, of which one was killed while it ran requests."""
    directory = tmp_path_factory.mktemp("logs") / "step-log"

    async def record() -> None:
        pair = worker(), worker()
        async with running_stack(*pair, step_log=directory, max_num_batched_tokens=64, loses_soon=True) as stack:
            async with stack.together(len(REQUESTS)):
                answers = asyncio.gather(*(finish(stack, request) for request in REQUESTS))
            first = stack.executors[0]
            await until(lambda: (core := stack.driver_of(first).planner) and core.last_processed_step_id > 5)
            await first.kill()
            await answers

    asyncio.run(record())
    return directory


def test_the_log_of_a_killed_executor_decides_every_step_again(
    log_of_a_loss: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replayed = check_replay(log_of_a_loss)
    assert replayed.counts.num_steps > 30
    assert run(["replay", str(log_of_a_loss)]) == 0
    printed = capsys.readouterr().out
    assert f"{replayed.counts.num_steps} steps\n" in printed
    assert printed.endswith("every step matches the recording, byte for byte\n")


def test_what_was_read_of_a_damaged_log_is_counted(
    log_of_a_loss: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [path] = files_in(log_of_a_loss)
    (tmp_path / path.name).write_bytes(path.read_bytes()[:-5])
    assert run(["replay", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"\nthe \d+ steps that could be read match the recording, byte for byte\n$", printed), printed


def test_its_files_are_the_owners_alone(log_of_a_loss: Path) -> None:
    assert log_of_a_loss.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in log_of_a_loss.iterdir()} == {0o600}


def test_a_step_is_shown_with_blocks_and_decisions(log_of_a_loss: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(log_of_a_loss), "--at", "2:3"]) == 0
    printed = capsys.readouterr().out
    assert re.match(r"step 3 of 127\.0\.0\.1:\d+, attachment 2, epoch 1, ", printed)
    assert "\ndecided: " in printed
    assert "live request" in printed
    assert printed.count("24 blocks of 8 tokens of 127.0.0.1:") == 2
    assert run(["replay", str(log_of_a_loss), "--at", "3"]) == 1
    assert "2 attachments have a step 3; choose one: " in capsys.readouterr().err
    assert run(["replay", str(log_of_a_loss), "--at", "99999"]) == 1
    assert "the log has no step 99999; its largest number is " in capsys.readouterr().err
    assert run(["replay", str(log_of_a_loss), "--at", "99:1"]) == 1
    assert "the log has no attachment 99; it has 1 to 2\n" in capsys.readouterr().err


def test_the_logs_of_several_starts_are_told_apart(
    log_of_a_loss: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in files_in(log_of_a_loss):
        name = FileName.of(path)
        assert name is not None
        shutil.copy(path, tmp_path)
        shutil.copy(path, tmp_path / str(name._replace(begun="20991231T235959Z")))
    for step in ("3", "1:3", "5:3"):
        assert run(["replay", str(tmp_path), "--at", step]) == 1
        assert "the directory has logs of several runs; copy the files" in capsys.readouterr().err
    assert run(["replay", str(tmp_path), "--follow", "greedy"]) == 0
    headings = re.findall(r"^greedy, arrived 20\S+ \S+ UTC, log [0-9a-f]{8}$", capsys.readouterr().out, re.MULTILINE)
    assert len(headings) == 2


def test_a_requests_life_is_told(log_of_a_loss: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lives = []
    for request in REQUESTS:
        assert run(["replay", str(log_of_a_loss), "--follow", request.request_id]) == 0
        lives.append(capsys.readouterr().out)
    assert all("arrived with " in life and "first token" in life for life in lives)
    assert any("the executor was lost" in life for life in lives)
    assert "finished with 40 output tokens: length" in lives[0]
    assert run(["replay", str(log_of_a_loss), "--follow", "nobody"]) == 1
    assert "the log has no request 'nobody'" in capsys.readouterr().err


# On an executor ------------------------------------------------------------------------------------


async def replay_on(directory: Path, **options: Any) -> int:
    """Replay a log on a fake executor of its own; return the exit status."""
    executor = ExecutorProcess(worker(**options))
    await executor.start()
    try:
        return await asyncio.to_thread(run, ["replay", str(directory), "--executor", executor.address])
    finally:
        await executor.kill()


async def test_another_executor_answers_the_same_bits(log_of_a_loss: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = await replay_on(log_of_a_loss)
    printed = capsys.readouterr().out
    assert status == 0, printed
    found = re.findall(r"attachment \d, 127.0.0.1:\d+: (\d+) steps? rerun, [\d,]+ numbers, all bit", printed)
    assert len(found) == 2, printed
    unanswered = re.findall(r"; (\d+) steps? had no recorded result \((?:lost with|the log ends)", printed)
    num_steps = check_replay(log_of_a_loss).counts.num_steps
    assert sum(map(int, found + unanswered)) == num_steps, printed


async def test_the_first_value_that_differs_is_named_bit_for_bit(
    log_of_a_loss: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(log_of_a_loss, changed := tmp_path / "changed")
    was_changed = False

    def change_a_bit(record: steplog.LogRecord) -> None:
        nonlocal was_changed
        result = record.result_taken.result
        if record.WhichOneof("call") == "result_taken" and len(result.logprobs) and not was_changed:
            bits = np.frombuffer(result.logprobs, np.uint32).copy()
            asked = (~np.isnan(bits.view(np.float32))).nonzero()[0]
            bits[asked[0]] ^= 1
            result.logprobs, was_changed = bits.tobytes(), True

    for path in files_in(changed):
        rewrite(path, change_a_bit)
    assert await replay_on(changed) == 1
    printed = capsys.readouterr().out
    assert "byte for byte\n" in printed, "no decision depends on a log-probability"
    named = r"attachment \d, \S+, step \d+: request 'seeded', output 0, token 0: log-probability recorded .+, now "
    assert re.search(named, printed), printed


async def test_steps_of_several_cache_groups_are_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full = CacheGroup(CacheKind.FULL, (0, 2), 8, 24, 20)
    windows = [CacheGroup(CacheKind.WINDOW, (1,), 8, num_blocks, 20, window_tokens=32) for num_blocks in (24, 32)]
    groups, others = ((full, window) for window in windows)
    async with running_stack(worker(cache_groups=groups), step_log=tmp_path, max_num_batched_tokens=64) as stack:
        await asyncio.gather(*(finish(stack, request) for request in REQUESTS))
    assert await replay_on(tmp_path, cache_groups=groups) == 0
    assert " all bit-identical" in capsys.readouterr().out
    assert await replay_on(tmp_path, cache_groups=others) == 1
    sentence = "its cache groups are not those of the log: 24 blocks, 20 of the host, window 0 and 32 blocks, 20 of"
    assert f"cannot be run: {sentence}" in capsys.readouterr().out


async def test_another_model_is_refused(log_of_a_loss: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await replay_on(log_of_a_loss, eos_probability=0.5) == 1
    named = (
        r"attachments 1, 2 cannot be run: the log and the executor have \S+ \S+ with different weights or settings, "
        r"such "
    )
    assert re.search(named + r"as int8: model hash \w{12} in the log, \w{12} here; weights", capsys.readouterr().out)


async def test_another_kind_of_executor_is_named_at_its_attachment(
    log_of_a_loss: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(log_of_a_loss, changed := tmp_path / "changed")

    def of_another_kind(record: steplog.LogRecord) -> None:
        if record.WhichOneof("call") == "core_joined" and record.core_joined.core == 2:
            info = json.loads(record.core_joined.info_json)
            record.core_joined.info_json = json.dumps({**info, "numerics_id": "another"})

    for path in files_in(changed):
        rewrite(path, of_another_kind)
    await replay_on(changed)
    lines = capsys.readouterr().out.splitlines()
    [place] = [index for index, line in enumerate(lines) if "different kind" in line]
    assert lines[place - 1].startswith("attachment 1, ")
    assert re.match(r"attachment 2, \S+: this executor is of .+: numerics_id another in the log, fake-", lines[place])


async def test_an_executor_in_use_is_refused(log_of_a_loss: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with running_stack(worker()) as stack:
        address = stack.executors[0].address
        assert await asyncio.to_thread(run, ["replay", str(log_of_a_loss), "--executor", address]) == 1
    printed = capsys.readouterr().err
    assert re.search(rf"the executor at {address} is in use by scheduler '.+'; give an executor that no", printed)


async def test_a_port_that_closes_connections_is_refused(
    log_of_a_loss: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        assert await asyncio.to_thread(run, ["replay", str(log_of_a_loss), "--executor", address]) == 1
    assert f"{address} closed the connection at once: octavo replay speaks plaintext" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ({"block_size_tokens": 4}, "its blocks have 4 tokens, the log's have 8: start it with"),
        ({"num_device_blocks": 16}, "it has 16 of 24 blocks that the log needs: start it with --num-device-blocks 24"),
        ({"max_num_seqs": 8}, "it has 8 of 16 slots that the log needs: start it with --max-num-seqs 16"),
    ],
)
async def test_an_executor_that_does_not_fit_is_told_what_lacks(
    log_of_a_loss: Path, option: dict[str, float], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await replay_on(log_of_a_loss, **option) == 1
    assert capsys.readouterr().out.count(f"attachments 1, 2 cannot be run: {sentence}") == 1


async def test_a_log_of_grammars_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grammar = generation_pb2.Grammar(json_schema='{"const": 1}')
    async with running_stack(worker(), step_log=tmp_path) as stack:
        await finish(stack, token_request(4, 4, grammar=grammar))
    assert await replay_on(tmp_path) == 1
    sentence = "cannot be run: its requests follow grammars, which octavo replay --executor does not run"
    assert sentence in capsys.readouterr().out


def record_in_small_files(directory: Path) -> None:
    """Record an executor that swaps and preempts all the time, into many small files."""

    async def record() -> None:
        async with running_stack(worker(), step_log=directory, max_num_batched_tokens=64) as stack:
            step_log = stack.engine.step_log
            assert step_log is not None
            step_log._file_bytes = 2000
            await asyncio.gather(*(finish(stack, request) for request in REQUESTS))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "FLUSH_INTERVAL_S", 0.01)  # it is then that a file is found to be full
        asyncio.run(record())


def check_from(files: list[Path], folder: Path) -> None:
    """Replay some files of a log, the first of which begins with a snapshot, on an executor of their own."""
    folder.mkdir()
    for path in files:
        shutil.copy(path, folder)
    num_steps = check_replay(folder).counts.num_steps
    assert not num_steps or asyncio.run(replay_on(folder)) == 0


def test_live_sequences_of_a_snapshot_are_computed_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_in_small_files(tmp_path / "log")
    files = files_in(tmp_path / "log")
    assert len(files) > 2
    for first in sorted({1, len(files) // 2}):
        check_from(files[first:], tmp_path / str(first))
        assert " all bit-identical" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_live_sequences_of_any_snapshot_are_computed_first(number: int, tmp_path: Path) -> None:
    record_in_small_files(tmp_path / "log")
    files = files_in(tmp_path / "log")
    for first in range(1, len(files), 3):
        check_from(files[first:], tmp_path / str(first))
