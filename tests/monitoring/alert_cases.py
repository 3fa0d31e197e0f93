"""For each alert: series in which it fires, and series like them in which it does not.

Values are in promtool's notation: `0+6x40` begins at 0 and rises by 6 at each of 40 samples, one every 30 s.
"""

from dataclasses import dataclass
from typing import Any

Series = dict[str, str]

_HOUR = "x120"
_LABELS = {"namespace": "ml", "pod": "s-0"}


@dataclass(frozen=True, slots=True)
class Case:
    """An alert, series in which it fires at a time, and series in which it does not."""

    alert: str
    at: str
    fires: Series
    fires_not: Series
    labels: tuple[str, ...] = ("namespace",)

    def test(self, *, fires: bool, severity: str) -> dict[str, Any]:
        """Return promtool's test of one half: the alert fires, once and with its labels, or not at all."""
        series = self.fires if fires else self.fires_not
        labels = {name: value for name, value in _LABELS.items() if name in self.labels} | {"severity": severity}
        expected = [{"exp_labels": labels}] if fires else []
        return {
            "interval": "30s",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "alert_rule_test": [{"eval_time": self.at, "alertname": self.alert, "exp_alerts": expected}],
        }


def _ttft(num_fast: int, num_slow: int) -> Series:
    """Return a histogram of first tokens, so many in each sample below 2.56 s and between that and 10.24 s."""
    name, both = 'octavo_time_to_first_token_seconds_bucket{namespace="ml",le="%s"}', num_fast + num_slow
    return {
        name % "2.56": f"0+{num_fast}{_HOUR}",
        name % "10.24": f"0+{both}{_HOUR}",
        name % "+Inf": f"0+{both}{_HOUR}",
    }


def _ended(num_finished: int, **errors: int) -> Series:
    finished = {'octavo_requests_finished_total{namespace="ml",finish_reason="stop"}': f"0+{num_finished}{_HOUR}"}
    failed = {
        f'octavo_request_errors_total{{namespace="ml",code="{code}"}}': f"0+{num}{_HOUR}"
        for code, num in errors.items()
    }
    return finished | failed


def _refused(num_answered: int, **reasons: int) -> Series:
    """Return requests over HTTP, so many answered and refused in each sample; there are none over gRPC."""
    answered = 'octavo_api_request_duration_seconds_count{namespace="ml",api="%s"}'
    refused = 'octavo_requests_refused_total{namespace="ml",api="%s",reason="%s"}'
    none = {answered % "generate": f"0{_HOUR}", refused % ("generate", "queue_full"): f"0{_HOUR}"}
    counts = {refused % ("chat_completions", reason): f"0+{num}{_HOUR}" for reason, num in reasons.items()}
    return none | {answered % "chat_completions": f"0+{num_answered}{_HOUR}"} | counts


