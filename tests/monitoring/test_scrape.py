"""What /metrics says after some work, from real processes, and whether it is what alerts and the dashboard ask for."""

import re
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from executor_svc.service.metrics import METRICS as EXECUTOR_METRICS
from octavo_shared.grpc.grpc_metrics import METRICS as SERVICE_METRICS
from octavo_shared.process.metric import Metric
from scheduler_svc.front.api_meter import METRICS as API_METRICS
from scheduler_svc.front.grammars.grammar_checks import METRICS as GRAMMAR_METRICS
from scheduler_svc.front.openai.routing import METRICS as HTTP_METRICS
from scheduler_svc.front.text.text_threads import METRICS as TEXT_METRICS
from scheduler_svc.telemetry.metrics import METRICS
from scheduler_svc.telemetry.vllm_metrics import METRICS as VLLM_METRICS
from tests.monitoring.expressions import dashboard_expressions, missing_names, rule_groups, rules_with, sample_names
from tests.monitoring.live import NUM_REQUESTS, Scrapes, value_of
from tests.monitoring.promtool import check_metrics
from tests.support.each_row import each_row

# An alias has the name that others gave it.
COLON = "metric names should not contain ':'"
# What Prometheus itself says of each target.
OF_PROMETHEUS = {"up"}


def test_promtool_has_nothing_against_the_metrics(scrapes: Scrapes) -> None:
    aliases = sorted(f"{metric.name} {COLON}" for metric in VLLM_METRICS)
    assert check_metrics(scrapes.scheduler) == aliases
    assert check_metrics(scrapes.executor) == []
    assert check_metrics(scrapes.tls_executor) == []


def test_a_bad_name_is_noticed(scrapes: Scrapes) -> None:
    bad = scrapes.executor + "# HELP octavo_step_milliseconds A.\n# TYPE octavo_step_milliseconds counter\n"
    assert check_metrics(bad + "octavo_step_milliseconds 1\n")


@each_row(*METRICS, *API_METRICS, *VLLM_METRICS, *SERVICE_METRICS)
def test_the_scheduler_serves_every_metric_with_its_type_and_text(metric: Metric, *, scrapes: Scrapes) -> None:
    assert f"# TYPE {metric.name} {metric.kind}\n" in scrapes.scheduler
    assert f"# HELP {metric.name} {metric.help}\n" in scrapes.scheduler


def test_every_metric_of_the_scheduler_is_in_the_tables(scrapes: Scrapes) -> None:
    tables = (*METRICS, *API_METRICS, *TEXT_METRICS, *GRAMMAR_METRICS, *HTTP_METRICS, *VLLM_METRICS, *SERVICE_METRICS)
    served = re.findall("^# TYPE ((?:octavo|vllm|grpc)\\S+)", scrapes.scheduler, re.MULTILINE)
    assert set(served) <= {metric.name for metric in tables}


@each_row(*EXECUTOR_METRICS, *SERVICE_METRICS)
def test_the_executor_serves_every_metric_with_its_type_and_text(metric: Metric, *, scrapes: Scrapes) -> None:
    assert f"# TYPE {metric.name} {metric.kind}\n" in scrapes.executor
    assert f"# HELP {metric.name} {metric.help}\n" in scrapes.executor


def test_requests_tokens_and_calls_add_up(scrapes: Scrapes) -> None:
    page = scrapes.scheduler
    assert value_of(page, "octavo_requests_finished_total", finish_reason="length") == NUM_REQUESTS
    assert value_of(page, "octavo_prompt_tokens_total") == 20 * NUM_REQUESTS
    assert value_of(page, "octavo_output_tokens_total") == 30 * NUM_REQUESTS
    assert value_of(page, "octavo_tenant_requests_total", tenant="") == NUM_REQUESTS
    assert value_of(page, "octavo_tenant_output_tokens_total", tenant="") == 30 * NUM_REQUESTS
    assert value_of(page, "octavo_api_request_duration_seconds_count", api="generate") == NUM_REQUESTS
    assert value_of(page, "octavo_time_to_first_token_seconds_count") == NUM_REQUESTS
    assert value_of(page, "octavo_inter_token_latency_seconds_count") == 29 * NUM_REQUESTS
    assert value_of(page, "octavo_requests_running") == 0
    assert value_of(page, "grpc_server_handled_total", grpc_method="Generate", grpc_code="OK") == NUM_REQUESTS
    assert value_of(page, "vllm:num_requests_running", model_name="fake") == 0


