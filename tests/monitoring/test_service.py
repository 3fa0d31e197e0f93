"""The metrics port of a service: there from the start to the end, or a sentence that says why not."""

import socket

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from executor_svc.fake.worker import FakeWorker
from executor_svc.service.metrics import executor_families
from executor_svc.service.servicer import ExecutionServicer
from executor_svc.service.step_meter import StepMeter, StepTokens
from executor_svc.transfers.meter import TransferMeter
from executor_svc.transfers.pending import Outcome, Reason, Transfer
from octavo_shared.errors import UnavailableError
from octavo_shared.grpc.membership import Membership
from octavo_shared.process.metrics_server import MetricsServer
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.processes.service import SchedulerService
from tests.monitoring.live import scrape, value_of
from tests.support.stack import collect, running_stack, token_request, until


def samples_of(servicer: ExecutionServicer) -> dict[str, float]:
    """The samples of an executor, without their labels."""
    return {sample.name: sample.value for family in servicer.metrics() for sample in family.samples}


async def test_an_executor_that_loads_has_all_metrics_but_what_it_is() -> None:
    servicer = ExecutionServicer()
    loading = samples_of(servicer)
    assert (loading["octavo_executor_attached"], loading["octavo_executor_idle_ratio"]) == (0, 1)
    assert "octavo_executor_info" not in loading
    await servicer.load(FakeWorker)
    assert set(samples_of(servicer)) == {*loading, "octavo_executor_info"}
    await servicer.drain()
    assert set(samples_of(servicer)) == {*loading, "octavo_executor_info"}
    servicer.close()


async def test_every_served_value_of_an_executor_is_the_true_one() -> None:
    now_s = [1000.0]
    meter = StepMeter(lambda: now_s[0])

    def run(duration_s: float, num_prefill: int, num_decode: int) -> None:
        with meter.launching():
            now_s[0] += duration_s
        meter.finished(duration_s, StepTokens(num_prefill, num_decode))

    run(0.25, 70, 2)
    run(0.5, 30, 3)
    run(0.25, 0, 5)
    now_s[0] += 3.0
    worker = FakeWorker(block_size_tokens=8, num_device_blocks=65, num_host_blocks=7, max_model_len=96)
    transfers = TransferMeter()
    received = Transfer(1, np.arange(3, dtype=np.int32), bytes(16), begun_at_s=2.0)
    transfers.ended(received, Outcome.ARRIVED, None, 768, 2.5)
    transfers.ended(received, Outcome.CANCELLED, Reason.SILENCE, 768, 32.0)
    server = MetricsServer("127.0.0.1:0", lambda: executor_families(meter, transfers, worker.info, is_attached=True))
    address = await server.start()
    page = await scrape(address)
    await server.stop(0)

    samples = [
        sample
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("octavo_executor")
    ]
    buckets = {sample.labels["le"]: sample.value for sample in samples if "le" in sample.labels}
    assert [buckets[bound] for bound in ("0.1", "0.25", "0.5", "60.0", "+Inf")] == [0, 2, 3, 3, 3]
    sizes = {"block_size_tokens": "8", "num_device_blocks": "65", "num_host_blocks": "7", "max_model_len": "96"}
    assert [(sample.name, sample.labels, sample.value) for sample in samples if "le" not in sample.labels] == [
        ("octavo_executor_attached", {}, 1),
        ("octavo_executor_busy_seconds_total", {}, 1.0),
        ("octavo_executor_idle_ratio", {}, 0.75),
        ("octavo_executor_steps_total", {}, 3),
        ("octavo_executor_step_duration_seconds_count", {}, 3),
        ("octavo_executor_step_duration_seconds_sum", {}, 1.0),
        ("octavo_executor_tokens_total", {"kind": "prefill"}, 100),
        ("octavo_executor_tokens_total", {"kind": "decode"}, 10),
        *(
            (f"octavo_executor_{what}_total", {"direction": direction}, value)
            for what, received in (("transferred_blocks", 3), ("transferred_bytes", 768), ("transfer_seconds", 0.5))
            for direction, value in (("sent", 0), ("received", received))
        ),
        *(
            ("octavo_executor_transfers_cancelled_total", {"reason": reason}, int(reason == "silence"))
            for reason in ("asked", "peer", "difference", "silence", "attach", "drain", "weights", "fault")
        ),
        (
            "octavo_executor_info",
            {"model_id": "fake", "dtype": "float32", "tp_size": "1", "numerics_id": "fake-1", **sizes},
            1,
        ),
    ]


async def test_a_scheduler_answers_while_it_drains() -> None:
    async with running_stack(metrics_listen="127.0.0.1:0") as stack:
        await stack.engine.start_draining()
        page = await scrape(stack.service.other_addresses["metrics"])
    assert value_of(page, "octavo_executors", state="attached") == 1


async def test_a_scheduler_answers_without_an_executor_and_names_none() -> None:
    nobody = Membership(("127.0.0.1:1",), 1.0)
    async with running_stack(membership=nobody, ready=False, metrics_listen="127.0.0.1:0") as stack:
        await until(lambda: stack.engine.drivers)
        page = await scrape(stack.service.other_addresses["metrics"])
    assert value_of(page, "octavo_executors", state="attached") == 0
    assert value_of(page, "octavo_executors", state="connecting") == 1
    assert "octavo_kv_cache_usage_ratio{" not in page
    assert "vllm:num_requests_waiting{" not in page


async def test_without_the_setting_there_is_no_port() -> None:
    async with running_stack() as stack:
        await collect(stack, token_request(20, 2))
        assert "metrics" not in stack.service.other_addresses


async def test_a_metrics_port_that_is_taken_is_one_sentence_and_nothing_is_served() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as free:
        metrics, listen = (f"127.0.0.1:{server.getsockname()[1]}" for server in (taken, free))
        free.close()
        settings = {"listen": listen, "admin_listen": "127.0.0.1:0", "metrics_listen": metrics, "executor": ("a:1",)}
        service = SchedulerService(SchedulerConfig.model_validate(settings))
        with pytest.raises(UnavailableError, match=f"^cannot listen on {metrics}: .* set --metrics-listen"):
            await service.start()
        with socket.create_server(("127.0.0.1", int(listen.rpartition(":")[2]))):
            pass
