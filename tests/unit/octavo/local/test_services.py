"""Child processes of our own, with small programs in place of the two services."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as FileType

from executor_svc.device.cpus import AvailableCpus
from octavo.errors import LocalServiceError
from octavo.local.child_process import ChildProcess
from octavo.local.options import LocalOptions
from octavo.local.services import LocalServices
from tests.support.each_row import each_row
from tests.support.gguf_files import write_small_gguf
from tests.support.patience import PATIENCE_S
from tests.unit.octavo.programs import program

# Serves nothing; ends, as the services do, when its stdin closes or on SIGTERM.
EXECUTOR = """
    import sys
    print("warming up")
    print("octavo executor serving on 127.0.0.1:4321")
    print("octavo executor loading x\\noctavo executor kernels: torch, 1 thread")
    sys.stdin.read()
"""

# A scheduler that serves at once; it ends when its stdin closes.
SCHEDULER = """
    import sys
    assert sys.argv[-2:] == ["--executor", "127.0.0.1:4321"], sys.argv
    print("octavo scheduler serving admin on 127.0.0.1:4323")
    print("octavo scheduler listening on 127.0.0.1:4322, waiting for an executor at 127.0.0.1:4321")
    print("octavo scheduler serving on 127.0.0.1:4322")
    sys.stdin.read()
"""
NEVER_READY = SCHEDULER.replace('    print("octavo scheduler serving on 127.0.0.1:4322")\n', "")


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
async def services() -> AsyncIterator[LocalServices]:
    async with LocalServices(program(EXECUTOR), program(SCHEDULER)) as both:
        yield both


def child_pids() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


async def test_both_start_serve_and_stop(temporary_folder: Path) -> None:
    statuses: list[str] = []
    services = LocalServices(program(EXECUTOR), program(SCHEDULER), on_status=statuses.append)
    before = child_pids()

    async with services:
        assert len(child_pids() - before) == 2
        assert (services.address, services.admin_address) == ("127.0.0.1:4322", "127.0.0.1:4323")
        assert services.kernels == "torch, 1 thread"

    assert statuses == ["starting the executor", "starting the scheduler", "loading the model"]
    assert child_pids() == before
    assert os.listdir(temporary_folder) == []


@pytest.mark.parametrize("is_verbose", [False, True])
async def test_what_a_service_has_for_people_is_passed_on_while_it_serves(*, is_verbose: bool) -> None:
    notices: asyncio.Queue[str] = asyncio.Queue()
    scheduler = SCHEDULER.replace(
        "    sys.stdin", '    print("octavo scheduler notice: steps are slow")\n    sys.stdin'
    )
    services = LocalServices(program(EXECUTOR), program(scheduler), on_notice=notices.put_nowait, is_verbose=is_verbose)
    async with services, asyncio.timeout(PATIENCE_S):
        assert await notices.get() == "steps are slow"


async def test_several_executors_have_a_log_and_variables_each(temporary_folder: Path) -> None:
    of_any = """
        import os, sys
        port = 4320 + int(os.environ["NUMBER"])
        print(f"octavo executor serving on 127.0.0.1:{port}")
        sys.stdin.read()
    """
    wants_both = SCHEDULER.replace(
        '["--executor", "127.0.0.1:4321"]', '["--executor", "127.0.0.1:4321,127.0.0.1:4322"]'
    )
    environments = [{"NUMBER": "1"}, {"NUMBER": "2"}]
    before = child_pids()
    async with LocalServices(program(of_any), program(wants_both), executor_environments=environments) as services:
        assert list(services.executor_pids) == ["127.0.0.1:4321", "127.0.0.1:4322"]
        assert set(services.executor_pids.values()) < child_pids() - before
        [log_folder] = os.listdir(temporary_folder)
        assert sorted(os.listdir(temporary_folder / log_folder)) == [
            "executor-1.log",
            "executor-2.log",
            "scheduler.log",
        ]
    assert child_pids() == before


async def test_they_are_started_once_the_scheduler_says_that_it_serves(tmp_path: Path) -> None:
    go_on, is_loading = tmp_path / "go on", asyncio.Event()
    hesitant = SCHEDULER.replace(
        '    print("octavo scheduler serving on',
        f"""
    import os, time
    print(end="", flush=True)
    while not os.path.exists({str(go_on)!r}):
        time.sleep(0.01)
    print("octavo scheduler serving on""",
    )
    services = LocalServices(
        program(EXECUTOR),
        program(hesitant),
        on_status=lambda what: is_loading.set() if what == "loading the model" else None,
    )
    start = asyncio.create_task(services.start())
    await is_loading.wait()
    await asyncio.wait([start], timeout=0.1)
    assert not start.done()
    go_on.touch()
    await start
    await services.stop()