def test_both_tiers_count_the_same_steps(scrapes: Scrapes) -> None:
    num_steps = value_of(scrapes.executor, "octavo_executor_steps_total")
    for phase in ("schedule", "wait", "execute", "process"):
        assert value_of(scrapes.scheduler, "octavo_step_duration_seconds_count", phase=phase) == num_steps
    execute_s = value_of(scrapes.scheduler, "octavo_step_duration_seconds_sum", phase="execute")
    assert value_of(scrapes.executor, "octavo_executor_busy_seconds_total") == pytest.approx(execute_s)


def test_the_executor_counts_tokens_by_kind(scrapes: Scrapes) -> None:
    # The first of a request's 30 tokens comes with its prompt; what a step computes beyond the last is dropped.
    assert value_of(scrapes.executor, "octavo_executor_tokens_total", kind="prefill") == 20 * NUM_REQUESTS
    assert value_of(scrapes.executor, "octavo_executor_tokens_total", kind="decode") == 29 * NUM_REQUESTS


def test_an_executor_says_who_it_is_whether_it_is_held_and_how_idle_it_is(scrapes: Scrapes) -> None:
    assert value_of(scrapes.executor, "octavo_executor_info", model_id="fake", dtype="float32") == 1
    assert value_of(scrapes.executor, "octavo_executor_attached") == 1
    assert value_of(scrapes.tls_executor, "octavo_executor_attached") == 0
    assert value_of(scrapes.tls_executor, "octavo_executor_idle_ratio") == 1
    assert 0 < value_of(scrapes.executor, "octavo_executor_idle_ratio") < 1


def test_a_certificate_says_when_it_expires_and_without_one_nothing_does(scrapes: Scrapes) -> None:
    assert value_of(scrapes.tls_executor, "octavo_tls_certificate_expiry_seconds") > time.time()
    assert "octavo_tls_certificate_expiry_seconds" not in sample_names(scrapes.executor)


def test_no_label_holds_what_a_client_sent(scrapes: Scrapes) -> None:
    labels = {
        name
        for family in text_string_to_metric_families(scrapes.scheduler)
        for s in family.samples
        for name in s.labels
    }
    known = {label for metric in (*METRICS, *API_METRICS, *VLLM_METRICS, *SERVICE_METRICS) for label in metric.labels}
    assert labels <= known | {"le"}
    assert not {"request_id", "instance"} & labels


# What rules and the dashboard ask for -----------------------------------------------------------------


def known_names(scrapes: Scrapes) -> set[str]:
    pages = (scrapes.scheduler, scrapes.executor, scrapes.tls_executor)
    return set().union(*map(sample_names, pages)) | set(rules_with("record")) | OF_PROMETHEUS


def test_alerts_and_records_ask_for_metrics_that_are_served(scrapes: Scrapes) -> None:
    expressions = [rule["expr"] for group in rule_groups() for rule in group["rules"]]
    assert not missing_names(expressions, known_names(scrapes))


def test_the_dashboard_asks_for_metrics_that_are_served(scrapes: Scrapes) -> None:
    assert not missing_names(dashboard_expressions(), known_names(scrapes))


def test_a_metric_that_nobody_serves_is_noticed(scrapes: Scrapes) -> None:
    expressions = [*dashboard_expressions(), "sum(octavo_requests_waitng)"]
    assert missing_names(expressions, known_names(scrapes)) == {"octavo_requests_waitng"}
