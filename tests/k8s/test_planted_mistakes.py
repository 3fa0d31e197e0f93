"""Each check bites: a mistake planted into what is rendered is found, and named."""

from typing import Any

import pytest

from tests.k8s.checks import CHECKS
from tests.k8s.manifests import Manifests, overlay

REMOVED = object()

SCHEDULER = "Deployment/octavo-scheduler"
GATEWAY = "Deployment/octavo-gateway"
EXECUTOR = "Deployment/octavo-executor"
GROUP = "LeaderWorkerSet/octavo-executor-group"
POD = "spec.template.spec"
CONTAINER = "spec.template.spec.containers.0"
LEADER = "spec.leaderWorkerTemplate.leaderTemplate.spec.containers.0"
WORKER = "spec.leaderWorkerTemplate.workerTemplate.spec.containers.0"
TARGET_PORT = "spec.ports.0.targetPort"
THRESHOLD = "spec.triggers.0.metadata.threshold"
SCALE_DOWN = "spec.advanced.horizontalPodAutoscalerConfig.behavior.scaleDown.stabilizationWindowSeconds"

# check, overlay, object, place, new value, what the finding says
MISTAKES: list[tuple[str, str, str, str, Any, str]] = [
    ("schemas", "production", SCHEDULER, "spec.replica", 2, "'replica' was unexpected"),
    ("schemas", "production", SCHEDULER, f"{CONTAINER}.livenessProbe.grpc.port", "grpc-health", "is not of type"),
    ("schemas", "production", SCHEDULER, "kind", "Deploiment", "has no Deploiment"),
    ("schemas", "production", SCHEDULER, "apiVersion", "apps/v1beta2", "has no Deployment of apps/v1beta2"),
    ("schemas", "production", "ScaledObject/octavo-executor", "spec.minReplicas", 1, "'minReplicas' was unexpected"),
    ("schemas", "production", "ScaledObject/octavo-executor", "spec.triggers", REMOVED, "'triggers' is a required"),
    (
        "schemas",
        "production",
        "Certificate/octavo-gateway-tls",
        "spec.usages.0",
        "digital signatur",
        "digital signatur",
    ),
    ("schemas", "production", "Issuer/octavo-clients", "spec.ca.secret", "x", "'secret' was unexpected"),
    ("schemas", "production", "PodMonitor/octavo-executor", "spec.podMetricsEndpoints.0.intervall", "1s", "intervall"),
    ("schemas", "production", "PrometheusRule/octavo", "spec.groups.0.rule", [], "'rule' was unexpected"),
    ("schemas", "multi-node", GROUP, "spec.leaderWorkerTemplate.restartPolicy", "Always", "'Always' is not one of"),
    ("schemas", "multi-node", GROUP, f"{WORKER}.imagePullPolicies", "Always", "'imagePullPolicies' was unexpected"),
    (
        "selectors",
        "production",
        "Service/octavo-executor",
        "spec.selector.app.kubernetes.io/name",
        "x",
        "selects no pod",
    ),
    ("selectors", "production", "PodMonitor/octavo-executor", "spec.selector.matchLabels.a", "b", "selects no pod"),
    ("selectors", "production", "NetworkPolicy/octavo-executor", "spec.podSelector.matchLabels.a", "b", "selects by a"),
    ("selectors", "production", SCHEDULER, "spec.selector.matchLabels.version", "1", "selects by version"),
    (
        "selectors",
        "production",
        "PodDisruptionBudget/octavo-gateway",
        "spec.selector.matchLabels.app.kubernetes.io/component",
        "executor",
        "is under 0 disruption budgets",
    ),
    ("selectors", "production", "PodDisruptionBudget/octavo-executor", "spec.maxUnavailable", 0, "maxUnavailable 1"),
    ("services", "production", "Service/octavo-gateway", TARGET_PORT, "web", "has no port web"),
    ("services", "cpu-demo", "Service/octavo-executor", "spec.ports.0.port", 80, "headless, so its port must be 50061"),
    ("services", "cpu-demo", "Service/octavo-scheduler", "spec.clusterIP", REMOVED, "is not balanced"),
    ("services", "cpu-demo", "Service/octavo-scheduler", "spec.ports.0.appProtocol", REMOVED, "not kubernetes.io/h2c"),
    ("services", "production", "PodMonitor/octavo-executor", "spec.podMetricsEndpoints.0.port", "http", "no port http"),
    ("references", "production", SCHEDULER, f"{POD}.volumes.config.configMap.name", "octavo", "no ConfigMap octavo"),
    (
        "references",
        "production",
        "Certificate/octavo-executor-tls",
        "spec.secretName",
        "x",
        "no Secret octavo-executor",
    ),
    ("references", "one-gpu", EXECUTOR, f"{POD}.volumes.models.persistentVolumeClaim.claimName", "x", "no Persistent"),
    ("references", "production", SCHEDULER, f"{POD}.serviceAccountName", "default", "no ServiceAccount default"),
    ("references", "production", SCHEDULER, f"{CONTAINER}.volumeMounts.0.name", "configuration", "mounts"),
    ("references", "production", "Certificate/octavo-gateway-tls", "spec.issuerRef.name", "x", "there is no issuer x"),
    ("references", "production", "Issuer/octavo-clients", "spec.ca.secretName", "x", "there is no certificate x"),
    ("names", "multi-node", GROUP, "metadata.name", "octavo-executor", "the one that its operator makes"),
    ("names", "production", "Service/octavo-executor", "metadata.name", "executor", "dials octavo-executor"),
    ("names", "production", "Service/octavo-scheduler", "metadata.name", "scheduler", "dials octavo-scheduler"),
    (
        "names",
        "production",
        "Certificate/octavo-executor-tls",
        "spec.dnsNames",
        ["localhost"],
        "expects octavo-executor",
    ),
    ("names", "production", "Certificate/octavo-scheduler-tls", "spec.dnsNames", ["localhost"], "expects octavo-sched"),
    ("encryption", "production", EXECUTOR, f"{CONTAINER}.env.OCTAVO_EXECUTOR_TLS_CLIENT_CA", REMOVED, "mutual TLS"),
    (
        "encryption",
        "production",
        GATEWAY,
        f"{CONTAINER}.args.0",
        "--worker-urls=grpc://octavo-scheduler:50051",
        "is plaintext",
    ),
    ("gateway", "production", GATEWAY, f"{CONTAINER}.args.5", REMOVED, "--api-key is not from a Secret"),
    ("gateway", "production", GATEWAY, f"{CONTAINER}.args.6", "--control-plane-api-keys=a:b:admin:c", "from a Secret"),
    ("references", "production", GATEWAY, f"{CONTAINER}.env.API_KEY.valueFrom.secretKeyRef.name", "x", "no Secret x"),
    ("labels", "production", SCHEDULER, "metadata.labels.app.kubernetes.io/instance", REMOVED, "has no label"),
    ("labels", "production", SCHEDULER, "spec.template.metadata.labels.app.kubernetes.io/part-of", "", "pods have no"),
    ("autoscaling", "production", SCHEDULER, "spec.replicas", 2, "has replicas"),
    ("autoscaling", "production", EXECUTOR, "metadata.name", "executor", "its target is not there"),
    ("autoscaling", "production", "ScaledObject/octavo-executor", "spec.minReplicaCount", 99, "from 99 to 16"),
    ("autoscaling", "production", "ScaledObject/octavo-executor", SCALE_DOWN, 15, "scales down hastily"),
    ("autoscaling", "production", "ScaledObject/octavo-scheduler", THRESHOLD, "8", "max_executors is 2"),
    ("autoscaling", "production", SCHEDULER, f"{CONTAINER}.env.OCTAVO_SCHEDULER_MAX_EXECUTORS", REMOVED, "is not set"),
    ("updates", "cpu-demo", SCHEDULER, "spec.strategy.rollingUpdate.maxUnavailable", "25%", "waits for an old one"),
    ("updates", "cpu-demo", EXECUTOR, "spec.strategy.rollingUpdate.maxSurge", 1, "one accelerator more"),
    ("probes", "production", SCHEDULER, f"{CONTAINER}.readinessProbe", REMOVED, "no readinessProbe"),
    ("probes", "production", SCHEDULER, f"{CONTAINER}.livenessProbe.grpc.port", 50051, "grpc-health is 50053"),
    ("probes", "production", EXECUTOR, f"{CONTAINER}.livenessProbe.grpc.service", "readiness", "asks for readiness"),
    (
        "probes",
        "production",
        GATEWAY,
        f"{CONTAINER}.livenessProbe.httpGet.port",
        "http",
        "http-health",
    ),
    ("probes", "multi-node", GROUP, f"{WORKER}.livenessProbe", {"grpc": {"port": 1}}, "serves nothing"),
    ("probes", "multi-node", GROUP, f"{LEADER}.startupProbe", REMOVED, "no startupProbe"),
    (
        "drain",
        "production",
        SCHEDULER,
        f"{POD}.terminationGracePeriodSeconds",
        75,
        "grace 75 s, preStop 15 s and drain 60",
    ),
    ("drain", "production", EXECUTOR, f"{CONTAINER}.lifecycle", REMOVED, "no preStop.sleep"),
    ("drain", "production", EXECUTOR, f"{CONTAINER}.lifecycle.preStop.sleep.seconds", 5, "looked at too rarely"),
    (
        "drain",
        "production",
        GATEWAY,
        f"{CONTAINER}.args.10",
        "--log-json",
        "drain time is not known",
    ),
    ("gpus", "one-gpu", EXECUTOR, f"{CONTAINER}.resources.requests.nvidia.com/gpu", REMOVED, "asks for None GPUs"),
    ("gpus", "one-gpu", EXECUTOR, f"{POD}.tolerations", REMOVED, "does not tolerate"),
    ("gpus", "one-gpu", EXECUTOR, f"{CONTAINER}.env.OCTAVO_EXECUTOR_DEVICE", REMOVED, "device is cpu"),
    ("images", "cpu-demo", SCHEDULER, f"{CONTAINER}.image", "octavo/scheduler:latest", "is not 0."),
    ("images", "cpu-demo", SCHEDULER, f"{CONTAINER}.image", "octavo/scheduler", "is not 0."),
    ("images", "cpu-demo", EXECUTOR, f"{POD}.initContainers.0.image", "busybox:1.36", "is no image of ours"),
    ("pod security", "production", SCHEDULER, f"{POD}.securityContext.runAsNonRoot", False, "may run as root"),
    ("pod security", "production", SCHEDULER, f"{POD}.securityContext.seccompProfile", REMOVED, "no seccomp profile"),
    ("pod security", "production", SCHEDULER, f"{POD}.hostNetwork", True, "has hostNetwork"),
    (
        "pod security",
        "production",
        SCHEDULER,
        f"{POD}.volumes.config",
        {"name": "config", "hostPath": {}},
        "volume of hostPath",
    ),
    ("pod security", "production", EXECUTOR, f"{POD}.volumes.shm.emptyDir", {}, "has no limit"),
    ("pod security", "production", SCHEDULER, f"{POD}.automountServiceAccountToken", True, "mounts a token"),
    ("pod security", "production", "ServiceAccount/octavo-executor", "automountServiceAccountToken", True, "its token"),
    ("pod security", "production", SCHEDULER, f"{CONTAINER}.securityContext.privileged", True, "is privileged"),
    (
        "pod security",
        "production",
        SCHEDULER,
        f"{CONTAINER}.securityContext.capabilities.add",
        ["NET_RAW"],
        "capabilities",
    ),
    ("pod security", "cpu-demo", EXECUTOR, f"{POD}.initContainers.0.securityContext", REMOVED, "may escalate"),
    (
        "pod security",
        "production",
        SCHEDULER,
        f"{CONTAINER}.securityContext.readOnlyRootFilesystem",
        False,
        "may write",
    ),
    ("pod security", "production", SCHEDULER, f"{CONTAINER}.securityContext.runAsUser", 0, "overrides the pod's user"),
    ("pod security", "production", SCHEDULER, f"{CONTAINER}.ports.0.hostPort", 50051, "takes a port of the node"),
    ("pod security", "production", SCHEDULER, f"{CONTAINER}.resources.limits", REMOVED, "has no memory limit"),
    (
        "pod security",
        "production",
        "Namespace/octavo",
        "metadata.labels.pod-security.kubernetes.io/enforce",
        "baseline",
        "does not enforce",
    ),
    ("settings", "production", SCHEDULER, f"{CONTAINER}.env.OCTAVO_SCHEDULER_MAX_EXECUTOR", "2", "is not a setting"),
    ("settings", "production", SCHEDULER, f"{CONTAINER}.env.OCTAVO_SCHEDULER_MAX_EXECUTORS", "many", "a whole number"),
    ("settings", "production", SCHEDULER, f"{CONTAINER}.args", ["--polici=fcfs"], "--polici is not a flag"),
    ("settings", "production", SCHEDULER, f"{CONTAINER}.env.OCTAVO_CONFIG", "/octavo.toml", "where no ConfigMap"),
    ("settings", "production", SCHEDULER, f"{CONTAINER}.ports.0.containerPort", 50050, "port grpc is 50050"),
    ("settings", "production", SCHEDULER, f"{CONTAINER}.env.OCTAVO_SCHEDULER_ADMIN_LISTEN", "0.0.0.0:50052", "open to"),
    (
        "settings",
        "production",
        SCHEDULER,
        f"{CONTAINER}.env.OCTAVO_SCHEDULER_TLS_KEY",
        "/tls.key",
        "no Secret is mounted",
    ),
    ("settings", "cpu-demo", EXECUTOR, f"{CONTAINER}.env.OCTAVO_EXECUTOR_MODEL", REMOVED, "--model is required"),
    ("settings", "cpu-demo", "ConfigMap/", "data.octavo.toml", "[scheduler]\nlisten_on = 1\n", "listen_on"),
    ("settings", "cpu-demo", "ConfigMap/", "data.octavo.toml", "[schedulers]\n", "did you mean scheduler"),
    ("settings", "multi-node", GROUP, f"{WORKER}.env.RANK", "0", "RANK is not the pod's index"),
    ("settings", "multi-node", GROUP, f"{LEADER}.env.WORLD_SIZE", "4", "WORLD_SIZE is not the size"),
    ("settings", "multi-node", GROUP, f"{LEADER}.env.MASTER_ADDR", "localhost", "MASTER_ADDR is not the leader"),
    ("settings", "multi-node", GROUP, f"{LEADER}.env.MASTER_PORT", REMOVED, "MASTER_PORT is no number"),
    ("settings", "multi-node", GROUP, f"{LEADER}.env.OCTAVO_EXECUTOR_TP", "4", "tp is 4 in a group of 2"),
    ("network", "production", "NetworkPolicy/default-deny", "spec.policyTypes", ["Ingress"], "may do anything"),
    ("network", "production", "NetworkPolicy/octavo-executor", "spec.ingress.0.from", REMOVED, "anybody -> executor"),
    ("network", "production", "NetworkPolicy/octavo-executor", "spec.ingress.0.ports", REMOVED, "any port is open"),
    (
        "network",
        "production",
        "NetworkPolicy/octavo-executor",
        "spec.ingress.0.ports.0.port",
        "metrics",
        "9090 is open",
    ),
    (
        "network",
        "production",
        "NetworkPolicy/octavo-scheduler",
        "spec.egress",
        [],
        "scheduler -> executor -> 50061 is n",
    ),
    ("network", "production", "NetworkPolicy/octavo-metrics", "spec.ingress.0.from.0.podSelector", REMOVED, "is open"),
    ("network", "production", "NetworkPolicy/dns", "spec.egress.0.ports.1", REMOVED, "TCP 53 is needed"),
    ("network", "multi-node", "NetworkPolicy/octavo-executor-ranks", "spec.ingress", [], "executor-rank -> 1024-65535"),
]


