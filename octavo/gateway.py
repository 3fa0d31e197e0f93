"""`python -m octavo.gateway`: the SMG gateway, which speaks OpenAI's API, in front of a scheduler.

It runs SMG (`smg launch`, of the extra `octavo[openai]`) in this process, with the settings that suit one
scheduler, and behaves as the two services do: it says where it serves, and leaves when its stdin closes.
"""

import asyncio
import http.client
import importlib.util
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import TextIO

import grpc
import grpc.aio

from octavo.address import exposure_warning, port_trouble
from octavo.client import Client
from octavo.errors import LocalServiceError
from octavo.gateway_flags import gateway_parser, smg_refusal
from octavo.status_details import is_from_service
from octavo.tls import handshake_trouble

DEFAULT_OPENAI_ADDRESS = "127.0.0.1:8080"

# SMG looks for a model's tokenizer at the Hugging Face hub before it asks the scheduler, and what it found there might
# be another one. Nothing listens at this port of this machine, the one for discarding.
_NO_HUB = "http://127.0.0.1:9"

_EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

_POLL_INTERVAL_S = 0.2
_POLL_TIMEOUT_S = 5.0

# A scheduler that runs answers sooner than this.
_SILENT_WAIT_S = 1.0

_GET_MODEL_INFO = "/vllm.grpc.engine.VllmEngine/GetModelInfo"

# What a scheduler answers, or gRPC in its place, that may be there later.
_PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


def check_gateway(listen: str) -> None:
    """Refuse now what would only fail once the model is loaded.

    Raises:
        LocalServiceError: SMG is not installed, or the address cannot be listened on.
    """
    if any(importlib.util.find_spec(package) is None for package in ("smg", "smg_grpc_proto")):
        raise LocalServiceError("the gateway needs the packages smg and smg-grpc-proto: pip install 'octavo[openai]'")
    host, port = _parse_address(listen)
    try:
        _bind(_resolve(host), port).close()
    except (OSError, OverflowError, UnicodeError) as error:  # the last: what cannot be a name of the DNS
        raise LocalServiceError(
            f"the OpenAI API cannot listen on {listen} ({error}): choose another address, --listen HOST:PORT"
        ) from error


def smg_arguments(host: str, port: int, scheduler: str) -> list[str]:
    """Return the arguments of `smg launch` for one scheduler at HOST:PORT; `host` must be an IP address."""
    settings = {
        "host": host,
        "port": port,
        "worker-urls": f"grpc://{scheduler}",
        "policy": "round_robin",
        # New requests wait out the restart of a scheduler: about 15 s of attempts.
        "retry-initial-backoff-ms": 500,
        "retry-max-retries": 8,
        "health-check-interval-secs": 5,
        "health-success-threshold": 1,
        # The scheduler ends first, and with it all streams.
        "shutdown-grace-period-secs": 1,
        # Its metrics have a port of their own, which must be given and would be open to the network.
        "prometheus-host": "127.0.0.1",
        "prometheus-port": _free_port("127.0.0.1"),
        # Nobody may add another scheduler: a key that nobody knows.
        "control-plane-api-keys": f"octavo:octavo:admin:{secrets.token_hex(16)}",
    }
    arguments = [argument for name, value in settings.items() for argument in (f"--{name}", str(value))]
    # With one scheduler there is no other one to turn to; the breaker would refuse what the retries are for.
    return [*arguments, "--disable-circuit-breaker"]


