"""The page over TLS, and who is let in by certificate and by token: those whom the admin port lets in."""

import asyncio
import json
import ssl
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from octavo.admin.v1 import admin_service_pb2 as pb
from octavo.admin.v1 import admin_service_pb2_grpc
from tests.support.certificates import Authority, PairFiles
from tests.support.patience import PATIENCE_S
from tests.tls.services import Scheduler, running_scheduler, tls_settings

PATH = "/octavo.admin.v1.AdminService"
BLUE, OPERATOR = "blue-token-0123456", "operator-token-012"
REFUSED = (ssl.SSLError, ConnectionError)


@pytest.fixture
def client_files(authority: Authority, tmp_path: Path) -> PairFiles:
    return authority.issue("operator.octavo.svc", common_name="operator").write(tmp_path / "client")


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"blue {BLUE}\n* {OPERATOR}\n")
    return path


def client_context(
    authority: Authority, alpn: list[str] | None, files: PairFiles | None = None, version: ssl.TLSVersion | None = None
) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=authority.pem.decode())
    if alpn is not None:
        context.set_alpn_protocols(alpn)
    if files is not None:
        context.load_cert_chain(files.cert, files.key)
    if version is not None:
        context.maximum_version = version
    return context


async def exchange(scheduler: Scheduler, context: ssl.SSLContext | None, request: bytes) -> tuple[bytes, str | None]:
    """Send a request; return all that comes, and the protocol that TLS has chosen."""
    host, _, port = scheduler.page_address.rpartition(":")
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(
            host, int(port), ssl=context, server_hostname="localhost" if context else None
        )
        try:
            tls = writer.get_extra_info("ssl_object")
            chosen = None if tls is None else tls.selected_alpn_protocol()
            writer.write(request)
            return await reader.read(), chosen
        finally:
            writer.close()


def request_of(path: str, headers: Mapping[str, str] | None = None, host: str = "scheduler.octavo.svc") -> bytes:
    """Return a request that closes the connection: GET for the page, a call with {} for anything else."""
    lines = [f"Host: {host}", "Connection: close", *(f"{name}: {value}" for name, value in (headers or {}).items())]
    if path == "/":
        return "\r\n".join(["GET / HTTP/1.1", *lines, "", ""]).encode()
    lines += ["Content-Type: application/json", "Content-Length: 2"]
    return "\r\n".join([f"POST {PATH}/{path} HTTP/1.1", *lines, "", "{}"]).encode()


async def call(
    scheduler: Scheduler, context: ssl.SSLContext | None, headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, object]]:
    """Call GetSchedulerState with JSON; return the status and the body."""
    answer, _ = await exchange(scheduler, context, request_of("GetSchedulerState", headers))
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


async def call_over_grpc(
    scheduler: Scheduler, authority: Authority, files: PairFiles | None = None, token: str | None = None
) -> grpc.StatusCode:
    credentials = grpc.ssl_channel_credentials(
        authority.pem,
        None if files is None else await asyncio.to_thread(files.key.read_bytes),
        None if files is None else await asyncio.to_thread(files.cert.read_bytes),
    )
    async with grpc.aio.secure_channel(scheduler.admin_address, credentials) as channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        return await stub.GetSchedulerState(pb.GetSchedulerStateRequest(), metadata=metadata, timeout=PATIENCE_S).code()