async def test_stopping_twice_is_fine(services: LocalServices) -> None:
    await services.stop()
    await services.stop()


async def test_a_service_that_fails_at_the_start_says_why_in_one_sentence(temporary_folder: Path) -> None:
    failing = program("""
        import sys
        print("time=1 level=info event=starting", file=sys.stderr)
        print("octavo executor: /models/x has no config.json", file=sys.stderr)
        sys.exit(1)
    """)
    services = LocalServices(failing, program(SCHEDULER))

    with pytest.raises(LocalServiceError) as caught:
        await services.start()

    [log_folder] = os.listdir(temporary_folder)
    log = temporary_folder / log_folder / "executor.log"
    reason = "the executor stopped (exit status 1): /models/x has no config.json"
    assert str(caught.value) == f"{reason} [log: {log}]"
    assert "event=starting" in log.read_text()


async def test_an_executor_that_fails_while_the_scheduler_waits_ends_the_wait(temporary_folder: Path) -> None:
    loads_in_vain = program("""
        import sys
        print("octavo executor serving on 127.0.0.1:4321")
        sys.exit("octavo executor: model.safetensors is cut short")
    """)
    before = child_pids()

    with pytest.raises(LocalServiceError, match=r"model\.safetensors is cut short"):
        await LocalServices(loads_in_vain, program(NEVER_READY)).start()

    assert child_pids() == before


async def test_a_program_that_cannot_be_run_is_named(temporary_folder: Path) -> None:
    with pytest.raises(LocalServiceError, match=r"the executor cannot be run: .*no-such-program"):
        await LocalServices(["/no-such-program"], program(SCHEDULER)).start()
    assert os.listdir(temporary_folder) == []  # it has no log, and nobody is told of one


async def test_a_start_that_is_given_up_leaves_no_logs(temporary_folder: Path) -> None:
    is_loading = asyncio.Event()
    services = LocalServices(
        program(EXECUTOR),
        program(NEVER_READY),
        on_status=lambda what: is_loading.set() if what == "loading the model" else None,
    )
    start = asyncio.create_task(services.start())
    await is_loading.wait()
    start.cancel()
    await asyncio.wait([start])
    assert start.cancelled()
    assert os.listdir(temporary_folder) == []


async def test_a_service_that_dies_later_leaves_its_log(temporary_folder: Path) -> None:
    async with LocalServices(program(EXECUTOR), program(SCHEDULER)) as services:
        [executor] = services.executor_pids.values()
        os.kill(executor, signal.SIGKILL)
        failure = await services.wait_for_failure()
    [log_folder] = os.listdir(temporary_folder)
    assert f"[log: {temporary_folder / log_folder / 'executor.log'}]" in str(failure)


async def test_work_beside_a_service_that_dies_ends_with_its_cause(services: LocalServices) -> None:
    [executor] = services.executor_pids.values()
    work = asyncio.create_task(services.run_beside(asyncio.Event().wait()))
    os.kill(executor, signal.SIGKILL)
    with pytest.raises(LocalServiceError, match=r"the executor stopped \(signal SIGKILL, possibly out of memory\)"):
        await work


