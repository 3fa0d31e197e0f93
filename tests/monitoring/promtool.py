"""The real promtool: it parses expressions, plays alerts, and judges what /metrics answers."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
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


def play(plays: Mapping[str, tuple[list[dict[str, Any]], dict[str, Any]]], directory: Path) -> dict[str, str]:
    """Play tests of rules over series that they make up, all in one process.

    Args:
        plays: By name, the groups of rules and promtool's test of them.
        directory: Where to write the files.

    Returns: What promtool has against each, by name; "" if it came out as expected.
    """
    files: dict[str, str] = {}
    for number, (name, (groups, test)) in enumerate(plays.items()):
        rules, tests = directory / f"rules-{number}.json", directory / f"test-{number}.json"
        rules.write_text(json.dumps({"groups": groups}), encoding="utf-8")
        played = {"rule_files": [str(rules)], "evaluation_interval": "30s", "tests": [test]}
        tests.write_text(json.dumps(played), encoding="utf-8")
        files[str(tests)] = name
    run = subprocess.run(
        [find_promtool(), "test", "rules", *files],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=120,
    )
    found = re.findall(r"^Unit Testing: +(\S+)\n(.*?)(?=^Unit Testing:|\Z)", run.stdout, re.DOTALL | re.MULTILINE)
    assert [path for path, _ in found] == list(files), run.stdout
    return {files[path]: "" if said.strip() == "SUCCESS" else said for path, said in found}
