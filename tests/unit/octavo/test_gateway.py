"""The gateway: what is refused before SMG starts, and when it serves."""

import importlib.util
import json
import socket
import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import octavo
from octavo import gateway
from octavo.errors import LocalServiceError
from octavo.gateway import DEFAULT_OPENAI_ADDRESS, check_gateway, is_serving, smg_arguments


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


def test_an_address_that_is_taken_is_refused_with_the_way_out(busy_address: str) -> None:
    with pytest.raises(LocalServiceError) as caught:
        check_gateway(busy_address)
    assert str(caught.value).startswith(f"the OpenAI API cannot listen on {busy_address}")
    assert str(caught.value).endswith("choose another address, --listen HOST:PORT")


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


EXPOSED = (
    "octavo: warning: the {} at {} 0.0.0.0:0 speaks no TLS and does not ask who calls: anybody who reaches it may use "
    "it, and anybody on the way can read along; set {} to an address of this machine only, such as 127.0.0.1"
)


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
        (
            ["--scheduler", "127.0.0.1:1", "--listen", "127.0.0.1:0", "--listn", "x"],
            "unrecognized arguments: --listn x",
        ),
        (
            ["--scheduler", "127.0.0.1:1", "--listen", "127.0.0.1:0", "--max-payload-size", "much"],
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
        check_gateway("127.0.0.1:0")


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
