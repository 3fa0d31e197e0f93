"""Every alert fires when it should and is silent when it should be, played by Prometheus' own promtool."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from docs.tools.metrics import PAGE, with_tables
from tests.monitoring import promtool as tool
from tests.monitoring.alert_cases import CASES, SILENT, Case
from tests.monitoring.expressions import dashboard_expressions, names_in, rule_groups, rules_with
from tests.monitoring.promtool import RefusedError, check_expressions, check_rules, play
from tests.support.each_row import each_row

ROOT = Path(__file__).parents[2]


def silent_groups() -> list[dict[str, Any]]:
    """The rules without annotations: promtool would want each of them in each expectation."""
    groups = copy.deepcopy(rule_groups())
    for group in groups:
        for rule in group["rules"]:
            rule.pop("annotations", None)
    return groups


def with_expression(case: Case, change: str) -> list[dict[str, Any]]:
    """The rules, with another expression of one alert; `{}` in it is the alert's own."""
    groups = silent_groups()
    [rule] = [rule for group in groups for rule in group["rules"] if rule.get("alert") == case.alert]
    rule["expr"] = change.format(rule["expr"])
    return groups


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What promtool has against each case, and against each with a planted mistake, by the names below."""
    alerts, groups = rules_with("alert"), silent_groups()
    plays = {}
    for number, case in enumerate([*CASES, *SILENT]):
        severity = alerts[case.alert]["labels"]["severity"]
        silent = case.test(fires=False, severity=severity)
        plays[f"silent {number}"] = groups, silent
        if number < len(CASES):
            fires = case.test(fires=True, severity=severity)
            plays[f"fires {number}"] = groups, fires
            plays[f"never fires {number}"] = with_expression(case, "({}) and on () vector(1) == 2"), fires
            plays[f"always fires {number}"] = with_expression(case, "vector(1)"), silent
    return play(plays, tmp_path_factory.mktemp("played"))


def test_the_rules_parse(tmp_path: Path) -> None:
    check_rules(rule_groups(), tmp_path)


def test_a_template_that_does_not_parse_is_noticed(tmp_path: Path) -> None:
    groups = copy.deepcopy(rule_groups())
    groups[1]["rules"][1]["annotations"]["description"] = "{{ $labels.namespace }"
    with pytest.raises(RefusedError, match="description"):
        check_rules(groups, tmp_path)


def test_every_alert_is_played() -> None:
    assert [case.alert for case in CASES] == list(rules_with("alert"))


NUMBERED = list(enumerate([*CASES, *SILENT]))
FIRING = NUMBERED[: len(CASES)]


@each_row(*FIRING)
def test_an_alert_fires(number: int, case: Case, *, played: dict[str, str]) -> None:
    assert played[f"fires {number}"] == "", case


@each_row(*NUMBERED)
def test_an_alert_is_silent(number: int, case: Case, *, played: dict[str, str]) -> None:
    assert played[f"silent {number}"] == "", case


@each_row(*FIRING)
def test_an_alert_that_can_never_fire_is_noticed(number: int, case: Case, *, played: dict[str, str]) -> None:
    assert f"alertname: {case.alert}," in played[f"never fires {number}"]


@each_row(*FIRING)
def test_an_alert_that_always_fires_is_noticed(number: int, case: Case, *, played: dict[str, str]) -> None:
    assert f"alertname: {case.alert}," in played[f"always fires {number}"]


def missing_runbooks(urls: dict[str, str]) -> list[str]:
    """Return the alerts whose runbook is no heading of a page here, given where each has it."""
    missing = []
    for name, url in urls.items():
        page, _, anchor = url.partition("#")
        path = ROOT / page
        headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE) if path.is_file() else []
        if anchor not in map(anchor_of, headings):
            missing.append(name)
    return missing


def anchor_of(heading: str) -> str:
    """Return the anchor that forges give to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_alert_says_what_is_wrong_and_where_to_read_on() -> None:
    for name, rule in rules_with("alert").items():
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}, name
        assert rule["labels"]["severity"] in ("warning", "critical")
    urls = {name: rule["annotations"]["runbook_url"] for name, rule in rules_with("alert").items()}
    assert missing_runbooks(urls) == []
    operations = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (Octavo\w+) \|", operations, re.MULTILINE) == list(urls), "the table of alerts"


def test_a_runbook_that_is_nowhere_is_noticed() -> None:
    assert missing_runbooks(
        {"A": "docs/metrics.md#octavoa", "B": "docs/b.md#alerts", "C": "docs/metrics.md#alerts"}
    ) == [
        "A",
        "B",
    ]


# Expressions and what there is ------------------------------------------------------------------------


def test_the_expressions_of_the_dashboard_parse(tmp_path: Path) -> None:
    expressions = dashboard_expressions()
    assert len(expressions) > 20
    check_expressions(expressions, tmp_path)


def test_an_expression_that_does_not_parse_is_noticed(tmp_path: Path) -> None:
    broken = [*dashboard_expressions(), "sum(rate(octavo_requests_finished_total[5m])"]
    with pytest.raises(RefusedError, match="parse error"):
        check_expressions(broken, tmp_path)


@each_row(
    ('sum by (pod, le) (rate(a_bucket{x="b_c",y=~"d|e"}[5m])) > 5', {"a_bucket"}),
    ("namespace:a:sum > 3 and on (namespace) deriv(b[10m]) > 0.5", {"namespace:a:sum", "b"}),
    ("(a - time()) / 86400", {"a"}),
    ("sum(a) without (pod) or b unless c offset 5m", {"a", "b", "c"}),
)
def test_names_are_found_in_expressions(expression: str, names: set[str]) -> None:
    assert names_in(expression) - {"5m"} == names


def test_without_promtool_the_tests_fail_and_say_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AssertionError, match="run `make monitoring-tools`"):
        tool.find_promtool()


# The page ---------------------------------------------------------------------------------------------


def test_the_reference_page_is_what_the_code_says() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_tables(page), "run `make docs-reference`"


def test_a_page_that_is_behind_the_code_is_noticed() -> None:
    page = PAGE.read_text(encoding="utf-8")
    behind = page.replace("Running requests: those in the batch of an executor.", "Requests.", 1)
    assert behind != page
    assert with_tables(behind) == page