def signed_by_a_root(authority: Authority) -> bytes:
    """Return the certificate of an authority as one that a root has signed, which nobody else knows."""
    cert, root_key = x509.load_pem_x509_certificate(authority.pem), ec.generate_private_key(ec.SECP256R1())
    builder = (
        x509.CertificateBuilder()
        .subject_name(cert.subject)
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "root")]))
        .public_key(cert.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(cert.not_valid_before_utc)
        .not_valid_after(cert.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    )
    return builder.sign(root_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("alpn", [None, ["http/1.1"], ["h2", "http/1.1"]], ids=str)
async def test_a_browser_gets_the_page_over_tls(
    authority: Authority, server_files: PairFiles, alpn: list[str] | None, version: ssl.TLSVersion
) -> None:
    async with running_scheduler(**tls_settings(server_files)) as scheduler:
        answer, chosen = await exchange(scheduler, client_context(authority, alpn, version=version), request_of("/"))
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert chosen == (None if alpn is None else "http/1.1")


async def test_http_without_tls_is_told_to_use_it_and_gets_nothing_else(server_files: PairFiles) -> None:
    async with running_scheduler(**tls_settings(server_files)) as scheduler:
        for path in ("/", "GetSchedulerState"):
            answer, _ = await exchange(scheduler, None, request_of(path, host="localhost"))
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert answer.endswith(b"\r\n\r\nthis port speaks TLS; open it with https://\n")


async def test_calls_over_tls_have_the_answers_of_grpc(authority: Authority, server_files: PairFiles) -> None:
    async with running_scheduler(**tls_settings(server_files)) as scheduler:
        status, state = await call(scheduler, client_context(authority, ["http/1.1"]))
    assert status == 200
    assert state["executors"]


async def test_without_a_client_certificate_nobody_gets_in(
    authority: Authority,
    server_files: PairFiles,
    ca: Path,
    client_files: PairFiles,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    stranger = Authority("another").issue().write(tmp_path / "stranger")
    async with running_scheduler(**tls_settings(server_files, ca)) as scheduler:
        for files in (None, stranger):
            for path in ("/", "GetSchedulerState"):
                answer = b""
                with suppress(*REFUSED):  # how a client learns of it depends on its timing
                    context = client_context(authority, ["http/1.1"], files)
                    answer, _ = await exchange(scheduler, context, request_of(path))
                assert answer == b""
        failures = [line for line in caplog.messages if "event=http_handshake_failed peer=127.0.0.1 " in line]
        assert len(failures) == 4
        assert all("certificate" in line.lower() for line in failures)
        status, _ = await call(scheduler, client_context(authority, ["http/1.1"], client_files))
        assert status == 200
        assert await call_over_grpc(scheduler, authority, client_files) is grpc.StatusCode.OK
        assert await call_over_grpc(scheduler, authority) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 401, "unauthenticated"),
        ({"Authorization": "Bearer nobody-knows-this-1"}, 401, "unauthenticated"),
        ({"Authorization": OPERATOR}, 401, "unauthenticated"),
        ({"Authorization": "Bearer \xe9"}, 401, "unauthenticated"),
        ({"Authorization": f"Bearer {BLUE}"}, 403, "permission_denied"),
        ({"Authorization": f"Bearer {OPERATOR}"}, 200, None),
        ({"Authorization": f"bearer  {OPERATOR}"}, 200, None),
    ],
)
async def test_calls_need_the_token_of_an_operator_and_the_page_none(
    tokens_file: Path, headers: dict[str, str], status: int, code: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_scheduler(tokens_file=tokens_file) as scheduler:
        found, answer = await call(scheduler, None, headers)
        page, _ = await exchange(scheduler, None, request_of("/"))
    assert (found, answer.get("code")) == (status, code)
    assert page.startswith(b"HTTP/1.1 200 ")
    refusals = [line for line in caplog.messages if "event=http_call_refused" in line]
    assert len(refusals) == (0 if code is None else 1)
    assert all("peer=127.0.0.1 " in line for line in refusals)
    assert not [line for line in caplog.messages if BLUE in line or OPERATOR in line]


async def test_a_challenge_comes_with_the_refusal(tokens_file: Path) -> None:
    async with running_scheduler(tokens_file=tokens_file) as scheduler:
        answer, _ = await exchange(scheduler, None, request_of("GetSchedulerState"))
    assert b"\r\nWWW-Authenticate: Bearer\r\n" in answer


@pytest.mark.parametrize("with_tokens", [False, True])
async def test_a_trusted_certificate_counts_over_http_and_another_does_not(
    authority: Authority,
    server_files: PairFiles,
    ca: Path,
    client_files: PairFiles,
    tokens_file: Path,
    tmp_path: Path,
    with_tokens: bool,
) -> None:
    settings = tls_settings(server_files, ca) | {"trusted_clients": ("operator.octavo.svc",)}
    other = authority.issue("blue.octavo.svc").write(tmp_path / "other")
    async with running_scheduler(**settings, **({"tokens_file": tokens_file} if with_tokens else {})) as scheduler:
        trusted, untrusted = (client_context(authority, ["http/1.1"], files) for files in (client_files, other))
        assert (await call(scheduler, trusted))[0] == 200
        assert await call_over_grpc(scheduler, authority, client_files) is grpc.StatusCode.OK
        for headers in ({}, {"Authorization": f"Bearer {BLUE}"}):
            assert (await call(scheduler, untrusted, headers))[0] in (401, 403)
        assert await call_over_grpc(scheduler, authority, other) is grpc.StatusCode.UNAUTHENTICATED
        with_token = await call(scheduler, untrusted, {"Authorization": f"Bearer {OPERATOR}"})
        assert with_token[0] == (200 if with_tokens else 401)


async def test_an_intermediate_authority_is_enough_for_both_protocols(
    authority: Authority, server_files: PairFiles, tmp_path: Path
) -> None:
    intermediate = Authority("intermediate")
    ca, files = tmp_path / "intermediate.crt", intermediate.issue("operator.octavo.svc").write(tmp_path / "client")
    ca.write_bytes(signed_by_a_root(intermediate))
    async with running_scheduler(**tls_settings(server_files, ca)) as scheduler:
        assert await call_over_grpc(scheduler, authority, files) is grpc.StatusCode.OK
        assert (await call(scheduler, client_context(authority, ["http/1.1"], files)))[0] == 200


async def test_a_renewed_certificate_is_shown_on_both_ports(
    authority: Authority, server_files: PairFiles, ca: Path
) -> None:
    async def serial_number(address: str, alpn: list[str]) -> int:
        host, _, port = address.rpartition(":")
        _, writer = await asyncio.open_connection(
            host, int(port), ssl=client_context(authority, alpn), server_hostname="localhost"
        )
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return x509.load_der_x509_certificate(der).serial_number

    async with running_scheduler(**tls_settings(server_files)) as scheduler:
        ports = [(scheduler.admin_address, ["h2"]), (scheduler.page_address, ["http/1.1"])]
        before = {await serial_number(address, alpn) for address, alpn in ports}
        authority.issue("localhost").write(server_files.cert.parent)
        after = {await serial_number(address, alpn) for address, alpn in ports}
    assert len(before) == len(after) == 1
    assert before != after


async def test_the_end_does_not_wait_for_the_goodbye_of_tls(authority: Authority, server_files: PairFiles) -> None:
    loop = asyncio.get_running_loop()
    async with running_scheduler(**tls_settings(server_files)) as scheduler:
        host, _, port = scheduler.page_address.rpartition(":")
        _, in_handshake = await asyncio.open_connection(host, int(port))
        in_handshake.write(b"\x16\x03\x01")
        idle, idle_writer = await asyncio.open_connection(
            host, int(port), ssl=client_context(authority, ["http/1.1"]), server_hostname="localhost", limit=2**20
        )
        idle_writer.write(request_of("/").replace(b"close", b"keep-alive"))
        await idle.readuntil(b"</html>")
        begin_s = loop.time()
    assert loop.time() - begin_s < 10
    for writer in (in_handshake, idle_writer):
        writer.transport.abort()
