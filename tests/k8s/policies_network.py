"""The network policies allow the paths that are needed, exactly.

A path is (who may call, who is called, port). The policies of a rendering are turned into the set of all paths, which
is compared with what its tiers need.
"""

from collections.abc import Iterator

from tests.k8s.manifests import Manifests, Object, PodTemplate, environment, title

Path = tuple[str, str, str]

ANY = "anybody"
CLIENTS = "pods with octavo/client"
CLIENT_NAMESPACES = "namespaces with octavo/client"
PROMETHEUS = "prometheus in monitoring"
DNS = "cluster DNS"
COLLECTOR = "opentelemetry-collector in monitoring"
INTERNET = "any address"
PICKER = "endpoint picker"
RANKS = "1024-65535"


def _pods(key: str, value: str) -> Object:
    """Return a selector of pods of others, which kustomize gives no labels of ours."""
    return {"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]}


def _namespace(name: str) -> Object:
    return {"matchLabels": {"kubernetes.io/metadata.name": name}}


_PEERS = {
    CLIENTS: {"podSelector": _pods("octavo/client", "true")},
    CLIENT_NAMESPACES: {"namespaceSelector": {"matchLabels": {"octavo/client": "true"}}},
    PROMETHEUS: {
        "namespaceSelector": _namespace("monitoring"),
        "podSelector": _pods("app.kubernetes.io/name", "prometheus"),
    },
    DNS: {"namespaceSelector": _namespace("kube-system"), "podSelector": _pods("k8s-app", "kube-dns")},
    COLLECTOR: {
        "namespaceSelector": _namespace("monitoring"),
        "podSelector": _pods("app.kubernetes.io/name", "opentelemetry-collector"),
    },
    PICKER: {"podSelector": _pods("inferencepool", "octavo-epp")},
    INTERNET: {"ipBlock": {"cidr": "0.0.0.0/0"}},
}

_CLIENT_PATHS = {
    tier: {(client, tier, port) for client in (CLIENTS, CLIENT_NAMESPACES) for port in ("50051", "8080")}
    for tier in ("scheduler", "front")
}
_INGRESS: dict[str, set[Path]] = {
    "scheduler": {*_CLIENT_PATHS["scheduler"], (ANY, "scheduler", "50053")},
    "front": {*_CLIENT_PATHS["front"], (ANY, "front", "50053"), ("front", "scheduler", "50054")},
    "executor": {*((tier, "executor", "50061") for tier in ("scheduler", "executor")), (ANY, "executor", "50063")},
    "executor-rank": {
        (one, other, RANKS) for one in ("executor", "executor-rank") for other in ("executor", "executor-rank")
    },
}
# Who announces itself to whom, by the health port that is open to anybody.
_ANNOUNCEMENTS = {("executor", "scheduler", "50053"), ("scheduler", "front", "50053")}
_METRICS = {"scheduler": "9090", "front": "9090", "executor": "9090"}
_DOWNLOADS = {"cpu-demo", "one-gpu"}


def check_network(manifests: Manifests) -> list[str]:
    """Nothing is open but the paths in this file, and each of them is open at both of its ends."""
    findings = []
    tiers = {pod.component for pod in manifests.pod_templates()}
    expected_in = set().union(*(_INGRESS[tier] for tier in tiers))
    if "front" in tiers:  # clients have fronts for that
        expected_in -= _CLIENT_PATHS["scheduler"]
    expected_out = {path for path in expected_in if path[0] in tiers}
    expected_out |= {path for path in _ANNOUNCEMENTS if tiers.issuperset(path[:2])}
    expected_out |= {path for path in expected_in if path[0] == CLIENTS}
    expected_out |= {(tier, DNS, f"{protocol} 53") for tier in tiers for protocol in ("TCP", "UDP")}
    if manifests.of_kind("PodMonitor"):
        expected_in |= {(PROMETHEUS, tier, port) for tier, port in _METRICS.items() if tier in tiers}
    expected_out |= {(tier, COLLECTOR, "4317") for tier in _traced_tiers(manifests)}
    if manifests.of_kind("InferencePool"):
        expected_in.add((PICKER, "front", "9090"))
    if manifests.name in _DOWNLOADS:
        expected_out.add(("executor", INTERNET, "443"))
    for direction, expected in (("Ingress", expected_in), ("Egress", expected_out)):
        allowed = set(_paths(manifests, direction))
        findings += [f"{direction}: {' -> '.join(path)} is open" for path in sorted(allowed - expected)]
        findings += [f"{direction}: {' -> '.join(path)} is needed" for path in sorted(expected - allowed)]
        if not any(_denies_everything(item, direction) for item in manifests.of_kind("NetworkPolicy")):
            findings.append(f"{direction}: a pod that no policy selects may do anything")
    return findings


def _traced_tiers(manifests: Manifests) -> set[str]:
    return {
        pod.component
        for pod in manifests.pod_templates()
        for container in pod.containers
        if "OTEL_EXPORTER_OTLP_ENDPOINT" in environment(container)
    }


def _denies_everything(policy: Object, direction: str) -> bool:
    spec = policy["spec"]
    return spec["podSelector"] == {} and direction in spec["policyTypes"] and not spec.keys() & {"ingress", "egress"}


def _paths(manifests: Manifests, direction: str) -> Iterator[Path]:
    for policy in manifests.of_kind("NetworkPolicy"):
        selector = policy["spec"]["podSelector"]
        if direction == "Egress" and selector == _PEERS[CLIENTS]["podSelector"]:
            for rule in policy["spec"]["egress"]:
                for peer in _peers(manifests, policy, rule["to"]):
                    yield from ((CLIENTS, peer, port) for port in _ports(rule, manifests.pod_templates(), peer))
        for pod in manifests.selected(selector):
            for rule in policy["spec"].get(direction.lower(), []):
                for peer in _peers(manifests, policy, rule.get("from" if direction == "Ingress" else "to")):
                    callee = [pod] if direction == "Ingress" else manifests.pod_templates()
                    for port in _ports(rule, callee, peer):
                        yield (peer, pod.component, port) if direction == "Ingress" else (pod.component, peer, port)


def _peers(manifests: Manifests, policy: Object, peers: list[Object] | None) -> Iterator[str]:
    if not peers:
        yield ANY
        return
    for peer in peers:
        known = next((name for name, value in _PEERS.items() if value == peer), None)
        if known:
            yield known
        elif peer.keys() == {"podSelector"}:
            yield from {pod.component for pod in manifests.selected(peer["podSelector"])} or {"nobody"}
        else:
            yield f"{title(policy)}: {peer}"


def _ports(rule: Object, callees: list[PodTemplate], peer: str) -> Iterator[str]:
    for port in rule.get("ports") or [{"port": "any port"}]:
        protocol = f"{port.get('protocol', 'TCP')} " if peer == DNS else ""
        if "endPort" in port:
            yield f"{port['port']}-{port['endPort']}"
        elif isinstance(port["port"], int) or len(callees) != 1:
            yield f"{protocol}{port['port']}"
        else:
            yield str(callees[0].port(port["port"]) or port["port"])
