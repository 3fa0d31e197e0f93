"""Real processes: both hops with TLS, the exit codes, the warnings, the command line."""

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from octavo.calls.tls import TlsOptions
from octavo.client import Client
from octavo.errors import LocalServiceError
from octavo.local.child_process import ChildProcess
from tests.support.certificates import Authority, PairFiles
from tests.support.patience import PATIENCE_S
from tests.support.processes import running_service

TOKEN = "a-token-of-blue-00"


async def run(*command: str, variables: Mapping[str, str] | None = None) -> tuple[int | None, str, str]:
    """Run a program of ours to its end; return exit code, stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", *command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **(variables or {})},
    )
    stdout, stderr = await process.communicate()
    return process.returncode, stdout.decode(), stderr.decode()


async def test_both_hops_speak_tls_and_the_command_line_too(
    authority: Authority, server_files: PairFiles, client_files: PairFiles, ca: Path, tmp_path: Path
) -> None:
    executor_files = authority.issue("executor.octavo.svc").write(tmp_path / "executor")
    (tmp_path / "tokens").write_text(f"blue {TOKEN}\n")
    demanding = ["--tls-client-ca", f"{ca}"]
    to_executor = ["--executor-tls-ca", f"{ca}", "--executor-tls-server-name", "executor.octavo.svc"]
    to_executor += ["--executor-tls-cert", f"{client_files.cert}", "--executor-tls-key", f"{client_files.key}"]
    served = ["--tls-cert", f"{server_files.cert}", "--tls-key", f"{server_files.key}"]
    served += ["--tokens-file", f"{tmp_path / 'tokens'}"]
    executor_tls = ["--tls-cert", f"{executor_files.cert}", "--tls-key", f"{executor_files.key}"]
    async with (
        running_service("executor_svc.fake", *executor_tls, *demanding) as executor,
        running_service("scheduler_svc", "--executor", executor.address, *to_executor, *served) as scheduler,
        Client(scheduler.address, tls=TlsOptions(ca=ca), token=TOKEN) as client,
    ):
        await client.wait_until_ready(PATIENCE_S)
        generate = ["octavo.cli", "generate", "hello", "--raw", "--max-tokens", "3", "--temperature", "0"]
        generate += ["--address", scheduler.address]
        trusting = {"OCTAVO_TLS_CA": f"{ca}"}
        answered, refused, plain = await asyncio.gather(
            run(*generate, variables={**trusting, "OCTAVO_TOKEN": TOKEN}),
            run(*generate, variables=trusting),
            run(*generate),
        )
    assert (answered[0], answered[2]) == (0, "octavo: stopped at 3 tokens; --max-tokens N allows more\n")
    assert answered[1].strip()
    assert refused == (
        1,
        "",
        "octavo: a bearer token is required; send the metadata authorization: Bearer TOKEN (octavo: --token-file, or "
        "OCTAVO_TOKEN)\n",
    )
    assert plain[:2] == (1, "")
    assert plain[2].splitlines()[-1] == (
        f"octavo: no connection to the scheduler at {scheduler.address}: it closed the connection at once; if it uses "
        "TLS, name its certificate authority with --tls-ca"
    )


@pytest.mark.parametrize("module", ["scheduler_svc", "executor_svc.fake"])
async def test_a_bad_file_ends_the_start_with_one_sentence(module: str, server_files: PairFiles) -> None:
    name = {"scheduler_svc": "scheduler", "executor_svc.fake": "fake"}[module]
    server_files.key.write_bytes(b"nothing")
    server_files.key.chmod(0o600)
    files = ["--tls-cert", f"{server_files.cert}", "--tls-key", f"{server_files.key}"]

    wrong_file, half = await asyncio.gather(
        run(module, "--listen", "127.0.0.1:0", *files), run(module, "--listen", "127.0.0.1:0", *files[:2])
    )

    assert wrong_file == (
        1,
        "",
        f"octavo {name}: --tls-key {server_files.key} contains no private key in PEM format; it must begin with "
        "-----BEGIN PRIVATE KEY-----\n",
    )
    assert half == (
        2,
        "",
        f"octavo {name}: --tls-cert and --tls-key must be set together: a certificate and its private key\n",
    )


async def test_a_wrong_token_file_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("blue short\n")

    code, _, stderr = await run("scheduler_svc", "--listen", "127.0.0.1:0", "--tokens-file", f"{tmp_path / 'tokens'}")

    assert (code, stderr.splitlines()[-1]) == (
        1,
        f"octavo scheduler: --tokens-file {tmp_path / 'tokens'}, line 1: the token is 5 characters long; use at least "
        '16 ("openssl rand -hex 32" generates one)',
    )


async def test_a_warning_is_not_taken_for_the_reason_of_an_end(tmp_path: Path) -> None:
    """Parents show the last words of a service that begin with its name."""
    log = tmp_path / "log"
    command = [sys.executable, "-P", "-m", "executor_svc.fake", "--listen", "localhost.invalid:0"]
    child = ChildProcess("executor", command, log_path=log)
    with pytest.raises(LocalServiceError, match=r"cannot listen on localhost\.invalid:0"):
        await child.start()
    await child.stop(0)
    assert "octavo: warning: the executor at --listen localhost.invalid:0 does not use TLS" in log.read_text()
