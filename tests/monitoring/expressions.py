"""Which metrics the rules and the dashboard ask for, and which ones a scrape has."""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

COMPONENT = Path(__file__).parents[2] / "k8s" / "components" / "monitoring"

_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"')
_SELECTORS = re.compile(r"\{[^}]*\}|\[[^\]]*\]")
_LABEL_LISTS = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_NAMES = re.compile(r"(?<![\w:.])([a-zA-Z_:][\w:]*)\b(?!\s*\()")
_WORDS = {"and", "or", "unless", "bool", "offset", "sum", "min", "max", "avg", "count"}


def rule_groups() -> list[dict[str, Any]]:
    """The groups of the PrometheusRule, as Prometheus gets them from the operator."""
    manifest = yaml.safe_load((COMPONENT / "rules.yaml").read_text(encoding="utf-8"))
    groups: list[dict[str, Any]] = manifest["spec"]["groups"]
    return groups


def rules_with(key: str) -> dict[str, dict[str, Any]]:
    """The rules that have a key, "alert" or "record", by what it says."""
    return {rule[key]: rule for group in rule_groups() for rule in group["rules"] if key in rule}


def dashboard_expressions() -> list[str]:
    """The expressions of the dashboard's panels, with values for Grafana's variables."""
    dashboard = json.loads((COMPONENT / "dashboard.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    return [expression.replace("$__rate_interval", "5m").replace("$namespace", ".*") for expression in expressions]


def names_in(expression: str) -> set[str]:
    """Return the names of the metrics in a PromQL expression."""
    text = _LABEL_LISTS.sub(" ", _SELECTORS.sub("", _STRINGS.sub('""', expression)))
    return set(_NAMES.findall(text)) - _WORDS


def sample_names(scrape: str) -> set[str]:
    """Return the names of the samples of a scrape, those that an expression may ask for."""
    return {sample.name for family in text_string_to_metric_families(scrape) for sample in family.samples}


def missing_names(expressions: list[str], known: set[str]) -> set[str]:
    """Return the metrics that expressions ask for and nobody serves or records."""
    return set().union(*map(names_in, expressions)) - known
