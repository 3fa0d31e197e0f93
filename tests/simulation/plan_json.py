"""Plans as JSON and back, exactly: a failing one is kept as a file, and its run with it."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.simulation.network.link import Weather
from tests.simulation.plan import ExecutorPlan, FaultPlan, Plan, RequestPlan

_PARTS = {"executors": ExecutorPlan, "requests": RequestPlan, "faults": FaultPlan}


def plan_to_json(plan: Plan) -> str:
    """Return a plan as JSON, with a line for each executor, request and fault."""
    fields = asdict(plan)
    lines = [f'  "{name}": {_shown(value)}' for name, value in fields.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def plan_from_json(text: str) -> Plan:
    """Return the plan that `plan_to_json` made a text of.

    Raises: ValueError, TypeError, KeyError: it is something else.
    """
    fields: dict[str, Any] = json.loads(text)
    fields["settings"] = {name: _tuple_of(value) for name, value in fields["settings"].items()}
    fields["weather"] = Weather(**fields["weather"])
    for name, part in _PARTS.items():
        fields[name] = tuple(part(**values) for values in fields[name])
    fields["executors"] = tuple(
        replace(executor, cache_groups=tuple((window, num_blocks) for window, num_blocks in executor.cache_groups))
        for executor in fields["executors"]
    )
    return Plan(**fields)


def read_plan(path: Path) -> Plan:
    """Return the plan of a file. Raises OSError, and what `plan_from_json` raises."""
    return plan_from_json(path.read_text())


def _shown(value: Any) -> str:
    if isinstance(value, tuple) and value:
        return "[\n" + ",\n".join(f"    {json.dumps(part)}" for part in value) + "\n  ]"
    return json.dumps(value)


def _tuple_of(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
