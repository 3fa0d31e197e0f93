"""The real promtool: it parses expressions, plays alerts, and judges what /metrics answers."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any


class RefusedError(Exception):
    """promtool found a mistake; the message is its own."""


def promtool(*arguments: str, stdin: str = "") -> str:
    """Run promtool and return what it printed.

    Raises: RefusedError: it exited with an error.
    """
    run = subprocess.run(
        [find_promtool(), *arguments], input=stdin, capture_output=True, text=True, check=False, timeout=60
    )
    if run.returncode:
        raise RefusedError(run.stdout + run.stderr)
    return run.stdout


def find_promtool() -> str:
    """Return the path of promtool.

    Raises: AssertionError: it is not there.
    """
    own = Path(sys.prefix, "tools", "promtool")
    found = str(own) if own.exists() else shutil.which("promtool")
    assert found, "promtool is missing: run `make monitoring-tools`, or install Prometheus"
    return found


def check_rules(groups: list[dict[str, Any]], directory: Path) -> None:
    """Parse rules. Raises: RefusedError: an expression or a template is wrong."""
    path = directory / "rules.json"  # every JSON file is a YAML file
    path.write_text(json.dumps({"groups": groups}), encoding="utf-8")
    promtool("check", "rules", str(path))


def check_expressions(expressions: list[str], directory: Path) -> None:
    """Parse PromQL expressions. Raises: RefusedError: one is wrong."""
    rules = [{"record": f"checked:{number}", "expr": expression} for number, expression in enumerate(expressions)]
    check_rules([{"name": "checked", "rules": rules}], directory)


def check_metrics(text: str) -> list[str]:
    """Return what promtool has against the names, types and texts of a scrape, a line each."""
    try:
        promtool("check", "metrics", stdin=text)
    except RefusedError as refused:
        return str(refused).splitlines()
    return []


def play(groups: list[dict[str, Any]], test: dict[str, Any], directory: Path) -> None:
    """Play one test of rules over series that it makes up. Raises: RefusedError: it came out otherwise."""
    rules, tests = directory / "rules.json", directory / "tests.json"
    rules.write_text(json.dumps({"groups": groups}), encoding="utf-8")
    tests.write_text(
        json.dumps({"rule_files": [str(rules)], "evaluation_interval": "30s", "tests": [test]}), encoding="utf-8"
    )
    promtool("test", "rules", str(tests))