def main() -> int:
    """Run the gateway until SIGTERM; return the exit code."""
    parser = gateway_parser(DEFAULT_OPENAI_ADDRESS)
    options, more_smg_arguments = parser.parse_known_args()
    try:
        check_gateway(options.listen)
        if refusal := smg_refusal(more_smg_arguments):  # now, and not after the wait for the scheduler
            parser.error(refusal)
        if warning := exposure_warning("OpenAI API", "--listen", options.listen):
            print(warning, file=sys.stderr)
        host, port = _parse_address(options.listen)
        ip_address = _resolve(host)
        port = port or _free_port(ip_address)
        if options.exit_on_stdin_close:
            threading.Thread(target=_end_with_stdin, daemon=True).start()
        asyncio.run(wait_for_scheduler(options.scheduler))
        # Stdout is for the one line that a parent waits for; what SMG prints there is log.
        stdout = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        url, shown = f"http://{_join(ip_address, port)}", _join(host, port)
        threading.Thread(target=_announce_when_ready, args=(url, shown, stdout), daemon=True).start()
        _run_smg([*smg_arguments(ip_address, port, options.scheduler), *more_smg_arguments])
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except Exception as error:  # the outermost layer: SMG raises whatever it likes
        print(f"octavo gateway: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def _run_smg(arguments: Sequence[str]) -> None:
    """Run SMG until SIGTERM. It has threads of its own, and leaves Python's alone."""
    os.environ["HF_ENDPOINT"] = _NO_HUB
    from smg.launch_router import launch_router, parse_router_args

    launch_router(parse_router_args(list(arguments)))


async def wait_for_scheduler(address: str) -> None:
    """Return once the scheduler is ready and serves gateways: SMG gives up one that is not ready when it looks.

    Says on stderr what it waits for, if that takes long.

    Raises:
        LocalServiceError: the scheduler at HOST:PORT will never serve this gateway; names the fix.
    """
    sentence = f"octavo gateway: waiting for the scheduler at {address}\n"
    saying = asyncio.get_running_loop().call_later(_SILENT_WAIT_S, sys.stderr.write, sentence)
    try:
        await _wait_until_it_serves(address)
    finally:
        saying.cancel()


async def _wait_until_it_serves(address: str) -> None:
    async with (
        Client(address) as client,
        grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel,
    ):
        # Bytes in and out: the request has no fields, and the answer does not matter.
        get_model_info = channel.unary_unary(_GET_MODEL_INFO, request_serializer=bytes, response_deserializer=bytes)
        while True:
            try:
                await get_model_info(b"", timeout=_POLL_TIMEOUT_S)
                break
            except grpc.aio.AioRpcError as error:
                if refusal := _refusal(error):
                    raise LocalServiceError(f"the scheduler at {address} {refusal}") from error
                if is_from_service(error):  # it is there, and has no model yet
                    await client.wait_until_ready()
            await asyncio.sleep(_POLL_INTERVAL_S)
        await client.wait_until_ready()


def _refusal(error: grpc.aio.AioRpcError) -> str | None:
    """Return what is wrong with the scheduler for good, and the fix; None: it may serve later."""
    details = error.details() or "without a reason"
    match error.code():
        case grpc.StatusCode.UNIMPLEMENTED:
            return "does not serve gateways: start it with --vllm-engine"
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return (
                f"refuses this gateway ({details}), which has no token to send: start it without --tokens-file and "
                "--trusted-clients, on an address of this machine only"
            )
        case grpc.StatusCode.UNAVAILABLE if handshake_trouble(details, None):
            return (
                "closed the connection at once; if it speaks TLS, start it without --tls-cert and --tls-key, on an "
                "address of this machine only: this gateway speaks plaintext with it"
            )
        case code if code in _PASSING:
            return None
        case code:
            return f"answers a gateway with {code.name} ({details}); is it an Octavo scheduler of this release?"


def _end_with_stdin() -> None:
    """Ask this process to end when its parent is gone."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _announce_when_ready(url: str, address: str, stdout: TextIO) -> None:
    """Print the line that a parent waits for, once a client would find the model and its tokenizer."""
    while not is_serving(url):
        time.sleep(_POLL_INTERVAL_S)
    print(f"octavo gateway serving on {address}", file=stdout, flush=True)


def is_serving(url: str) -> bool:
    """Return whether the gateway at http://HOST:PORT has a model and its tokenizer; False whatever else answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy knows the way to this machine
    try:
        with opener.open(f"{url}/v1/models", timeout=_POLL_TIMEOUT_S) as answer:
            models = json.load(answer)["data"]
        if not models:
            return False
        body = json.dumps({"model": models[0]["id"], "prompt": "Hello"}).encode()
        request = urllib.request.Request(f"{url}/v1/tokenize", body, {"Content-Type": "application/json"})
        with opener.open(request, timeout=_POLL_TIMEOUT_S):
            return True
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
        return False  # not listening yet, not registered yet, or something else answers


def _parse_address(address: str) -> tuple[str, int]:
    if trouble := port_trouble(address, least_port=0):
        raise LocalServiceError(f"the OpenAI API cannot listen on {address}: {trouble}")
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _resolve(host: str) -> str:
    """Return the IP address that a name stands for, since SMG takes no names; rather one of IPv4. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    of_ipv4 = [address for family, _, _, _, address in found if family is socket.AF_INET]
    return str((of_ipv4 or [found[0][4]])[0][0])


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was served a moment ago is free
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound


def _free_port(host: str) -> int:
    with _bind(host, 0) as bound:
        port: int = bound.getsockname()[1]
    return port


if __name__ == "__main__":
    sys.exit(main())
