"""The offline API's life: order, limits, errors and ends; on the fake executor, so it is quick."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ClosedError, InvalidRequestError, LocalServiceError
from octavo.local.options import LocalOptions
from octavo.local.prompt_batch import generate_all
from octavo.local.restarts import RestartPolicy
from octavo.local.services import LocalServices

AT_ONCE = RestartPolicy(initial_pause_s=0.0, max_failed_starts=2)
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)

# The same for programs that run in a process of their own.
USE_FAKE_EXECUTOR = """
import sys
from octavo.local.options import LocalOptions

COMMAND = [sys.executable, "-P", "-m", "executor_svc.fake", "--listen", "127.0.0.1:0", "--exit-on-stdin-close"]
LocalOptions.executor_command = lambda self: COMMAND
LocalOptions.prepare_model = lambda self, **_: None

from octavo import LLM, SamplingParams
"""


def fake_executor_command(options: LocalOptions) -> list[str]:
    return [sys.executable, "-P", "-m", "executor_svc.fake", "--listen", "127.0.0.1:0", "--exit-on-stdin-close"]


@pytest.fixture(autouse=True, scope="module")
def fake_executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = str(tmp_path_factory.mktemp("logs"))  # of services that are killed, which stay
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr("tempfile.tempdir", folder)
        monkeypatch.setattr(LocalOptions, "executor_command", fake_executor_command)
        monkeypatch.setattr(LocalOptions, "prepare_model", lambda *_, **__: None)  # there is none
        yield


@pytest.fixture(scope="module")
def llm(fake_executor: None) -> Iterator[LLM]:
    with LLM("fake", progress=False) as llm:
        yield llm


def child_pids(pid: int | None = None) -> set[int]:
    """Children of a process (None: this one), whichever of its threads started them."""
    children: set[int] = set()
    for file in Path(f"/proc/{pid or os.getpid()}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            children.update(map(int, file.read_text().split()))
    return children


def wait_until_gone(pids: set[int]) -> None:
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        # A pidfd is readable once its process has ended.
        asyncio.run(_readable(descriptor))
        os.close(descriptor)


async def _readable(descriptor: int) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    await ended.wait()
    loop.remove_reader(descriptor)


def test_more_prompts_than_may_be_in_flight_are_all_answered_in_order(llm: LLM) -> None:
    prompts = [[index // 256, index % 256] for index in range(300)]
    outputs = llm.generate(prompts, ONE_TOKEN, progress=False)
    assert [output.prompt for output in outputs] == prompts


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=num, ignore_eos=True) for num in (3, 1, 2)]
    outputs = llm.generate(["a", "b", "c"], params, progress=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 1, 2]
    with pytest.raises(InvalidRequestError, match="sampling_params has 3 for 1 prompts"):
        llm.generate("a", params, progress=False)


def test_a_wrong_request_is_refused_and_harms_nobody(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="top_p") as caught:
        llm.generate(["a", "b"], SamplingParams(top_p=2.0), progress=False)
    assert caught.value.field == "sampling_params.top_p"
    assert len(llm.generate(["a", "b"], ONE_TOKEN, progress=False)) == 2


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], progress=False) == []


def test_the_progress_bar_goes_to_stderr_and_counts_all(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], ONE_TOKEN)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "2/2" in captured.err


async def test_it_works_where_an_event_loop_runs_as_in_a_notebook(llm: LLM) -> None:
    [output] = llm.generate("a", ONE_TOKEN, progress=False)
    assert output.usage.num_output_tokens == 1


def test_nothing_is_left_after_close() -> None:
    before = child_pids()
    llm = LLM("fake", progress=False)
    assert len(child_pids() - before) == 2
    llm.close()
    llm.close()
    assert child_pids() == before
    with pytest.raises(ClosedError):
        llm.generate("a")


def test_nothing_is_left_of_a_forgotten_llm() -> None:
    before = child_pids()
    llm = LLM("fake", progress=False)
    del llm
    gc.collect()
    assert child_pids() == before


def answers(llm: LLM) -> list[tuple[int, ...]]:
    """Return the tokens of a short answer and of three long ones."""
    params = [SamplingParams(seed=number, max_tokens=300 if number else 1, ignore_eos=True) for number in range(4)]
    outputs = llm.generate(["a tale", "bees", "cats", "dogs"], params, progress=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("service", ["executor", "scheduler"])
def test_a_service_that_is_killed_is_started_again_and_the_answers_go_on(
    service: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LocalOptions, "executor_command", lambda self: [*fake_executor_command(self), "--step-ms", "2"])
    before = child_pids()
    with LLM("fake") as llm:
        pids = sorted(child_pids() - before)  # in the order of their start
        pid = pids[service == "scheduler"]

        def kill_at_first_end(
            services: LocalServices, requests: Any, max_in_flight: int, on_output: Callable[[Any], None]
        ) -> Coroutine[None, None, Any]:
            def on_end(output: object) -> None:
                if len(ended) == 0:
                    os.kill(pid, signal.SIGKILL)
                ended.append(output)

            ended: list[object] = []
            return generate_all(services, requests, max_in_flight, on_end)

        with monkeypatch.context() as patched:
            patched.setattr("octavo.local.llm.generate_all", kill_at_first_end)
            disturbed = answers(llm)
        assert pid not in child_pids()
        assert disturbed == answers(llm)
    assert [len(token_ids) for token_ids in disturbed] == [1, 300, 300, 300]
    assert child_pids() == before
    told = " ".join(capfd.readouterr().err.split())  # rich breaks lines
    assert f"the {service} stopped (signal SIGKILL, possibly out of memory)" in told
    assert f"the {service} is back after" in told


def test_a_service_that_cannot_start_again_ends_the_wait_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flag = tmp_path / "has-started"
    source = f"""
