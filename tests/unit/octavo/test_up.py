"""What `octavo up` says once it serves; the services themselves are in tests/e2e."""

from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from executor_svc.device.cpus import AvailableCpus
from executor_svc.fake.worker import FakeWorker
from octavo.commands.command_line import run
from octavo.commands.up import say_how_it_stops, warn_if_short
from octavo.local.options import LocalOptions
from octavo.local.services import LocalServices
from tests.support.stack import running_stack, token_request, until
from tests.unit.octavo.stand_in import StandIn

WAITS = "stopping once running streams finish (at most 20 s); press Ctrl-C again to stop now"


class ServicesThatStop(LocalServices):
    """Services that serve at these addresses, and are told to stop at once."""

    def __init__(self, address: str, admin_address: str, page_address: str | None = None) -> None:
        super().__init__([], [])
        self._address = address
        self._admin_address = admin_address
        self._page_address = page_address

    @property
    def kernels(self) -> str:
        return "C (AVX2), 2 threads"

    async def start(self) -> None:
        pass

    async def run_beside(self, work: Coroutine[None, None, Any]) -> Any:
        work.close()


@pytest.fixture(autouse=True)
def nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has the default ports of this machine; tests/e2e/test_up.py has taken ones."""

    async def look_away(*_: str) -> None:
        pass

    monkeypatch.setattr("octavo.commands.up.check_ports", look_away)
    monkeypatch.setattr("octavo.commands.up.warn_if_short", look_away)
    monkeypatch.setattr("octavo.commands.up.is_taken", lambda _: False)


@pytest.mark.parametrize(
    ("address", "admin_address", "page_address", "more", "operators", "suggestion"),
    [
        (
            "127.0.0.1:50051",
            "127.0.0.1:50052",
            "127.0.0.1:50055",
            "",
            "operators: http://127.0.0.1:50055 (live page), octavo top",
            'try: octavo generate "Why is the sky blue?"',
        ),
        (
            "127.0.0.1:4321",
            "127.0.0.1:4322",
            None,
            "",
            "operators: octavo top --address 127.0.0.1:4322",
            'try: octavo generate "Why is the sky blue?" --address 127.0.0.1:4321',
        ),
        (
            "127.0.0.1:50051",
            "127.0.0.1:50052",
            "127.0.0.1:50055",
            "--set scheduler.tls_cert=cert.pem --set scheduler.tls_key=key.pem --tokens-file tokens",
            "operators: https://127.0.0.1:50055 (live page), octavo top --tls-ca FILE --token-file FILE",
            'try: octavo generate "Why is the sky blue?" --tls-ca FILE --token-file FILE',
        ),
    ],
)
def test_it_says_what_to_type_next(
    address: str,
    admin_address: str,
    page_address: str | None,
    more: str,
    operators: str,
    suggestion: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def from_options(*_: object, **__: object) -> LocalServices:
        return ServicesThatStop(address, admin_address, page_address)

    monkeypatch.setattr(LocalServices, "from_options", from_options)
    flags = ["--listen", address, "--admin-listen", admin_address, *more.split()]
    assert run(["up", "--model", "some/model", *flags]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"serving some/model on {address}; press Ctrl-C to stop",
        "kernels: C (AVX2), 2 threads",
        operators,
        suggestion,
    ]


def test_it_says_that_a_model_without_a_tokenizer_takes_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LocalServices, "from_options", lambda *_, **__: ServicesThatStop("localhost:1", "localhost:2"))
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    assert run(["up", "--model", str(tmp_path)]) == 0
    (*_, last) = capsys.readouterr().out.splitlines()
    assert last == "this model has no tokenizer.json: it accepts prompts as token ids (octavo.Client) but no text"


@pytest.mark.parametrize(
    ("flags", "admin_listen", "page_listen"),
    [
        ((), "127.0.0.1:50052", "127.0.0.1:50055"),
        (("--listen", "127.0.0.1:4321"), "127.0.0.1:50052", "127.0.0.1:50055"),
        (("--listen", "127.0.0.1:0"), "127.0.0.1:0", "127.0.0.1:0"),
        (("--admin-listen", "127.0.0.1:0"), "127.0.0.1:0", "127.0.0.1:0"),
        (("--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:4322"), "127.0.0.1:4322", "127.0.0.1:0"),
        (("--page-listen", "127.0.0.1:4323"), "127.0.0.1:50052", "127.0.0.1:4323"),
        (("--page-listen", "off"), "127.0.0.1:50052", None),
        (("--set", "scheduler.page_listen=off"), "127.0.0.1:50052", None),
    ],
)
def test_a_free_port_for_clients_means_one_for_operators(
    flags: tuple[str, ...], admin_listen: str, page_listen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[LocalOptions] = []

    def from_options(options: LocalOptions, **_: object) -> LocalServices:
        started.append(options)
        return ServicesThatStop("localhost:1", "localhost:2")

    monkeypatch.setattr(LocalServices, "from_options", from_options)
    assert run(["up", "--model", "some/model", *flags]) == 0
    [config] = [options.scheduler.config for options in started]
    assert (config.admin_listen, config.page_listen) == (admin_listen, page_listen)
    assert (config.scheduler_id is not None) == config.listen.endswith(
        ":0"
    )  # else it would be another one when it is back


@pytest.mark.parametrize("command", ["up", "serve"])
def test_the_model_may_be_named_without_its_flag(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LocalServices, "from_options", lambda *_, **__: ServicesThatStop("localhost:1", "localhost:2"))
    assert run([command, "some/model"]) == 0
    assert capsys.readouterr().out.startswith("serving some/model on ")
    assert run([command, "some/model", "--model", "another"]) == 2
    assert "the model is given twice: some/model and --model another" in capsys.readouterr().err


def test_more_executors_than_cores_are_said_to_be_of_no_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("executor_svc.device.cpus.read_cpus", lambda: AvailableCpus(4, 2, None))
    monkeypatch.setattr(LocalServices, "from_options", lambda *_, **__: ServicesThatStop("localhost:1", "localhost:2"))
    for num_executors in (2, 60):
        assert run(["up", "some/model", "--executors", str(num_executors)]) == 0
        told = capsys.readouterr().err
        assert told.startswith("octavo: 60 executors share this machine's 2 cores: ") == (num_executors == 60)


@pytest.mark.parametrize(
    ("is_open", "is_busy", "said"), [(True, False, "stopping"), (True, True, WAITS), (False, False, WAITS)]
)
async def test_streams_are_spoken_of_only_if_there_may_be_some(
    is_open: bool, is_busy: bool, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_stack(FakeWorker(step_ms=1)) as stack:
        call = stack.generation.Generate(token_request(5, 4000)) if is_busy else None
        await until(lambda: len(stack.engine.requests) == is_busy)
        await say_how_it_stops(stack.service.other_addresses["admin"], is_open=is_open)
        if call is not None:
            call.cancel()
    assert capsys.readouterr().err == f"{said}\n"


@pytest.mark.parametrize(("short_tokens", "is_said"), [(65, True), (64, False)])
async def test_a_cache_for_few_tokens_is_told(
    stand_in: StandIn, capsys: pytest.CaptureFixture[str], short_tokens: int, is_said: bool
) -> None:
    await warn_if_short(stand_in.address, short_tokens)
    assert capsys.readouterr().err.startswith("octavo: only 64 tokens fit, prompt and answer together; ") == is_said
