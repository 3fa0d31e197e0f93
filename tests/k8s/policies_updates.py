"""A pod ends once everybody knows that it goes, and an update goes on once everybody knows the pod that came."""

from tests.k8s.manifests import Manifests, Object, title
from tests.k8s.policies_settings import load_settings

# Seconds until everybody who looks a name up knows of a change; probes and resolve_interval_s come on top.
ENDPOINTS_S = 4  # API server, EndpointSlice, record of the cluster's DNS
DNS_TTL_S = 30
DNS_CACHE_S = 30  # of a node
RESOLVE_INTERVAL_S = 5.0

# One late answer takes nobody out of DNS.
READINESS_FAILURES = 3
CAPACITY_TO_SPARE_S = 5


def seconds_until_known(manifests: Manifests, container: Object) -> float:
    """Return the longest time until everybody who looks for the container's pod knows that it is ready, or ends."""
    probe = container.get("readinessProbe", {})
    probes_s = probe.get("periodSeconds", 0) * probe.get("failureThreshold", 0)
    return float(probes_s + ENDPOINTS_S + DNS_TTL_S + DNS_CACHE_S + _resolve_interval_s(manifests))


def _resolve_interval_s(manifests: Manifests) -> float:
    settings = [
        load_settings(manifests, pod, pod.containers[0])[0]
        for pod in manifests.pod_templates()
        if pod.component in ("scheduler", "front")
    ]
    return max(float(getattr(config, "resolve_interval_s", RESOLVE_INTERVAL_S)) for config in settings)


def check_drain(manifests: Manifests) -> list[str]:
    """Who ends waits until everybody knows; the kubelet waits longer than preStop and the drain take together."""
    findings = []
    for pod in manifests.pod_templates():
        for container in pod.containers:
            where = f"{pod.owner} {container['name']}"
            sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds")
            if sleep is None:
                findings.append(f"{where}: no preStop.sleep")
                continue
            config, _ = load_settings(manifests, pod, container)
            drain_s = config.shutdown_grace_s if config else 0
            grace_s = pod.spec.get("terminationGracePeriodSeconds", 30)
            if grace_s < sleep + drain_s + CAPACITY_TO_SPARE_S:
                findings.append(f"{where}: grace {grace_s} s, preStop {sleep} s and drain {drain_s:g} s")
            if sleep < (known_s := seconds_until_known(manifests, container)):
                findings.append(f"{where}: preStop {sleep} s, and everybody knows after {known_s:g} s")
            if container.get("readinessProbe", {}).get("failureThreshold", READINESS_FAILURES) < READINESS_FAILURES:
                findings.append(f"{where}: one late answer of a probe takes it out of DNS")
    return findings


def check_updates(manifests: Manifests) -> list[str]:
    """An update ends, and replaces nobody before the pod that it has just made is known."""
    findings = []
    for item in manifests.of_kind("Deployment", "StatefulSet"):
        component = item["metadata"]["labels"]["app.kubernetes.io/component"]
        known_s = seconds_until_known(manifests, item["spec"]["template"]["spec"]["containers"][0])
        if item["spec"].get("minReadySeconds", 0) < known_s:
            findings.append(f"{title(item)}: goes on before a new pod is known, which takes {known_s:g} s")
        update = item["spec"].get("strategy", {}).get("rollingUpdate", {})
        if component == "executor" and (update.get("maxSurge"), update.get("maxUnavailable")) != (0, 1):
            findings.append(f"{title(item)}: needs one accelerator more for an update")
        if component == "scheduler":
            findings += [f"{title(item)}: {mistake}" for mistake in _scheduler_mistakes(manifests, item)]
    return findings


def _scheduler_mistakes(manifests: Manifests, item: Object) -> list[str]:
    """A scheduler keeps its id, under which executors keep what they have cached for it."""
    mistakes = []
    variables = {entry["name"]: entry for entry in item["spec"]["template"]["spec"]["containers"][0]["env"]}
    source = variables.get("OCTAVO_SCHEDULER_SCHEDULER_ID", {}).get("valueFrom", {}).get("fieldRef", {})
    if item["kind"] != "StatefulSet" or source.get("fieldPath") != "metadata.name":
        mistakes.append("its pods have no lasting ids")
    if item["spec"].get("podManagementPolicy") != "Parallel":
        mistakes.append("a pod waits for one that may have no executor")
    service = manifests.find("Service", item["spec"].get("serviceName", ""))
    owners = [] if service is None else manifests.selected({"matchLabels": service["spec"]["selector"]})
    if title(item) not in [pod.owner for pod in owners]:
        mistakes.append("its serviceName is no Service of its pods")
    return mistakes