@pytest.mark.parametrize(
    ("last_line", "said"),
    [
        ("time=1 level=INFO logger=executor a step took 5 ms", ""),
        (
            "time=1 level=ERROR logger=executor the cache is lost",
            ": time=1 level=ERROR logger=executor the cache is lost",
        ),
        ("octavo executor: the device is gone", ": the device is gone"),
    ],
)
async def test_only_telling_lines_explain_a_signal(last_line: str, said: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    dies = f"""
        import os, signal, sys
        print({last_line!r}, file=sys.stderr)
        os.kill(os.getpid(), signal.SIGTERM)
    """
    child = ChildProcess("executor", program(dies), log_path=log)
    with pytest.raises(LocalServiceError) as caught:
        await child.start()
    await child.stop(grace_s=1)
    assert str(caught.value) == f"the executor stopped (signal SIGTERM){said} [log: {log}]"


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    stubborn = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("octavo executor serving on 127.0.0.1:4321")
        while True:
            signal.pause()
    """
    before = child_pids()
    child = ChildProcess("executor", program(stubborn), log_path=tmp_path / "log")
    await child.start()
    assert child.address == "127.0.0.1:4321"

    await child.stop(grace_s=0.1)

    assert child_pids() == before


async def test_a_child_that_prints_much_is_not_held_up(tmp_path: Path) -> None:
    chatty = """
        import sys
        print("octavo executor serving on 127.0.0.1:4321")
        print(("x" * 99 + "\\n") * 10_001)
        sys.exit("octavo executor: done")
    """
    child = ChildProcess("executor", program(chatty), log_path=tmp_path / "log")
    await child.start()
    assert "done" in str(await child.wait_for_end())
    await child.stop(grace_s=1)
    assert (tmp_path / "log").stat().st_size > 1_000_000


async def test_nothing_survives_a_killed_parent(tmp_path: Path) -> None:
    parent_source = f"""
        import asyncio
        from octavo.local.services import LocalServices

        async def main():
            async with LocalServices({program(EXECUTOR)!r}, {program(SCHEDULER)!r}) as services:
                pids = open(f"/proc/self/task/{{__import__('os').getpid()}}/children").read()
                print(pids, flush=True)
                await asyncio.Event().wait()

        asyncio.run(main())
    """
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # who is killed leaves its logs
    parent = await asyncio.create_subprocess_exec(
        *program(parent_source), stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in (await parent.stdout.readline()).split()]
    assert len(pids) == 2
    descriptors = [os.pidfd_open(pid) for pid in pids]

    parent.kill()
    await parent.wait()

    for descriptor in descriptors:
        await _readable(descriptor)  # a pidfd is readable once its process has ended
        os.close(descriptor)


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)


def test_a_directory_without_a_tokenizer_is_known(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    assert LocalOptions(tmp_path).lacks_tokenizer
    assert not LocalOptions(tmp_path, {"tokenizer": "elsewhere"}).lacks_tokenizer
    (tmp_path / "tokenizer.json").touch()
    assert not LocalOptions(tmp_path).lacks_tokenizer


def test_settings_become_flags_and_absent_ones_stay_with_the_services() -> None:
    settings = {
        "quantization": "int8",
        "kv_cache_gib": "0.5",
        "host_cache_gib": 0,
        "max_num_seqs": 8,
        "max_waiting_requests": None,
        "tenants_file": "tenants.toml",
        "prefix_caching": False,
        "log_level": "debug",
    }
    options = LocalOptions("models/x", settings, executor={"log_level": "error"}, scheduler={"listen": "127.0.0.1:1"})
    python = ["-P", "-m"]
    assert options.executor_command()[1:] == [
        *(*python, "executor_svc", "--listen", "127.0.0.1:0", "--exit-on-stdin-close", "--quantization", "int8"),
        *("--kv-cache-gib", "0.5", "--host-cache-gib", "0.0", "--max-num-seqs", "8", "--log-level", "error"),
        *("--model", "models/x"),
    ]
    assert options.scheduler_command()[1:] == [
        *(*python, "scheduler_svc", "--listen", "127.0.0.1:1", "--admin-listen", "127.0.0.1:0"),
        *("--exit-on-stdin-close", "--max-num-seqs", "8", "--tenants-file", "tenants.toml"),
        *("--no-prefix-caching", "--log-level", "debug"),
    ]


@each_row("", "./nowhere", "/no/where", "a b", "model.gguf")
def test_what_can_be_no_model_is_refused_before_anything_starts(model: str) -> None:
    with pytest.raises(LocalServiceError):
        LocalOptions(model)


@each_row(
    ({}, 1, 22e9, "needs 0.4 GB, up to 6.4 GB with full KV caches, 22 GB free"),
    ({"kv_cache_gib": 1.0}, 1, 22e9, "needs 1.5 GB, 22 GB free"),
    ({}, 2, 22e9, "needs 0.8 GB, up to 13 GB with full KV caches, 22 GB free"),
    ({}, 3, 2e9, "needs 1.2 GB, up to 2.3 GB with full KV caches, 2.0 GB free"),
    ({}, 3, 1e9, "m.gguf needs 1.2 GB of memory, 0.0 GB of it for weights, and 1.0 GB are free; "),
    ({"device": "cuda"}, 1, 1e9, ""),
)
def test_what_a_model_needs_is_told_or_refused_before_anything_starts(
    settings: dict[str, object], num_executors: int, free: float, told: str, *, tmp_path: Path
) -> None:
    file = write_small_gguf(tmp_path / "m.gguf", FileType.Q8_0)
    options = LocalOptions(file, settings, num_executors=num_executors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("executor_svc.models.memory_needs.available_memory_bytes", lambda: int(free))
        patch.setattr("executor_svc.models.memory_needs.total_memory_bytes", lambda: 24_000_000_000)
        try:
            said = options.prepare_model(progress=False)
        except LocalServiceError as error:
            said = str(error).removeprefix(f"{tmp_path}/")

    assert said == told or (told.endswith("; ") and said.startswith(told))


@each_row((slice(0, 3000), "is truncated, or damaged"), (slice(1, None), "it does not begin with GGUF"))
def test_a_damaged_file_is_refused_before_anything_starts(part: slice, words: str, *, tmp_path: Path) -> None:
    file = write_small_gguf(tmp_path / "m.gguf", FileType.Q8_0)
    file.write_bytes(file.read_bytes()[part])
    with pytest.raises(LocalServiceError, match=rf"m\.gguf.*{words}"):
        LocalOptions(file).prepare_model(progress=False)


@pytest.mark.parametrize(
    ("num_executors", "settings", "num_threads"),
    [
        (1, {}, None),
        (2, {}, 4),
        (3, {}, 2),
        (16, {}, 1),
        (2, {"tp": 2}, 2),
        (2, {"num_threads": 7}, 7),
        (2, {"device": "cuda"}, None),
    ],
)
def test_several_executors_share_the_cores(
    num_executors: int, settings: dict[str, object], num_threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two hardware threads a core: a second one on it gains nothing.
    monkeypatch.setattr("executor_svc.device.cpus.read_cpus", lambda: AvailableCpus(16, num_cores=8, quota=None))
    command = LocalOptions("some/model", settings, num_executors=num_executors).executor_command()
    given = command[command.index("--num-threads") + 1] if "--num-threads" in command else None
    assert given == (None if num_threads is None else str(num_threads))


@pytest.mark.parametrize(
    ("visible", "tp", "expected"),
    [(None, 1, ["0", "1"]), (None, 2, ["0,1", "2,3"]), ("3,5", 1, ["3", "5"]), ("3", 1, ["3", ""])],
)
def test_each_of_several_executors_has_gpus_of_its_own(
    visible: str | None, tp: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    options = LocalOptions("some/model", {"device": "cuda", "tp": tp}, num_executors=2)
    assert [options.executor_environment(index) for index in (0, 1)] == [
        {"CUDA_VISIBLE_DEVICES": gpus} for gpus in expected
    ]
    assert LocalOptions("some/model", {"device": "cuda"}).executor_environment(0) == {}


def test_executors_that_would_share_a_port_are_refused() -> None:
    with pytest.raises(LocalServiceError) as caught:
        LocalOptions("some/model", executor={"metrics_listen": "127.0.0.1:9101"}, num_executors=2)
    assert str(caught.value) == (
        "executor.metrics_listen is 127.0.0.1:9101, but 2 executors cannot share a port; use port 0, so that each "
        "takes a free one"
    )
    LocalOptions("some/model", executor={"metrics_listen": "127.0.0.1:0"}, num_executors=2)


async def test_without_room_for_logs_the_start_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    services = LocalServices(program(EXECUTOR), program(SCHEDULER))
    with pytest.raises(
        LocalServiceError, match=r"^temporary files cannot be written \(Not a directory\); free space, or"
    ):
        await services.start()
