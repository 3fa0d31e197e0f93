"""A pod that ends tells everybody itself, and an update goes on once the pod that came has announced itself."""

from tests.k8s.manifests import Manifests, Object, title
from tests.k8s.policies_settings import load_settings

# Until Services lead to a pod that is ready, and to none that ends: probe, API server, EndpointSlice, kube-proxy.
SERVICES_S = 5
# Connections get no older than this, so that clients look again.
CONNECTION_AGE_S = 33

# One late answer takes nobody out of Services.
READINESS_FAILURES = 3
CAPACITY_TO_SPARE_S = 5
# Who starts anew while its neighbour still ends announces itself every 2 seconds.
ANNOUNCED_S = 5


def check_drain(manifests: Manifests) -> list[str]:
    """Who ends works on until clients are elsewhere; the kubelet waits longer than that and the drain take together."""
    findings = []
    for pod in manifests.pod_templates():
        for container in pod.containers:
            where = f"{pod.owner} {container['name']}"
            if "lifecycle" in container:
                findings.append(f"{where}: a hook keeps the process from telling anybody that it goes")
            config, _ = load_settings(manifests, pod, container)
            if config is None:
                continue
            delay_s, drain_s = config.shutdown_delay_s, config.shutdown_grace_s
            grace_s = pod.spec.get("terminationGracePeriodSeconds", 30)
            if grace_s < delay_s + drain_s + CAPACITY_TO_SPARE_S:
                findings.append(f"{where}: grace {grace_s} s, delay {delay_s:g} s and drain {drain_s:g} s")
            if pod.component == "front" and delay_s < (known_s := SERVICES_S + CONNECTION_AGE_S):
                findings.append(f"{where}: works on for {delay_s:g} s, and clients are elsewhere after {known_s} s")
            if container.get("readinessProbe", {}).get("failureThreshold", READINESS_FAILURES) < READINESS_FAILURES:
                findings.append(f"{where}: one late answer of a probe takes it out of Services")
            if pod.component == "executor" and not getattr(config, "announce_to", ()):
                findings.append(f"{where}: schedulers find it when their name server's cache ends")
    return findings


def check_updates(manifests: Manifests) -> list[str]:
    """An update ends, and replaces nobody before the pod that it has just made is known."""
    findings = []
    for item in manifests.of_kind("Deployment", "StatefulSet"):
        component = item["metadata"]["labels"]["app.kubernetes.io/component"]
        if item["spec"].get("minReadySeconds", 0) < (known_s := SERVICES_S + ANNOUNCED_S):
            findings.append(f"{title(item)}: goes on before a new pod is known, which takes {known_s} s")
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
