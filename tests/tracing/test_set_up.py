"""What `start_tracing` does with a process: names, a collector that is not there, mistakes."""

import logging
import socket
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version

import pytest

from executor_svc.fake.__main__ import main as fake_main
from executor_svc.fake.worker import FakeWorker
from octavo_shared.errors import OctavoServiceError
from octavo_shared.process.tracing import COMPLAINT_INTERVAL_S, RateLimitFilter, resource_of, start_tracing
from scheduler_svc.__main__ import main as scheduler_main
from tests.support.patience import PATIENCE_S
from tests.support.stack import collect, running_stack, token_request


@pytest.fixture(autouse=True)
def _own_filters() -> Iterator[None]:
    """The filters of one test are not there in the next one."""
    yield
    for name in list(logging.root.manager.loggerDict):
        logger = logging.getLogger(name)
        for limit in [entry for entry in logger.filters if isinstance(entry, RateLimitFilter)]:
            logger.removeFilter(limit)


def test_off_is_nothing() -> None:
    assert start_tracing("off", "octavo-scheduler") is None


def test_a_process_is_named_as_the_variables_say_or_after_its_service(monkeypatch: pytest.MonkeyPatch) -> None:
    own = resource_of("octavo-scheduler").attributes
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "host.name=node-7,zone=b")
    named = resource_of("octavo-scheduler").attributes

    assert (own["service.name"], own["service.version"]) == ("octavo-scheduler", version("octavo"))
    assert own["host.name"] == socket.gethostname()
    assert (named["service.name"], named["host.name"], named["zone"]) == ("front", "node-7", "b")


def test_a_wrong_variable_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")

    with pytest.raises(OctavoServiceError, match=r"^an OTEL_\* variable is invalid: could not convert .*soon"):
        start_tracing("otlp", "octavo-scheduler")


@pytest.mark.parametrize(
    ("main", "service"), [(scheduler_main, "octavo scheduler"), (fake_main, "octavo fake")], ids=["scheduler", "fake"]
)
def test_a_missing_package_is_one_sentence_and_exit_code_1(
    main: Callable[[], int], service: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interval_s = sys.getswitchinterval()
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    monkeypatch.setattr(sys, "argv", ["octavo", "--tracing=otlp", "--listen=127.0.0.1:0"])

    code = main()

    sys.setswitchinterval(interval_s)
    assert code == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{service}: --tracing otlp requires OpenTelemetry (")
    assert line.endswith("): pip install '.[tracing]' in a clone")


def test_complaints_come_once_in_an_interval() -> None:
    now_s = 1000.0
    limit = RateLimitFilter(COMPLAINT_INTERVAL_S, lambda: now_s)
    record = logging.makeLogRecord({"msg": "the collector is away"})

    assert [limit.filter(record), limit.filter(record)] == [True, False]
    now_s += COMPLAINT_INTERVAL_S - 0.1
    assert not limit.filter(record)
    now_s += 0.2
    assert limit.filter(record)


@pytest.fixture
def dead_collector(request: pytest.FixtureRequest) -> Iterator[str]:
    """An address where connections are refused, or accepted and never answered."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "mute":
            listener.listen()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("dead_collector", ["refusing", "mute"], indirect=True)
async def test_a_dead_collector_delays_no_request_and_the_end_by_little(
    dead_collector: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", dead_collector)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    async with running_stack(FakeWorker(), tracing="otlp", shutdown_grace_s=0.5) as stack:
        for number in range(20):  # their spans fill the queue several times
            answer = await collect(stack, token_request(10, 3, first_id=number))
            assert len(answer.token_ids) == 3
        begin_s = time.monotonic()
    assert time.monotonic() - begin_s < PATIENCE_S

    complaints = [record for record in caplog.records if record.name.startswith("opentelemetry.")]
    assert 1 <= len(complaints) <= 2  # one of the exporter, one of the queue
