"""Standalone fronts, as processes: they join over mutual TLS, wait for a core, and outlive it."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.admin.v1 import admin_pb2, admin_service_pb2, admin_service_pb2_grpc
from octavo.client import Client
from octavo.core.v1 import core_service_pb2, core_service_pb2_grpc
from octavo.errors import InvalidRequestError, UnavailableError
from octavo.values.outputs import Delta, Finished
from octavo_shared.process.config import load_config_or_exit
from scheduler_svc.config.client_side_config import FrontConfig
from scheduler_svc.config.scheduler_config import SchedulerConfig
from tests.support.certificates import Authority, PairFiles, replace
from tests.support.each_row import each_row
from tests.support.patience import PATIENCE_S
from tests.support.processes import Service, running_service, start_service
from tests.tls.test_processes import run

FRONT_NAME = "octavo-front"


@dataclass(frozen=True, slots=True)
class Files:
    """What core and fronts show each other, all signed by one authority."""

    ca: Path
    core: PairFiles
    front: PairFiles

    def of_engine(self) -> list[str]:
        """The flags of a core that takes fronts."""
        flags = ["--tls-cert", f"{self.core.cert}", "--tls-key", f"{self.core.key}"]
        return [*flags, "--front-tls-ca", f"{self.ca}", "--trusted-fronts", FRONT_NAME]

    def of_front(self, shown: PairFiles | None = None) -> list[str]:
        """The flags of a front, which shows its own certificate or another one."""
        shown = shown or self.front
        return [
            "--engine-tls-ca",
            f"{self.ca}",
            "--engine-tls-cert",
            f"{shown.cert}",
            "--engine-tls-key",
            f"{shown.key}",
        ]

    def shown(self, pair: PairFiles) -> grpc.ChannelCredentials:
        """The credentials of a channel that shows a certificate."""
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), pair.key.read_bytes(), pair.cert.read_bytes())


@pytest.fixture
def files(authority: Authority, ca: Path, server_files: PairFiles, tmp_path: Path) -> Files:
    return Files(ca, server_files, authority.issue(common_name=FRONT_NAME).write(tmp_path / "front"))


@asynccontextmanager
async def running_engine(*flags: str) -> AsyncIterator[Service]:
    """Run an executor and a core; fronts join at `other_addresses["fronts"]`."""
    access = () if "--front-tls-ca" in flags else ("--engine-insecure",)
    async with (
        running_service("executor_svc.fake", "--step-ms", "5", "--log-level", "warning") as executor,
        running_service(
            "scheduler_svc", "--executor", executor.address, "--engine-listen", "127.0.0.1:0", *access, *flags
        ) as core,
    ):
        yield core


@asynccontextmanager
async def running_front(core: str, *flags: str) -> AsyncIterator[Service]:
    """Run a standalone front; it need not find its core."""
    async with running_service("scheduler_svc.processes.front_process", "--engine", core, *flags) as front:
        yield front


async def words(front: Service) -> str:
    """Return the next line of a front."""
    assert front.process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        return (await front.process.stdout.readline()).decode().strip()


async def is_ready(address: str) -> bool:
    """Return what the health of a front says, under the name that Kubernetes probes."""
    async with grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        answer = await health.Check(health_pb2.HealthCheckRequest(service="readiness"))
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def openai_health(front: Service) -> int:
    """Return the status of OpenAI's port."""
    url = f"http://{front.other_addresses['openai']}/health"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status


async def num_tokens(address: str, max_tokens: int = 4) -> int:
    async with Client(address) as client:
        await client.wait_until_ready(timeout_s=PATIENCE_S)
        return len((await client.generate([40, 41], max_tokens=max_tokens, temperature=0.0)).outputs[0].token_ids)


async def fronts_of(core: Service, files: Files) -> list[admin_pb2.FrontState]:
    """Return what the core says of its fronts."""
    async with grpc.aio.secure_channel(core.other_addresses["admin"], files.shown(files.front)) as channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        state = await stub.GetSchedulerState(admin_service_pb2.GetSchedulerStateRequest())
    return list(state.fronts)