import pathlib, runpy, sys
if pathlib.Path({str(flag)!r}).exists():
    sys.exit("octavo executor: the device is gone")
pathlib.Path({str(flag)!r}).touch()
sys.argv[0] = "executor_svc.fake"
runpy.run_module("executor_svc.fake", run_name="__main__")
"""
    command = [sys.executable, "-P", "-c", source, "--listen", "127.0.0.1:0", "--exit-on-stdin-close"]
    monkeypatch.setattr(LocalOptions, "executor_command", lambda _: command)
    monkeypatch.setattr("octavo.local.restarts.RestartPolicy", lambda: AT_ONCE)
    before = child_pids()
    with LLM("fake", progress=False) as llm:
        os.kill(min(child_pids() - before), signal.SIGKILL)
        for _ in range(2):  # nobody starts it once more
            with pytest.raises(LocalServiceError, match=r"the device is gone; 2 starts in a row failed \[log: .*\]$"):
                llm.generate("a", progress=False)
    assert child_pids() == before


@pytest.mark.parametrize(("ending", "status"), [("", 0), ("1 / 0", 1)])
def test_nothing_is_left_when_a_program_ends_without_closing(ending: str, status: int) -> None:
    source = (
        f"{USE_FAKE_EXECUTOR}\nllm = LLM('fake', progress=False)\nllm.generate('a', SamplingParams(max_tokens=1))\n"
    )
    show_children = (
        "from pathlib import Path\nfor f in Path('/proc/self/task').glob('*/children'): print(f.read_text())\n"
    )
    program = [sys.executable, "-c", source + show_children + ending]
    ended = subprocess.run(program, capture_output=True, text=True, check=False)
    pids = {int(pid) for pid in ended.stdout.split()}
    assert (ended.returncode, len(pids)) == (status, 2)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_ctrl_c_ends_a_long_generation_and_leaves_nothing() -> None:
    source = f"{USE_FAKE_EXECUTOR}\nllm = LLM('fake', progress=False)\nprint('go', flush=True)\n"
    endless = "llm.generate(['a'] * 64, SamplingParams(max_tokens=100_000, ignore_eos=True))\n"
    command = [sys.executable, "-c", source + endless * 1000]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "go\n"
        children = child_pids(program.pid)
        program.send_signal(signal.SIGINT)
        _, stderr = program.communicate()
    assert len(children) == 2
    assert stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert not any(os.path.exists(f"/proc/{pid}") for pid in children)


def test_nothing_survives_a_killed_program() -> None:
    source = f"{USE_FAKE_EXECUTOR}\nllm = LLM('fake', progress=False)\nprint('go', flush=True)\ninput()\n"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", source], stdin=pipe, stdout=pipe, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "go\n"
        children = child_pids(program.pid)
        program.kill()
    assert len(children) == 2
    wait_until_gone(children)
