"""What refers to something refers to what is there: selectors, ports, mounts, certificates, targets of autoscalers."""

import re
from collections.abc import Iterator

from tests.k8s.manifests import IDENTITY, Manifests, Object, PodTemplate, environment, title
from tests.k8s.policies_settings import load_settings

# What somebody makes by hand, as docs/kubernetes.md says.
MADE_BY_HAND = {
    ("PersistentVolumeClaim", "octavo-models"),
    ("Secret", "octavo-client-tokens"),
    ("Secret", "octavo-prefix-key"),
    ("Secret", "octavo-hub-token"),
    ("Secret", "octavo-registry"),
    ("ConfigMap", "octavo-clients-ca"),
}
# Pods of others: those of the endpoint picker, which its chart brings, and clients.
OF_OTHERS = ("inferencepool", "octavo/client")
LABELS = ((("name", "octavo"), ("instance", None)), (("part-of", "octavo"),))
WORKLOADS = ("Deployment", "StatefulSet", "LeaderWorkerSet")


def check_selectors(manifests: Manifests) -> list[str]:
    """Selectors select pods, by identity alone; every pod is under one disruption budget."""
    findings = []
    for item in manifests.objects:
        if item["kind"] == "PodMonitor" and not manifests.selected(item["spec"]["selector"]):
            findings.append(f"{title(item)}: selects no pod")
            continue
        selector = _selector(item)
        if selector is None or any(label in str(selector) for label in OF_OTHERS):
            continue
        if not manifests.selected(selector):
            findings.append(f"{title(item)}: selects no pod")
        keys = set(selector.get("matchLabels", {})) | {rule["key"] for rule in selector.get("matchExpressions", [])}
        if not keys <= IDENTITY:
            findings.append(f"{title(item)}: selects by {', '.join(sorted(keys - IDENTITY))}")
    budgets = manifests.of_kind("PodDisruptionBudget")
    for pod in manifests.pod_templates():
        number = sum(pod in manifests.selected(item["spec"]["selector"]) for item in budgets)
        if number != 1:
            findings.append(f"{pod.owner}: is under {number} disruption budgets")
    findings += [
        f"{title(item)}: is not maxUnavailable 1 with AlwaysAllow"
        for item in budgets
        if item["spec"].get("maxUnavailable") != 1
        or item["spec"].get("unhealthyPodEvictionPolicy") != "AlwaysAllow"
        or "minAvailable" in item["spec"]
    ]
    return findings


def _selector(item: Object) -> Object | None:
    if item["kind"] == "Service":
        return {"matchLabels": item["spec"]["selector"]}
    if item["kind"] in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
        return dict(item["spec"]["selector"])
    if item["kind"] == "NetworkPolicy":
        return dict(item["spec"]["podSelector"])
    return None


# Services whose name stands for all pods of a tier, ready or not; clients are led to ready ones by one address.
OF_PEERS = ("-engine", "-executor", "-fronts")

# What the ports of services without certificates speak.
_PLAINTEXT = {"grpc": "kubernetes.io/h2c", "openai": "http"}


def check_services(manifests: Manifests) -> list[str]:
    """Ports lead to named ports of every selected container; peers find all pods; certificates have the names."""
    findings = []
    for item in manifests.of_kind("Service"):
        labels = item["spec"]["selector"]
        certificate = manifests.named("Certificate", f"octavo-{labels['app.kubernetes.io/component']}-tls")
        for port in item["spec"]["ports"]:
            for pod in manifests.selected({"matchLabels": item["spec"]["selector"]}):
                number = pod.port(str(port.get("targetPort")))
                if number is None:
                    findings.append(f"{title(item)}: {pod.owner} has no port {port.get('targetPort')}")
                elif port["name"] == "grpc" and number != port["port"]:
                    findings.append(f"{title(item)}: its port must be {number}, not {port['port']}")
            is_of_peers = item["metadata"]["name"].endswith(OF_PEERS)
            if is_of_peers != (item["spec"].get("clusterIP") == "None"):
                findings.append(f"{title(item)}: {'peers' if is_of_peers else 'clients'} find the wrong pods")
            if is_of_peers and not item["spec"].get("publishNotReadyAddresses"):
                findings.append(f"{title(item)}: one that is not ready yet is found late")
            if port["name"] not in _PLAINTEXT:
                continue
            expected = None if certificate else _PLAINTEXT[port["name"]]
            if port.get("appProtocol") != expected:
                findings.append(f"{title(item)}: appProtocol is {port.get('appProtocol')}, not {expected}")
            names = {item["metadata"]["name"]}
            if labels["app.kubernetes.io/component"] != "executor":  # clients may be in another namespace
                domains = (manifests.namespace, "svc", "cluster", "local")
                names |= {".".join((item["metadata"]["name"], *domains[:number])) for number in (1, 2, 4)}
            if certificate and (missing := names.difference(certificate["spec"]["dnsNames"])):
                findings.append(f"{title(item)}: {title(certificate)} lacks {', '.join(sorted(missing))}")
    for item in manifests.of_kind("PodMonitor"):
        for pod in manifests.selected(item["spec"]["selector"]):
            findings += [
                f"{title(item)}: {pod.owner} has no port {endpoint['port']}"
                for endpoint in item["spec"]["podMetricsEndpoints"]
                if pod.port(endpoint["port"]) is None
            ]
    return findings


