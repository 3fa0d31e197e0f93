"""Who is scaled, by what, and whether every executor has a scheduler wherever the autoscaler comes to rest."""

import math
import re
from collections.abc import Iterator

from tests.k8s.manifests import Manifests, Object, title
from tests.k8s.policies_settings import load_settings

SLOW_SCALE_DOWN_S = 300

# A HorizontalPodAutoscaler leaves the number as it is while the metric is that near to its target.
TOLERANCE = 0.1

_QUERY = re.compile(r'ceil\(count\(octavo_executor_attached\{namespace="octavo"\}\) / (\d+)\)')


def check_autoscaling(manifests: Manifests) -> list[str]:
    """Who is scaled exists and has no number of its own; down is slow; more schedulers find executors."""
    findings = []
    for item in manifests.of_kind("ScaledObject", "HorizontalPodAutoscaler"):
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
        findings += [f"{title(item)}: {mistake}" for mistake in _scheduler_mistakes(manifests, item, most)]
    return findings


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


def _scheduler_mistakes(manifests: Manifests, item: Object, most: int) -> Iterator[str]:
    """An executor serves one scheduler: the number of schedulers follows that of executors."""
    if not item["metadata"]["name"].endswith("scheduler"):
        return
    pod = next(pod for pod in manifests.pod_templates() if pod.component == "scheduler")
    config, _ = load_settings(manifests, pod, pod.containers[0])
    limit = getattr(config, "max_executors", None)
    if most > 1 and limit is None:
        yield "the first scheduler takes all executors, max_executors is not set"
        return
    for trigger in item["spec"].get("triggers", []):
        query = _QUERY.fullmatch(trigger["metadata"]["query"])
        if query is None or int(query[1]) != limit:
            yield f"its query is {trigger['metadata']['query']}, and max_executors is {limit}"
            continue
        most_executors = max(bounds(other)[1] for other in manifests.of_kind("ScaledObject"))
        yield from _uncovered(limit, float(trigger["metadata"]["threshold"]), bounds(item), most_executors)


def _uncovered(limit: int, target: float, schedulers: tuple[int, int], most_executors: int) -> Iterator[str]:
    least, most = schedulers
    for executors in range(1, most_executors + 1):
        needed = math.ceil(executors / limit)
        fewest = min(resting_places(needed, target, least, most))
        if fewest < needed:
            yield f"{executors} executors need {needed} schedulers, and it may stay at {fewest}"