async def test_two_fronts_serve_over_mutual_tls_and_operators_see_from_where(files: Files) -> None:
    async with AsyncExitStack() as stack:
        core = await stack.enter_async_context(running_engine(*files.of_engine()))
        joined = core.other_addresses["fronts"]
        flags = [["--front-id", name, *files.of_front()] for name in ("a", "b")]
        fronts = [await stack.enter_async_context(running_front(joined, *each)) for each in flags]
        for front in fronts:
            assert await num_tokens(front.address) == 4
            assert await is_ready(front.address)
        seen = await fronts_of(core, files)
        assert [(front.front_id, front.is_ready, front.pid) for front in seen] == [("a", True, 0), ("b", True, 0)]
        assert all(front.address.startswith("127.0.0.1:") for front in seen)
        assert await fronts[0].terminate() == 0
        assert await num_tokens(fronts[1].address) == 4


async def test_who_is_no_front_does_not_join_and_reads_why(
    authority: Authority, other_authority: Authority, files: Files, tmp_path: Path
) -> None:
    executor = authority.issue(common_name="octavo-executor").write(tmp_path / "executor")
    foreign = other_authority.issue(common_name=FRONT_NAME).write(tmp_path / "foreign")
    sentences = {
        "the certificate of an executor": (
            files.of_front(executor),
            "the certificate of octavo-executor is not a trusted front's; add its name to the scheduler's "
            "--trusted-fronts",
        ),
        "a certificate of another authority": (
            files.of_front(foreign),
            "it closed the connection after the TLS handshake; it may have rejected the client certificate "
            f"{foreign.cert}, which must be valid and signed by an authority in its --front-tls-ca",
        ),
        "no certificate": (
            ["--engine-tls-ca", f"{files.ca}"],
            "if it requires a client certificate, name one with --engine-tls-cert and --engine-tls-key",
        ),
        "no TLS": ([], "if it uses TLS, name its certificate authority with --engine-tls-ca"),
    }
    async with AsyncExitStack() as stack:
        core = await stack.enter_async_context(running_engine(*files.of_engine()))
        joined = core.other_addresses["fronts"]
        fronts = [await stack.enter_async_context(running_front(joined, *flags)) for flags, _ in sentences.values()]
        for front, (_, sentence) in zip(fronts, sentences.values(), strict=True):
            line = await words(front)
            assert line.startswith(
                f"octavo front not serving yet: the scheduler at {joined}: the engine does not answer: "
            )
            assert sentence in line
            assert not await is_ready(front.address)
        assert await fronts_of(core, files) == []
        shown = grpc.ssl_channel_credentials(
            files.ca.read_bytes(), executor.key.read_bytes(), executor.cert.read_bytes()
        )
        async with grpc.aio.secure_channel(joined, shown) as channel:
            stub = core_service_pb2_grpc.CoreServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(stub.GetTokenizer(core_service_pb2.GetTokenizerRequest())))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_front_reads_its_renewed_certificate_and_joins(
    authority: Authority, other_authority: Authority, files: Files, tmp_path: Path
) -> None:
    renewed = other_authority.issue(common_name=FRONT_NAME).write(tmp_path / "renewed")
    right = authority.issue(common_name=FRONT_NAME)
    async with (
        running_engine(*files.of_engine()) as core,
        running_front(core.other_addresses["fronts"], *files.of_front(renewed)) as front,
    ):
        assert "may have rejected the client certificate" in await words(front)
        replace(renewed.key, right.key)
        replace(renewed.cert, right.cert)
        assert await num_tokens(front.address) == 4