def _running(*num_requests: int) -> Series:
    """Return the running requests of executors, two of each scheduler."""
    name = 'octavo_requests_running{namespace="ml",pod="s-%d",executor="%d"}'
    return {name % (number // 2, number): f"{num}{_HOUR}" for number, num in enumerate(num_requests)}


def _fronts(*schedulers: tuple[int, int]) -> Series:
    """Return schedulers, given how many fronts have joined each and how many executors it has."""
    fronts, executors = (
        f'{name},pod="s-%d"}}'
        for name in (
            'octavo_fronts_joined{namespace="ml",kind="standalone"',
            'octavo_executors{namespace="ml",state="attached"',
        )
    )
    return {
        name % number: f"{num}{_HOUR}"
        for number, (num_fronts, num_executors) in enumerate(schedulers)
        for name, num in ((fronts, num_fronts), (executors, num_executors))
    }


def _cache(usage: float, preemptions: int) -> Series:
    return {
        'octavo_kv_cache_usage_ratio{namespace="ml",executor="a"}': f"{usage}{_HOUR}",
        'octavo_preemptions_total{namespace="ml",mode="recompute"}': f"0+{preemptions}{_HOUR}",
    }


def _executor(idle: float, attached: int, waiting: int) -> Series:
    return {
        'octavo_executor_idle_ratio{namespace="ml",pod="s-0"}': f"{idle}{_HOUR}",
        'octavo_executor_attached{namespace="ml",pod="s-0"}': f"{attached}{_HOUR}",
        'octavo_requests_waiting{namespace="ml",pod="s-0"}': f"{waiting}{_HOUR}",
    }


def _steps(running: int, values: str) -> Series:
    return {
        'octavo_requests_running{namespace="ml",pod="s-0",executor="a"}': f"{running}{_HOUR}",
        'octavo_step_duration_seconds_count{namespace="ml",pod="s-0",phase="process"}': values,
    }


_POD = ("namespace", "pod")
_UNATTACHED = {'octavo_executor_attached{namespace="ml",pod="s-0"}': f"0{_HOUR}"}
_LOADED = {'octavo_executor_info{namespace="ml",pod="s-0",model_id="m"}': f"1{_HOUR}"}
_ATTACHED = 'octavo_executors{namespace="ml",state="attached",pod="%s"}'

CASES = [
    Case("OctavoSchedulerMissing", "10m", {}, {_ATTACHED % "s-0": f"0{_HOUR}"}, labels=()),
    Case(
        "OctavoSchedulerWithoutExecutors",
        "10m",
        {_ATTACHED % "s-0": f"0{_HOUR}", _ATTACHED % "s-1": f"0{_HOUR}"},
        {_ATTACHED % "s-0": f"0{_HOUR}", _ATTACHED % "s-1": f"1{_HOUR}"},  # a standby has none, and is fine
    ),
    Case(
        "OctavoQueueGrowing",
        "40m",
        {'octavo_requests_waiting{namespace="ml"}': f"40+1{_HOUR}"},
        {'octavo_requests_waiting{namespace="ml"}': f"400-1{_HOUR}"},
    ),
    Case("OctavoTimeToFirstTokenHigh", "30m", _ttft(90, 10), _ttft(1000, 1)),
    Case("OctavoRequestErrors", "20m", _ended(90, INTERNAL=10), _ended(90, INTERNAL=1, ABORTED=50)),
    Case("OctavoRequestsRefused", "20m", _refused(1, queue_full=39), _refused(90, invalid=50, queue_full=2)),
    Case("OctavoKvCacheFull", "30m", _cache(0.99, 6), _cache(0.99, 0)),
    Case(
        "OctavoExecutorsLost",
        "30m",
        {'octavo_executor_losses_total{namespace="ml"}': "0x10 1x10 2x10 3x10 4x40"},
        {'octavo_executor_losses_total{namespace="ml"}': "0x10 1x110"},
    ),
    Case("OctavoExecutorIdle", "30m", _executor(0.9, 1, 3), _executor(0.9, 1, 0), _POD),
    Case("OctavoExecutorsUneven", "20m", _running(60, 0, 58, 0), _running(60, 50, 30, 58)),
    Case("OctavoSchedulerWithoutFronts", "20m", _fronts((0, 1), (2, 2)), _fronts((1, 1), (1, 2)), _POD),
    Case("OctavoExecutorUnattached", "20m", _UNATTACHED | _LOADED, _executor(0.9, 1, 3) | _LOADED, _POD),
    Case("OctavoStepsStuck", "20m", _steps(2, f"500{_HOUR}"), _steps(2, f"0+100{_HOUR}"), _POD),
    Case(
        "OctavoCertificateExpiring",
        "10m",
        {'octavo_tls_certificate_expiry_seconds{namespace="ml",pod="s-0"}': f"{6 * 86400}{_HOUR}"},
        {'octavo_tls_certificate_expiry_seconds{namespace="ml",pod="s-0"}': f"{8 * 86400}{_HOUR}"},
        _POD,
    ),
]

# More series in which an alert must be silent, for conditions that have several parts.
SILENT = [
    Case("OctavoQueueGrowing", "40m", {}, {'octavo_requests_waiting{namespace="ml"}': "0+0.2x120"}),
    Case("OctavoKvCacheFull", "30m", {}, _cache(0.5, 6)),
    Case("OctavoExecutorIdle", "30m", {}, _executor(0.9, 0, 3)),
    Case("OctavoExecutorIdle", "30m", {}, _executor(0.1, 1, 3)),
    Case("OctavoRequestsRefused", "20m", {}, _refused(0)),
    Case("OctavoRequestsRefused", "20m", {}, _refused(0, unauthenticated=50)),
    Case("OctavoExecutorsUneven", "20m", {}, _running(2, 0, 0, 0)),  # there is little to spread
    Case("OctavoSchedulerWithoutFronts", "20m", {}, _fronts((0, 0), (2, 2))),  # a standby
    Case("OctavoSchedulerWithoutFronts", "20m", {}, _fronts((0, 1), (0, 2))),  # clients call schedulers
    Case("OctavoExecutorUnattached", "20m", {}, _UNATTACHED),  # its model loads
    Case("OctavoStepsStuck", "20m", {}, _steps(0, f"500{_HOUR}")),
]
