"""The gateway as a child process: what is refused before anything starts, and the order of start and end."""

import importlib.util
import json
import socket
import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import octavo
from octavo import gateway
from octavo.command_line import run
from octavo.errors import LocalServiceError
from octavo.gateway import DEFAULT_OPENAI_ADDRESS, check_gateway, is_serving, smg_arguments
from octavo.local import LocalServices
from octavo.local_options import LocalOptions
from tests.unit.octavo.programs import program

# Each says in a file when it ends; the scheduler is ready at once.
SERVICE = """
    import signal, sys
    from pathlib import Path

    name, address, order = sys.argv[1:4]

    def end(*_):
        with Path(order).open("a") as file:
            file.write(f"{name} ")
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    if name == "scheduler":
        import grpc
        from concurrent.futures import ThreadPoolExecutor
        from grpc_health.v1 import health, health_pb2, health_pb2_grpc

        servicer = health.HealthServicer()
        servicer.set("readiness", health_pb2.HealthCheckResponse.SERVING)
        server = grpc.server(ThreadPoolExecutor(2))
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
    print("arguments:", *sys.argv[4:])
    print(f"octavo {name} serving on {address}")
    while True:
        signal.pause()
"""


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def busy_address() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def raw_server(answer: bytes) -> Iterator[str]:
    """Answer every HTTP request with the same bytes; yield the URL."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.wfile.write(answer)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def json_answer(value: object) -> bytes:
    return b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(value).encode()


def service(name: str, order: Path) -> list[str]:
    return program(SERVICE, name, "127.0.0.1:4321", str(order))


def logged(folder: Path, name: str) -> list[str]:
    [log] = folder.glob(f"octavo-*/{name}.log")
    return log.read_text(encoding="utf-8").split()


async def test_the_gateway_starts_last_and_the_scheduler_ends_first(tmp_path: Path) -> None:
    order = tmp_path / "order"
    statuses: list[str] = []
    commands = [service(name, order) for name in ("executor", "scheduler", "gateway")]
    async with LocalServices(*commands, on_status=statuses.append) as services:
        assert services.openai_address == "127.0.0.1:4321"
        assert logged(tmp_path, "gateway")[:3] == ["arguments:", "--scheduler", services.address]
    assert statuses[-1] == "starting the gateway"
    assert order.read_text(encoding="utf-8").split() == ["scheduler", "gateway", "executor"]


async def test_without_a_gateway_there_is_no_address(tmp_path: Path) -> None:
    commands = [service(name, tmp_path / "order") for name in ("executor", "scheduler")]
    async with LocalServices(*commands) as services:
        assert services.openai_address is None


def test_only_a_scheduler_with_a_gateway_serves_it() -> None:
    with_gateway, without = LocalOptions(model="model", openai="127.0.0.1:0"), LocalOptions(model="model")
    assert "--vllm-engine" in with_gateway.scheduler_command()
    assert "--vllm-engine" not in without.scheduler_command()
    assert with_gateway.gateway_command() is not None
    assert without.gateway_command() is None


def test_an_address_that_is_taken_is_refused_with_the_way_out(
    busy_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["up", "--model", "some/model", "--listen", "127.0.0.1:0", "--openai", busy_address]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"octavo: the OpenAI API cannot listen on {busy_address}")
    assert said.endswith("choose another address, --openai HOST:PORT\n")


@pytest.mark.parametrize(
    "address", ["8080", ":8080", "127.0.0.1:http", "127.0.0.1:65536", "[::1]:99999", "a..b:80", "[]:80"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(LocalServiceError, match="cannot listen on"):
        check_gateway(address)


def test_a_name_that_has_an_address_passes_and_another_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if name != "here":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        of_ipv6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 0, 0, 0))
        return [of_ipv6, (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    monkeypatch.setattr("socket.getaddrinfo", lookup)
    check_gateway("here:0")
    with pytest.raises(LocalServiceError, match=r"cannot listen on there:0 \(.*Name or service not known"):
        check_gateway("there:0")


def test_the_address_is_checked_before_the_model_is_fetched(
    busy_address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(model: str, **_: object) -> str:
        raise AssertionError(f"{model} is fetched for nothing")

    monkeypatch.setattr("octavo.local_options.resolve_model", fetch)
    assert run(["up", "--listen", "127.0.0.1:0", "--openai", busy_address]) == 1
    assert capsys.readouterr().err.startswith(f"octavo: the OpenAI API cannot listen on {busy_address}")


EXPOSED = (
    "octavo: warning: the {} at {} 0.0.0.0:0 speaks no TLS and does not ask who calls: anybody who reaches it may use "
    "it, and anybody on the way can read along; set {} to an address of this machine only, such as 127.0.0.1"
)


@pytest.mark.parametrize("exposed", [(), ("--openai",), ("--listen", "--admin-listen", "--openai")])
def test_up_warns_of_each_address_that_others_can_reach(
    exposed: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"--listen": "scheduler", "--admin-listen": "scheduler", "--openai": "OpenAI API"}
    flags = [word for flag in names for word in (flag, "0.0.0.0:0" if flag in exposed else "localhost:0")]
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    assert run(["up", "--model", str(tmp_path), *flags]) == 1  # it has no tokenizer: nothing starts
    *warnings, refusal = capsys.readouterr().err.splitlines()
    assert warnings == [EXPOSED.format(names[flag], flag, flag) for flag in exposed]
    assert refusal.endswith("tokenizer.json is missing; OpenAI's API needs it")


@pytest.mark.parametrize("address", ["0.0.0.0:0", "127.0.0.1:0"])
def test_the_gateway_itself_warns_of_an_address_that_others_can_reach(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def wait(scheduler: str) -> None:
        raise LocalServiceError(f"nobody waits for {scheduler}")

    monkeypatch.setattr("octavo.gateway.wait_for_scheduler", wait)
    monkeypatch.setattr(sys, "argv", ["gateway", "--listen", address, "--scheduler", "127.0.0.1:1"])
    assert gateway.main() == 1
    *warnings, end = capsys.readouterr().err.splitlines()
    assert warnings == ([EXPOSED.format("OpenAI API", "--listen", "--listen")] if address == "0.0.0.0:0" else [])
    assert end == "octavo gateway: nobody waits for 127.0.0.1:1"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "the following arguments are required: --scheduler"),
        (["--scheduler", "127.0.0.1:1", "--listn", "x"], "unrecognized arguments: --listn x"),
        (
            ["--scheduler", "127.0.0.1:1", "--max-payload-size", "much"],
            "argument --max-payload-size: invalid int value: 'much'",
        ),
        (["--listen"], "argument --listen: expected one argument"),
    ],
)
def test_a_wrong_flag_of_the_gateway_is_one_line_at_once(
    flags: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gateway", *flags])
    with pytest.raises(SystemExit) as caught:
        gateway.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == f'octavo gateway: {sentence}; see "python -m octavo.gateway --help"\n'


def test_the_gateway_says_its_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gateway", "--version"])
    with pytest.raises(SystemExit, match="0"):
        gateway.main()
    assert capsys.readouterr().out == f"octavo {octavo.__version__}\n"


@pytest.mark.parametrize("package", ["smg", "smg_grpc_proto"])
def test_without_the_packages_it_says_what_to_install(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(LocalServiceError, match=r"pip install 'octavo\[openai\]'"):
        LocalOptions(model="model", openai="127.0.0.1:0").prepare_model()


def test_the_flag_alone_means_this_machine_only() -> None:
    assert DEFAULT_OPENAI_ADDRESS == "127.0.0.1:8080"


def test_smg_understands_its_arguments() -> None:
    from smg.launch_router import parse_router_args

    arguments = parse_router_args(smg_arguments("127.0.0.1", 8080, "127.0.0.1:50051"))
    assert (arguments.host, arguments.port) == ("127.0.0.1", 8080)
    assert arguments.worker_urls == ["grpc://127.0.0.1:50051"]
    assert arguments.prometheus_host == "127.0.0.1"
    assert (arguments.retry_max_retries, arguments.retry_initial_backoff_ms) == (8, 500)
    assert arguments.disable_circuit_breaker


# What the gateway answers until it serves --------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        json_answer({}),
        json_answer([]),
        json_answer("models"),
        json_answer({"data": None}),
        json_answer({"data": []}),
        json_answer({"data": 7}),
        json_answer({"data": {"id": "model"}}),
        json_answer({"data": ["model"]}),
        json_answer({"data": [{"name": "model"}]}),
        b"HTTP/1.0 200 OK\r\n\r\n{",
        b"HTTP/1.0 503 Service Unavailable\r\n\r\n",
        b"SSH-2.0-a-server-of-another-kind\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"",
    ],
)
def test_an_answer_that_nobody_expects_is_no_gateway_yet(answer: bytes) -> None:
    with raw_server(answer) as url:
        assert not is_serving(url)


def test_a_gateway_with_a_model_serves() -> None:
    with raw_server(json_answer({"data": [{"id": "model"}]})) as url:
        assert is_serving(url)