def check_references(manifests: Manifests) -> list[str]:
    """ConfigMaps, Secrets, claims and accounts that pods name exist; mounts name volumes."""
    secrets = {item["spec"]["secretName"] for item in manifests.of_kind("Certificate")}
    findings = []
    for pod in manifests.pod_templates():
        for kind, name in _references(pod):
            made = name in secrets if kind == "Secret" else manifests.find(kind, name) is not None
            if not made and (kind, name) not in MADE_BY_HAND:
                findings.append(f"{pod.owner}: there is no {kind} {name}")
        volumes = {volume["name"] for volume in pod.spec.get("volumes", [])}
        mounted = {mount["name"] for item in pod.all_containers for mount in item.get("volumeMounts", [])}
        if volumes != mounted:
            findings.append(f"{pod.owner}: volumes {sorted(volumes)}, mounts {sorted(mounted)}")
    issuers = {item["metadata"]["name"] for item in manifests.of_kind("Issuer")}
    findings += [
        f"{title(item)}: there is no issuer {item['spec']['issuerRef']['name']}"
        for item in manifests.of_kind("Certificate")
        if item["spec"]["issuerRef"]["name"] not in issuers
    ]
    findings += [
        f"{title(item)}: there is no Secret {secret['name']}"
        for item in manifests.of_kind("ServiceAccount")
        for secret in item.get("imagePullSecrets", [])
        if ("Secret", secret["name"]) not in MADE_BY_HAND
    ]
    return findings + [
        f"{title(item)}: there is no certificate {item['spec']['ca']['secretName']}"
        for item in manifests.of_kind("Issuer")
        if item["spec"].get("ca", {}).get("secretName") not in {None, *secrets}
    ]


def _references(pod: PodTemplate) -> Iterator[tuple[str, str]]:
    yield "ServiceAccount", pod.spec.get("serviceAccountName", "default")
    if "priorityClassName" in pod.spec:
        yield "PriorityClass", pod.spec["priorityClassName"]
    for volume in pod.spec.get("volumes", []):
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"]
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]


def check_names(manifests: Manifests) -> list[str]:
    """Names that services dial are Services, and stand in the certificates that they will be shown."""
    services = {item["metadata"]["name"] for item in manifests.of_kind("Service")}
    findings = [
        f"{title(item)}: a Service of ours has the name of the one that its operator makes"
        for item in manifests.of_kind("LeaderWorkerSet")
        if item["metadata"]["name"] in services
    ]
    for pod in manifests.pod_templates():
        for container in pod.containers:
            findings += [
                f"{pod.owner}: dials {name}, which is no Service"
                for name in _dialled(manifests, pod, container)
                if name not in services
            ]
            for variable in ("OCTAVO_SCHEDULER_EXECUTOR_TLS_SERVER_NAME", "OCTAVO_FRONT_ENGINE_TLS_SERVER_NAME"):
                name = environment(container).get(variable)
                findings += _certificate_mistakes(manifests, pod.owner, name) if name else []
            findings += _front_mistakes(manifests, pod, container)
    return findings


def _front_mistakes(manifests: Manifests, pod: PodTemplate, container: Object) -> list[str]:
    """The engine trusts the name in the certificate of a front, and clients find their names in the one of fronts."""
    if container["name"] != "front" or "OCTAVO_FRONT_ENGINE_TLS_CERT" not in environment(container):
        return []
    scheduler = next(item for item in manifests.pod_templates() if item.component == "scheduler")
    trusted = environment(scheduler.containers[0]).get("OCTAVO_SCHEDULER_TRUSTED_FRONTS")
    shown = manifests.named("Certificate", "octavo-front-internal-tls")
    if shown is None or shown["spec"]["commonName"] != trusted:
        return [f"{pod.owner}: the engine trusts {trusted}, which is no name of a front"]
    served, known = (manifests.named("Certificate", f"octavo-{name}-tls") for name in ("front", "scheduler"))
    if served is None or known is None or not set(known["spec"]["dnsNames"]) <= set(served["spec"]["dnsNames"]):
        return [f"{pod.owner}: serves under other names than the scheduler"]
    return []


def _certificate_mistakes(manifests: Manifests, who: str, name: str) -> list[str]:
    certificate = manifests.find("Certificate", f"{name}-tls")
    if certificate is None or name not in certificate["spec"]["dnsNames"]:
        return [f"{who}: expects {name} in a certificate that lacks it"]
    return []


def _dialled(manifests: Manifests, pod: PodTemplate, container: Object) -> list[str]:
    """Return the names that executors and engines are looked up by."""
    setting = {"scheduler": "executor", "front": "engine"}.get(container["name"], "")
    config, _ = load_settings(manifests, pod, container)
    return re.findall(r"([^/,='\s]+):\d+", str(getattr(config, setting, "")))


def check_encryption(manifests: Manifests) -> list[str]:
    """With certificates every hop is encrypted, and shows a certificate of its own."""
    if not manifests.of_kind("Certificate"):
        return []
    findings = []
    for pod in manifests.pod_templates():
        for container in pod.containers:
            config, _ = load_settings(manifests, pod, container)
            if config is not None and pod.leader and not (config.tls_cert and config.tls_client_ca):
                findings.append(f"{pod.owner}: serves without mutual TLS")
            if getattr(config, "engine_listen", None) and not getattr(config, "front_tls_ca", None):
                findings.append(f"{pod.owner}: fronts join without mutual TLS")
    return findings


def check_labels(manifests: Manifests) -> list[str]:
    """Every object, and every pod, says what it belongs to."""
    findings = [
        f"{title(item)}: has no label app.kubernetes.io/{key}"
        for item in manifests.objects
        for key, value in LABELS[item["kind"] == "ConfigMap"]
        if item["metadata"].get("labels", {}).get(f"app.kubernetes.io/{key}") != (value or manifests.cell)
    ]
    return findings + [
        f"{pod.owner}: its pods have no label {key}"
        for pod in manifests.pod_templates()
        for key in (*sorted(IDENTITY), "app.kubernetes.io/part-of")
        if not pod.labels.get(key)
    ]
