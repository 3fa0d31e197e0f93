"""`octavo.gateway` looks at the scheduler behind it before it serves: which ones it waits for, which it refuses."""

import asyncio
import sys
from pathlib import Path

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from octavo.errors import LocalServiceError
from octavo.gateway import is_serving, wait_for_scheduler
from tests.support.certificates import Authority
from tests.support.patience import PATIENCE_S
from tests.support.processes import running_service
from tests.support.stack import Stack, running_stack, until
from tests.support.vllm_engine import running_gateway_stack

NO_EXECUTOR = ("127.0.0.1:1",)

GATEWAY = "octavo.gateway"


async def refusal(stack: Stack) -> str:
    """Return why the gateway refuses a scheduler, without the address."""
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(LocalServiceError) as refused:
            await wait_for_scheduler(stack.address)
    begin = f"the scheduler at {stack.address} "
    assert str(refused.value).startswith(begin)
    return str(refused.value).removeprefix(begin)


async def said_of_waiting(address: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the first words on stderr of a wait that does not end."""
    waiting = asyncio.create_task(wait_for_scheduler(address))
    said = ""
    async with asyncio.timeout(PATIENCE_S):
        while not said:
            await asyncio.sleep(0)
            assert not waiting.done()
            said = capsys.readouterr().err
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    return said


@pytest.mark.parametrize("executor", [(), NO_EXECUTOR])
async def test_without_the_setting_it_says_which_one(executor: tuple[str, ...]) -> None:
    settings = {"ready": False, "executor": executor} if executor else {}
    async with running_stack(**settings) as stack:  # type: ignore[arg-type]
        assert await refusal(stack) == "does not serve gateways: start it with --vllm-engine"


async def test_a_scheduler_that_wants_tokens_is_refused(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("* 0123456789abcdef0123456789abcdef", encoding="ascii")
    async with running_gateway_stack(tokens_file=tokens) as gateway:
        said = await refusal(gateway.stack)
    assert said.startswith("refuses this gateway (")
    assert "which has no token to send: start it without --tokens-file and --trusted-clients" in said


async def test_a_scheduler_with_tls_is_refused(tmp_path: Path) -> None:
    files = Authority().issue("scheduler").write(tmp_path)
    async with running_gateway_stack(tls_cert=files.cert, tls_key=files.key) as gateway:
        said = await refusal(gateway.stack)
    assert "if it speaks TLS, start it without --tls-cert and --tls-key" in said


async def test_a_scheduler_that_fails_is_refused_with_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise AssertionError("a broken invariant")

    async with running_gateway_stack() as gateway:
        monkeypatch.setattr("scheduler_svc.front.api.vllm_engine.servicer.model_info", fail)
        said = await refusal(gateway.stack)
    assert said.startswith("answers a gateway with INTERNAL (")


async def test_one_that_serves_is_not_talked_about(capsys: pytest.CaptureFixture[str]) -> None:
    async with running_gateway_stack() as gateway, asyncio.timeout(PATIENCE_S):
        await wait_for_scheduler(gateway.stack.address)
    assert "waiting" not in capsys.readouterr().err


async def test_one_that_gets_its_executor_later_is_waited_for() -> None:
    async with running_gateway_stack(ready=False) as gateway, asyncio.timeout(PATIENCE_S):
        await wait_for_scheduler(gateway.stack.address)
        assert not gateway.stack.engine.readiness.why_not


async def test_it_says_what_it_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    async with running_gateway_stack(ready=False, executor=NO_EXECUTOR) as gateway:
        for address in (gateway.stack.address, "127.0.0.1:1"):
            said = await said_of_waiting(address, capsys)
            assert said == f"octavo gateway: waiting for the scheduler at {address}\n"


async def test_one_that_lost_its_executors_is_waited_for_until_one_is_back() -> None:
    async with running_gateway_stack(loses_soon=True) as gateway, asyncio.timeout(PATIENCE_S):
        executor = gateway.stack.executor
        await executor.kill()
        await until(lambda: gateway.stack.engine.readiness.why_not)
        waiting = asyncio.create_task(wait_for_scheduler(gateway.stack.address))
        model = await gateway.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert model.served_model_name, "the model is known, and yet nobody can run it"
        assert not waiting.done()
        await executor.start()
        await waiting
        assert not gateway.stack.engine.readiness.why_not


# The gateway's own process -----------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
async def test_names_and_ipv6_addresses_are_served_and_printed_as_they_were_given(host: str) -> None:
    async with (
        running_gateway_stack() as stack,
        running_service(GATEWAY, "--scheduler", stack.stack.address, "--listen", f"{host}:0") as gateway,
    ):
        assert gateway.address.rpartition(":")[0] == host
        assert await asyncio.to_thread(is_serving, f"http://{gateway.address}")


async def test_a_refusal_is_one_sentence_and_exit_code_1() -> None:
    async with running_stack() as stack:
        flags = ("--listen", "127.0.0.1:0", "--scheduler", stack.address)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", GATEWAY, *flags), stderr=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                _, said = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    sentence = f"the scheduler at {stack.address} does not serve gateways: start it with --vllm-engine"
    assert said.decode() == f"octavo gateway: {sentence}\n"
    assert process.returncode == 1