@pytest.mark.parametrize(
    ("check", "name", "target", "place", "value", "words"),
    MISTAKES,
    ids=[f"{check}: {target} {place.rpartition('.')[2]} {words}" for check, _, target, place, _, words in MISTAKES],
)
def test_a_planted_mistake_is_found(check: str, name: str, target: str, place: str, value: object, words: str) -> None:
    manifests = overlay(name)
    assert CHECKS[check](manifests) == []

    _plant(manifests, target, place, value)

    findings = CHECKS[check](manifests)
    assert any(words in finding for finding in findings), findings


def test_every_check_has_a_planted_mistake() -> None:
    assert {check for check, *_ in MISTAKES} == set(CHECKS)


def _plant(manifests: Manifests, target: str, place: str, value: object) -> None:
    """Change one place; its parts are keys, indices of lists, and names of variables. Keys may hold dots."""
    kind, _, name = target.partition("/")
    node: Any = next(item for item in manifests.of_kind(kind) if item["metadata"]["name"].startswith(name))
    rest = place
    while True:
        key, rest = _first_key(node, rest)
        if not rest:
            break
        node = node[key]
    if isinstance(key, str) and isinstance(node, list):  # a variable that is not there yet
        node.append({"name": key, "value": value})
    elif value is REMOVED:
        del node[key]
    elif isinstance(key, int) and isinstance(value, str) and _name(node[key]):  # a variable
        node[key] = {"name": _name(node[key]), "value": value}
    else:
        node[key] = value


def _first_key(node: Any, place: str) -> tuple[str | int, str]:
    if isinstance(node, list):
        part, _, rest = place.partition(".")
        index = next((number for number, item in enumerate(node) if _name(item) == part), None)
        if index is not None:
            return index, rest
        return (int(part), rest) if part.isdecimal() else (part, rest)
    known = [key for key in node if place == key or place.startswith(f"{key}.")]
    if known:
        key = max(known, key=len)
        return key, place[len(key) + 1 :]
    return place, ""


def _name(item: Any) -> object:
    return item.get("name") if isinstance(item, dict) else None
