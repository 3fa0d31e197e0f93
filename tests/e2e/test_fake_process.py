"""The fake executor, and the real one where it refuses to start, as the processes that people run."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.execution.v1 import execution_service_pb2 as pb
from octavo.execution.v1 import execution_service_pb2_grpc, step_pb2

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 30

Process = subprocess.Popen[str]


def command(module: str, *flags: str) -> list[str]:
    return [sys.executable, "-P", "-W", "error", "-m", module, *flags]


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, **variables}


@contextmanager
def running(*flags: str, program: Sequence[str] = command("executor_svc.fake")) -> Iterator[tuple[Process, str]]:
    """Run the fake executor with its stdin open; yield it and its address; kill it if it still runs."""
    arguments = [*program, "--listen", "127.0.0.1:0", *flags]
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment()) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            match = re.fullmatch(r"octavo executor listening on (127\.0\.0\.1:\d+), waiting for its model\n", line)
            assert match, f"unexpected first line {line!r}"
            yield process, match[1]
        finally:
            process.kill()


def run(arguments: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(**variables),
    )


async def until_ready(channel: grpc.aio.Channel) -> None:
    """Return once health says that the model is loaded."""
    stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"), wait_for_ready=True, timeout=TIMEOUT_S)
    async for answer in watch:
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            break
    watch.cancel()


async def answer_one_step(address: str) -> step_pb2.ExecuteModelResponse:
    async with grpc.aio.insecure_channel(address) as channel:
        await until_ready(channel)
        stub = execution_service_pb2_grpc.ExecutionServiceStub(channel)
        attach = pb.AttachRequest(scheduler_id="a", lease_ms=1000, min_wire_version=1, max_wire_version=1)
        epoch = (await stub.Attach(attach, timeout=TIMEOUT_S)).epoch
        return await stub.ExecuteModel(step_pb2.ExecuteModelRequest(epoch=epoch, step_id=1), timeout=TIMEOUT_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
async def test_a_signal_ends_it_cleanly_and_a_closed_stdin_does_not(number: signal.Signals) -> None:
    with running() as (process, address):
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
        assert (await answer_one_step(address)).step_id == 1
        process.send_signal(number)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert f"event=stopping reason={number.name}" in errors


# The fake executor on a device that dies in step 2.
DYING = """
import sys
from executor_svc.config import FakeConfig
from octavo_shared.errors import DeviceLostError
from executor_svc.fake.worker import FakeWorker
from executor_svc.service.process import run_executor
from octavo_shared.process.config import load_config_or_exit

class DyingWorker(FakeWorker):
    def execute(self, step):
        if step.step_id == 2:
            raise DeviceLostError("step 2 failed: no launch; the device is lost: an illegal memory access")
        return super().execute(step)

sys.exit(run_executor(load_config_or_exit(FakeConfig, sys.argv[1:], {}), DyingWorker))
"""


async def test_a_lost_device_ends_the_process_with_the_reason() -> None:
    with running(program=[sys.executable, "-W", "error", "-c", DYING]) as (process, address):
        async with grpc.aio.insecure_channel(address) as channel:
            await until_ready(channel)
            stub = execution_service_pb2_grpc.ExecutionServiceStub(channel)
            attach = pb.AttachRequest(scheduler_id="a", lease_ms=1000, min_wire_version=1, max_wire_version=1)
            epoch = (await stub.Attach(attach, timeout=TIMEOUT_S)).epoch
            await stub.ExecuteModel(step_pb2.ExecuteModelRequest(epoch=epoch, step_id=1), timeout=TIMEOUT_S)
            with pytest.raises(grpc.aio.AioRpcError, match="the device is lost: an illegal memory access"):
                await stub.ExecuteModel(step_pb2.ExecuteModelRequest(epoch=epoch, step_id=2), timeout=TIMEOUT_S)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == (
        "octavo fake: step 2 failed: no launch; the device is lost: an illegal memory access"
    )


def test_it_ends_with_its_parent_when_stdin_closes() -> None:
    with running("--exit-on-stdin-close") as (process, _):
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert "reason='stdin closed'" in errors


@pytest.mark.slow  # test_ports.py has it of the scheduler
def test_a_taken_address_is_one_line_and_exit_code_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run(command("executor_svc.fake", "--listen", address))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"octavo fake: cannot listen on {address}: it is in use, or not an address of this machine; set --listen to "
        "another one"
    )
    assert "Traceback" not in done.stderr


def test_it_runs_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    for package in ("torch", "transformers", "safetensors"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('the fake executor imported it')")
    done = run(
        command("executor_svc.fake", "--listen", "127.0.0.1:0", "--exit-on-stdin-close"),
        PYTHONPATH=os.pathsep.join(map(str, (tmp_path, REPOSITORY, REPOSITORY / "shared"))),
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_missing_model_directory_ends_the_executor_with_one_sentence(tmp_path: Path) -> None:
    missing = tmp_path / "no-model"
    done = run(command("executor_svc", "--listen", "127.0.0.1:0", "--model", str(missing)))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"octavo executor: the model directory {missing} does not exist"
    assert "Traceback" not in done.stderr


def test_the_executor_without_torch_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch', name='torch')")
    done = run(
        command("executor_svc", "--listen", "127.0.0.1:0", "--model", "x"),
        PYTHONPATH=os.pathsep.join(map(str, (tmp_path, REPOSITORY, REPOSITORY / "shared"))),
    )
    assert done.returncode == 1
    assert (
        done.stderr.splitlines()[-1]
        == "octavo executor: the package torch is missing: pip install '.[executor]' in a clone"
    )
