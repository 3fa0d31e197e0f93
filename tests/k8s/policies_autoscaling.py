"""Which tiers are scaled, by what, and whether every executor has a scheduler wherever the autoscaler comes to rest."""

import math
import re
from collections.abc import Iterator

from tests.k8s.manifests import Manifests, Object, title
from tests.k8s.policies_settings import load_settings
from tests.k8s.policies_wiring import WORKLOADS

AUTOSCALERS = ("ScaledObject", "HorizontalPodAutoscaler")
SLOW_SCALE_DOWN_S = 300

# docs/sizing.md has the measurement; each front joins every scheduler of its cell.
EXECUTORS_PER_SCHEDULER = 8
SCHEDULERS_PER_CELL = 4

# A HorizontalPodAutoscaler leaves the number as it is while the metric is that near to its target.
TOLERANCE = 0.1

_QUERY = re.compile(r"ceil\(count\(octavo_executor_attached\{[^}]*\}\) / (\d+)\)")


def check_autoscaling(manifests: Manifests) -> list[str]:
    """What an autoscaler names exists and has no number of its own; down is slow; more schedulers find executors."""
    findings = []
    for item in manifests.of_kind(*AUTOSCALERS):
        spec = item["spec"]
        target = manifests.find(spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
        if target is None:
            findings.append(f"{title(item)}: its target is not there")
            continue
        if "replicas" in target["spec"]:
            findings.append(f"{title(item)}: its target has replicas, which every apply would restore")
        least, most = bounds(item)
        if not 1 <= least <= most:
            findings.append(f"{title(item)}: from {least} to {most}")
        behavior = spec.get("behavior") or spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        if behavior.get("scaleDown", {}).get("stabilizationWindowSeconds", 0) < SLOW_SCALE_DOWN_S:
            findings.append(f"{title(item)}: scales down hastily")
        if any(trigger["metadata"].get("ignoreNullValues") != "false" for trigger in spec.get("triggers", [])):
            findings.append(f"{title(item)}: takes an empty answer of Prometheus for zero")
        own = f'{{namespace="{manifests.namespace}",app_kubernetes_io_instance="{manifests.cell}"}}'
        if any(own not in trigger["metadata"].get("query", own) for trigger in spec.get("triggers", [])):
            findings.append(f"{title(item)}: counts what is not of this cell")
    return [*findings, *_fleet_mistakes(manifests)]


def bounds(item: Object) -> tuple[int, int]:
    """Return the least and the most pods of an autoscaler."""
    spec = item["spec"]
    least, most = (spec.get(f"{end}ReplicaCount", spec.get(f"{end}Replicas", 0)) for end in ("min", "max"))
    return int(least), int(most)


def resting_places(metric: float, target: float, least: int, most: int) -> set[int]:
    """Return the numbers of pods at which a HorizontalPodAutoscaler stays, wherever it begins.

    The rule is that of Kubernetes for external metrics of the type AverageValue: while metric / (target * pods) is
    within the tolerance of 1 nothing changes, else metric / target is rounded up.

    Args:
        metric: What the query answers, over all pods.
        target: The threshold, for each pod.
        least: Fewest pods.
        most: Most pods.
    """
    wanted = min(max(math.ceil(metric / target), least), most)
    return {pods for pods in range(least, most + 1) if abs(metric / (target * pods) - 1) <= TOLERANCE} | {wanted}


def _fleet_mistakes(manifests: Manifests) -> Iterator[str]:
    """At each number of executors every one has a scheduler, and no scheduler stands by, for whom an update would wait.

    An executor serves one scheduler, and a scheduler takes up to max_executors.
    """
    scheduler = next(pod for pod in manifests.pod_templates() if pod.component == "scheduler")
    config, _ = load_settings(manifests, scheduler, scheduler.containers[0])
    limit = getattr(config, "max_executors", None)
    _, least, most = _scaled(manifests, "executor")
    autoscaler, fewest, largest = _scaled(manifests, "scheduler")
    if largest > 1 and limit is None:
        yield "the first scheduler takes all executors, max_executors is not set"
        return
    if (limit or most) > EXECUTORS_PER_SCHEDULER or largest > SCHEDULERS_PER_CELL:
        yield f"{largest} schedulers with {limit or most} executors each are more than a cell"
    target = _target(autoscaler, limit)
    for executors in range(least, most + 1):
        needed = math.ceil(executors / (limit or most))
        places = resting_places(needed, target, fewest, largest) if target else {fewest, largest}
        if places != {needed}:
            yield f"{executors} executors need {needed} schedulers, and it may stay at {min(places - {needed})}"


def _scaled(manifests: Manifests, component: str) -> tuple[Object | None, int, int]:
    """Return the autoscaler of a tier, if there is one, and the least and the most pods."""
    for item in manifests.objects:
        if item["metadata"].get("labels", {}).get("app.kubernetes.io/component") == component:
            if item["kind"] in AUTOSCALERS:
                return item, *bounds(item)
            if item["kind"] in WORKLOADS and "replicas" in item["spec"]:
                return None, item["spec"]["replicas"], item["spec"]["replicas"]
    return None, 1, 1


def _target(autoscaler: Object | None, limit: int | None) -> float | None:
    """Return the threshold of the query for the schedulers that the executors need; None if something else is asked."""
    for trigger in (autoscaler or {"spec": {}})["spec"].get("triggers", []):
        query = _QUERY.fullmatch(trigger["metadata"].get("query", ""))
        if query is not None and int(query[1]) == limit:
            return float(trigger["metadata"]["threshold"])
    return None