async def test_the_core_says_which_tenants_are_served_and_whether_priorities_count(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text("[red]\n")
    async with AsyncExitStack() as stack:
        rules = ["--tenants-file", str(tenants), "--policy", "priority"]
        strict = await stack.enter_async_context(running_engine(*rules))
        plain = await stack.enter_async_context(running_engine())
        fronts = [
            await stack.enter_async_context(running_front(core.other_addresses["fronts"])) for core in (strict, plain)
        ]
        async with Client(fronts[0].address) as at_strict, Client(fronts[1].address) as at_plain:
            for client in (at_strict, at_plain):
                await client.wait_until_ready(timeout_s=PATIENCE_S)
            assert (
                len((await at_strict.generate([40], tenant="red", priority=2, max_tokens=3)).outputs[0].token_ids) == 3
            )
            with pytest.raises(InvalidRequestError, match="tenant"):
                await at_strict.generate([40], max_tokens=3, tenant="blue")
            assert len((await at_plain.generate([40], max_tokens=3, tenant="blue")).outputs[0].token_ids) == 3
            with pytest.raises(InvalidRequestError, match="priority"):
                await at_plain.generate([40], max_tokens=3, priority=2)


async def test_versions_that_do_not_meet_are_refused_and_newer_fronts_served(files: Files) -> None:
    async with (
        running_engine(*files.of_engine()) as core,
        grpc.aio.secure_channel(core.other_addresses["fronts"], files.shown(files.front)) as channel,
    ):
        stub = core_service_pb2_grpc.CoreServiceStub(channel)

        def hello(lowest: int, highest: int) -> core_service_pb2.JoinRequest:
            says = core_service_pb2.FrontHello(min_version=lowest, max_version=highest, front_id="raw", session=1)
            return core_service_pb2.JoinRequest(hello=says, credits=9)

        refused, served = stub.Join(), stub.Join()
        await refused.write(hello(2, 3))
        assert await refused.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "supports versions 2 to 3 of octavo.core.v1; this engine supports 1 to 1" in await refused.details()
        await served.write(hello(1, 9))
        message = await served.read()
        assert isinstance(message, core_service_pb2.JoinResponse)
        assert message.welcome.version == 1
        served.cancel()


async def test_a_front_waits_for_its_core_outlives_it_and_finds_the_next_one() -> None:
    async with AsyncExitStack() as stack:
        executor = await stack.enter_async_context(running_service("executor_svc.fake", "--step-ms", "5"))
        flags = ["--executor", executor.address, "--scheduler-id", "one"]
        first = await start_service("scheduler_svc", *flags, "--engine-listen", "127.0.0.1:0", "--engine-insecure")
        joined = first.other_addresses["fronts"]
        await first.kill()  # the address is free, and nobody is there

        lonely = await stack.enter_async_context(running_front(joined))
        ports = ["--health-listen", "127.0.0.1:0", "--openai-listen", "127.0.0.1:0"]
        front = await stack.enter_async_context(running_front(joined, *ports))
        assert "the engine does not answer" in await words(front)
        assert await openai_health(front) == 503
        assert await lonely.terminate() == 0
        assert not await is_ready(front.other_addresses["health"])
        async with Client(front.address) as client:
            with pytest.raises(UnavailableError, match="the engine does not answer"):
                await client.generate([40], max_tokens=3)

            second = await start_service("scheduler_svc", *flags, "--engine-listen", joined, "--engine-insecure")
            await client.wait_until_ready(timeout_s=PATIENCE_S)
            assert await is_ready(front.other_addresses["health"])
            assert await openai_health(front) == 200
            events = client.stream([40, 41], max_tokens=400, temperature=0.0, ignore_eos=True)
            while not isinstance(await anext(events), Delta):
                pass
            await second.kill()
            third = await start_service("scheduler_svc", *flags, "--engine-listen", joined, "--engine-insecure")
            *_, last = [event async for event in events]
            assert isinstance(last, Finished)
            assert len(last.outputs[0].token_ids) == 400
            assert last.num_resumptions == 0, "the front went on, and its client knows nothing"
            assert await num_tokens(front.address) == 4
            assert await third.terminate() == 0
        assert front.process.returncode is None


async def test_a_front_that_is_told_to_end_finishes_its_streams_while_the_other_one_serves(files: Files) -> None:
    async with AsyncExitStack() as stack:
        core = await stack.enter_async_context(running_engine(*files.of_engine()))
        joined = core.other_addresses["fronts"]
        leaving, staying = [await stack.enter_async_context(running_front(joined, *files.of_front())) for _ in range(2)]
        assert await num_tokens(staying.address) == 4
        async with Client(leaving.address) as client:
            await client.wait_until_ready(timeout_s=PATIENCE_S)
            token_ids: list[int] = []
            async for event in client.stream([40, 41], max_tokens=300, temperature=0.0, ignore_eos=True):
                if isinstance(event, Delta):
                    if not token_ids:
                        leaving.process.send_signal(signal.SIGTERM)
                    token_ids += event.token_ids
        assert len(token_ids) == 300
        assert await leaving.process.wait() == 0
        assert await num_tokens(staying.address) == 4


async def test_a_core_that_is_told_to_end_lets_streams_of_fronts_of_their_own_finish() -> None:
    async with running_engine() as core, running_front(core.other_addresses["fronts"]) as front:
        async with Client(front.address) as client:
            await client.wait_until_ready(timeout_s=PATIENCE_S)
            token_ids: list[int] = []
            async for event in client.stream([40, 41], max_tokens=300, temperature=0.0, ignore_eos=True):
                if isinstance(event, Delta):
                    if not token_ids:
                        core.process.send_signal(signal.SIGTERM)
                    token_ids += event.token_ids
            assert len(token_ids) == 300
        assert await core.process.wait() == 0
        assert front.process.returncode is None


WRONG_FLAGS = {
    "scheduler_svc --engine-listen 127.0.0.1:0": (
        "octavo scheduler: --engine-listen 127.0.0.1:0 has no --front-tls-ca, and any process that joins there may "
        "run requests of all tenants: set --tls-cert, --tls-key, --front-tls-ca and --trusted-fronts, or "
        "--engine-insecure where every process that can connect is trusted"
    ),
    "scheduler_svc --trusted-fronts a": (
        "octavo scheduler: --front-tls-ca, --trusted-fronts and --engine-insecure require --engine-listen: without it "
        "no standalone front can join"
    ),
    "scheduler_svc --engine-listen 127.0.0.1:0 --front-tls-ca a": (
        "octavo scheduler: --front-tls-ca and --trusted-fronts must be set together: the authority of the fronts' "
        "certificates and the accepted names; an authority may have signed other certificates too"
    ),
    "scheduler_svc --engine-listen 127.0.0.1:0 --front-tls-ca a --trusted-fronts a": (
        "octavo scheduler: --front-tls-ca requires --tls-cert and --tls-key: without TLS fronts present no certificate"
    ),
    "scheduler_svc.processes.front_process": (
        "octavo front: --engine is required (or OCTAVO_FRONT_ENGINE, or engine in the file)"
    ),
    "scheduler_svc.processes.front_process --engine here": (
        "octavo front: --engine is here; it must be host:port, with a port from 0 to 65535"
    ),
    "scheduler_svc.processes.front_process --engine a:1 --engine-tls-cert a": (
        "octavo front: --engine-tls-cert and --engine-tls-key must be set together: a certificate and its private key"
    ),
    "scheduler_svc.processes.front_process --engine a:1 --engine-tls-server-name a": (
        "octavo front: --engine-tls-cert and --engine-tls-server-name require --engine-tls-ca: without it the front "
        "uses plaintext to the scheduler"
    ),
    "scheduler_svc.processes.front_process --engine a:1 --executor a:1": (
        "octavo front: --executor is not a flag; --help lists all"
    ),
}


@each_row(*WRONG_FLAGS.items())
def test_wrong_flags_are_refused_in_a_sentence(
    command: str, sentence: str, *, capsys: pytest.CaptureFixture[str]
) -> None:
    module, *flags = command.split()
    with pytest.raises(SystemExit, match="2"):
        load_config_or_exit(FrontConfig if module.endswith("front_process") else SchedulerConfig, flags, {})
    assert capsys.readouterr() == ("", sentence + "\n")


async def test_a_front_ends_at_once_where_its_flags_are_wrong() -> None:
    command = "scheduler_svc.processes.front_process --engine here"
    assert await run(*command.split()) == (2, "", WRONG_FLAGS[command] + "\n")


async def test_a_file_that_a_front_cannot_use_ends_its_start(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert await run(
        "scheduler_svc.processes.front_process", "--engine", "127.0.0.1:1", "--engine-tls-ca", str(missing)
    ) == (
        1,
        "",
        f"octavo front: --engine-tls-ca {missing} cannot be read (No such file or directory); give a PEM file that "
        "this process may read\n",
    )
