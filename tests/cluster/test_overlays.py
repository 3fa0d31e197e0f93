"""Every overlay is admitted as it is; `production` runs, with the commands of docs/kubernetes.md."""

import json
import os
import re
import secrets
import subprocess
import time
import urllib.parse
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import LOAD_IMAGE, pod_of_ours
from tests.cluster.kube import NAMESPACE, OVERLAYS, ROOT, Object, get, is_ready, kubectl, machine, pods, until
from tests.cluster.test_main_job import commands
from tests.k8s import manifests

ADDONS = {
    "cert-manager": "certificates.cert-manager.io",
    "keda": "scaledobjects.keda.sh",
    "prometheus": "podmonitors.monitoring.coreos.com",
    "envoy-gateway": "backendtlspolicies.gateway.networking.k8s.io",
}
# Kinds whose operators no cluster of ours has; their fields are checked by tests/k8s.
FOREIGN = {("leaderworkerset.x-k8s.io", "LeaderWorkerSet"), ("inference.networking.k8s.io", "InferencePool")}
OVERLAY = OVERLAYS / "production"
TIERS = {"front": 2, "scheduler": 2, "executor": 3}
PROXIES = "envoy-gateway-system"
OUTSIDE = "octavo-outside"
REFUSED = {"openai": "AuthenticationError", "grpc": "UnauthenticatedError"}


@pytest.fixture(scope="module")
def addons(namespace: None) -> None:
    """What `production` needs of a cluster: it is there, or the program that runs the cluster adds it."""
    there = kubectl("get", "crd", "--output", "name")
    missing = [name for name, definition in ADDONS.items() if f"/{definition}\n" not in there]
    if missing and os.environ.get("CLUSTER", "kind") not in ("kind", "k3s"):
        try:
            for name in missing:
                machine("add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no {', '.join(missing)}: {error.stderr.decode()}")
    elif missing:
        pytest.skip(f"the cluster has no {', '.join(missing)}")


@pytest.fixture(scope="module")
def definitions(addons: None) -> Iterator[None]:
    """The namespace, which reads warnings of pod security, and kinds of operators that are not there."""
    made = [_definition(group, kind) for group, kind in FOREIGN]
    space = (ROOT / "k8s/base/namespace.yaml").read_text(encoding="utf-8")
    kubectl("apply", "--filename", "-", stdin=yaml.safe_dump_all([*made, yaml.safe_load(space)]))
    for item in made:
        kubectl("wait", "--for=condition=Established", f"crd/{item['metadata']['name']}", "--timeout=30s")
    yield
    kubectl("delete", "crd", *(item["metadata"]["name"] for item in made))
    kubectl("delete", "namespace", NAMESPACE)


def _definition(group: str, kind: str) -> Object:
    plural = f"{kind.lower()}s"
    anything = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": anything}],
        },
    }


@pytest.mark.parametrize("name", [*manifests.OVERLAYS, *map("+".join, manifests.COMBINATIONS)])
def test_the_api_server_takes_it_without_a_warning(definitions: None, name: str) -> None:
    rendered = (
        manifests.overlay(name) if name in manifests.OVERLAYS else manifests.components(*name.split("+"))
    ).objects
    strictly = ("--server-side", "--validate=strict", "--warnings-as-errors", "--dry-run=server")

    kubectl("apply", *strictly, "--filename", "-", stdin=yaml.safe_dump_all(rendered))


@pytest.fixture(scope="module")
def gpus(addons: None) -> Iterator[None]:
    """Nodes say that they have GPUs."""
    path = "/status/capacity/nvidia.com~1gpu"
    nodes = [node["metadata"]["name"] for node in get("nodes") if "nvidia.com/gpu" not in node["status"]["capacity"]]

    def patch(change: Object) -> None:
        for node in nodes:
            kubectl("patch", "node", node, "--subresource=status", "--type=json", "--patch", json.dumps([change]))

    patch({"op": "add", "path": path, "value": "2"})
    yield
    patch({"op": "remove", "path": path})


class Production:
    """The overlay `production`, and clients in it and outside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = secrets.token_hex(16)

    def write_tokens(self) -> None:
        """Make another token, the only one that counts."""
        self.token = secrets.token_hex(16)
        (self.folder / "FILE").write_text(f"acme {self.token}\n", encoding="utf-8")

    def install(self) -> None:
        """Run the commands of the page, with what it tells to replace replaced."""
        self.write_tokens()
        for command in commands("Production"):
            command = command.replace("k8s/overlays/production", str(OVERLAY))
            # "The label belongs on the namespace in which the Gateway's proxies run."
            command = command.replace("namespace ingress", f"namespace {PROXIES}")
            if not command.startswith("curl"):
                self.run(command)

    def run(self, command: str) -> None:
        """Run a command of the page."""
        done = subprocess.run(["bash", "-c", command], cwd=self.folder, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, f"{command}: {done.stderr}"

    def open_the_gateway(self) -> None:
        """Do what the page says of the Gateway."""
        kubectl("apply", "--namespace=", "--filename", str(Path(__file__).parent / "gateway.yaml"))
        reference = {"name": "octavo-gateway-tls", "namespace": NAMESPACE}
        patch = json.dumps({"spec": {"tls": {"backend": {"clientCertificateRef": reference}}}})
        kubectl("patch", "gateway", "public", "--namespace=ingress", "--type=merge", "--patch", patch)
        for space in (NAMESPACE, "ingress"):
            kubectl("wait", "--namespace", space, "--for=condition=Ready", "certificate", "--all", "--timeout=60s")
        of_gateway = "gateway.envoyproxy.io/owning-gateway-name=public"
        [service] = until(lambda: get("service", "--namespace", PROXIES, "--selector", of_gateway), "Envoy's Service")
        shown = {name: {"secret": {"secretName": name}} for name in ("client-tls", "octavo-operator-tls")}
        shown["octavo-clients-ca"] = {"configMap": {"name": "octavo-clients-ca"}}
        self._client("within", NAMESPACE, {"octavo/client": "true"}, shown, {})
        kubectl("create", "namespace", OUTSIDE)
        authority = b64decode(get("secret", "public-tls", "--namespace=ingress")["data"]["ca.crt"]).decode()
        kubectl("create", "configmap", "public-ca", "--namespace", OUTSIDE, f"--from-literal=ca.crt={authority}")
        hosts = {service["spec"]["clusterIP"]: ["llm.example.com", "grpc.llm.example.com"]}
        self._client("outside", OUTSIDE, {}, {"public-ca": {"configMap": {"name": "public-ca"}}}, hosts)

    def _client(self, name: str, space: str, labels: dict[str, str], shown: Object, hosts: Object) -> None:
        pod = pod_of_ours(name, LOAD_IMAGE, ["sleep", "infinity"], labels)
        spec = pod["spec"]
        spec["hostAliases"] = [{"ip": address, "hostnames": aliases} for address, aliases in hosts.items()]
        spec["volumes"] = [{"name": each, **source} for each, source in shown.items()]
        spec["containers"][0]["volumeMounts"] = [{"name": each, "mountPath": f"/tls/{each}"} for each in shown]
        kubectl("apply", "--namespace", space, "--filename", "-", stdin=json.dumps(pod))
        kubectl("wait", "--namespace", space, "--for=condition=Ready", f"pod/{name}", "--timeout=60s")

    def ask(self, pod: str, space: str, questions: list[tuple[str, str, str, str]]) -> dict[str, str]:
        """Return what each of them got: see ask.py."""
        source = (Path(__file__).parent / "ask.py").read_text(encoding="utf-8")
        command = ("python", "-", json.dumps(questions))
        printed = kubectl("exec", "--stdin", "--namespace", space, pod, "--", *command, stdin=source)
        return dict(json.loads(printed))

    def outside(self, token: str) -> dict[str, str]:
        """Ask through the Gateway."""
        doors = (("openai", "https://llm.example.com/v1"), ("grpc", "grpc.llm.example.com:443"))
        return self.ask("outside", OUTSIDE, [(name, door, token, "/tls/public-ca") for name, door in doors])


@pytest.fixture(scope="module")
def production(gpus: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Production]:
    """The overlay, installed by the page."""
    made = Production(tmp_path_factory.mktemp("production"))
    began_s = time.monotonic()
    made.install()
    made.open_the_gateway()
    until(is_complete, "every tier is complete", 400)
    print(json.dumps({"installed_s": round(time.monotonic() - began_s)}), flush=True)
    yield made
    if "OCTAVO_CLUSTER_KEEP" not in os.environ:
        kubectl("label", "namespace", PROXIES, "octavo/client-")
        kubectl("delete", "namespace", OUTSIDE, "--ignore-not-found", "--wait=false")
        kubectl("delete", "--kustomize", str(OVERLAY), "--ignore-not-found", timeout_s=300)


def is_complete() -> bool:
    """Return whether every tier has its pods, all ready."""
    return all([is_ready(pod) for pod in pods(tier)] == [True] * number for tier, number in TIERS.items())


def holds(item: Object, *wanted: str) -> bool:
    """Return whether the conditions of an object are true."""
    true = {one["type"] for one in item.get("status", {}).get("conditions", []) if one["status"] == "True"}
    return true >= set(wanted)


def test_certificates_and_routes_are_accepted(production: Production) -> None:
    assert [item["metadata"]["name"] for item in get("certificates") if not holds(item, "Ready")] == []
    routes = [
        parent for kind in ("httproutes", "grpcroutes") for item in get(kind) for parent in item["status"]["parents"]
    ]
    [policy] = get("backendtlspolicies")
    ancestors = policy["status"]["ancestors"]
    assert len(routes) == 2
    assert [item for item in (*routes, *ancestors) if not holds({"status": item}, "Accepted", "ResolvedRefs")] == []
    assert holds(get("gateway", "public", "--namespace=ingress"), "Accepted", "Programmed")


def is_answered(found: dict[str, str]) -> bool:
    """Return whether every door answered."""
    return all("Tokyo" in answer for answer in found.values())


def test_a_token_is_answered_through_the_gateway_and_nobody_else(production: Production) -> None:
    until(lambda: is_answered(production.outside(production.token)), "the Gateway has its routes", 60)

    assert production.outside("") == REFUSED
    assert production.outside("another") == REFUSED


def test_within_the_cluster_a_certificate_and_a_token_are_needed(production: Production) -> None:
    rights = {
        "both": (production.token, "/tls/client-tls"),
        "no token": ("", "/tls/client-tls"),
        "operator": ("", "/tls/octavo-operator-tls"),
        "no certificate": (production.token, "/tls/octavo-clients-ca"),
    }
    doors = {"openai": "https://octavo-openai:8080/v1", "grpc": "octavo-scheduler:50051"}
    found = {
        name: production.ask("within", NAMESPACE, [(kind, door, *right) for kind, door in doors.items()])
        for name, right in rights.items()
    }

    assert is_answered(found["both"])
    assert is_answered(found["operator"])
    assert found["no token"] == REFUSED
    assert found["no certificate"] == {"openai": "APIConnectionError", "grpc": "TlsHandshakeError"}


def prometheus(path: str, **parameters: str) -> Any:
    """Return what Prometheus answers."""
    query = urllib.parse.urlencode(parameters)
    service = "/api/v1/namespaces/monitoring/services/prometheus-operated:9090/proxy"
    answer = json.loads(kubectl("get", "--raw", f"{service}/api/v1/{path}?{query}"))
    assert answer["status"] == "success", answer
    return answer["data"]


def test_prometheus_has_every_metric_that_manifests_name(production: Production) -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "k8s").rglob("*.*") if path.is_file())
    named = set(re.findall(r"(?<![:\w.-])octavo_[a-z_0-9]+", text))
    assert len(named) > 20
    # Families, since a counter of errors has no series until there is one.
    families = {re.sub("_total$", "", name) for name in prometheus("metadata")}
    found = {name for name in named if re.sub("_(total|bucket|sum|count)$", "", name) in families}
    assert named - found == set()


def test_what_autoscalers_ask_is_answered(production: Production) -> None:
    scaled = get("scaledobjects")
    queries = [trigger["metadata"]["query"] for item in scaled for trigger in item["spec"]["triggers"]]
    assert len(queries) == 3
    for query in queries:
        assert len(prometheus("query", query=query)["result"]) == 1, query
    until(lambda: all(holds(item, "Ready") for item in get("scaledobjects")), "ScaledObjects are ready")
    until(
        lambda: all(holds(item, "ScalingActive", "AbleToScale") for item in get("hpa")),
        "each autoscaler has a value for each metric",
        180,
    )
    scalers = {item["metadata"]["name"]: item for item in get("hpa")}
    assert set(scalers) == {"octavo-front", "keda-hpa-octavo-executor", "keda-hpa-octavo-scheduler"}
    for name, scaler in scalers.items():
        current = scaler["status"]["currentMetrics"]
        assert len(current) == len(scaler["spec"]["metrics"]), name
        assert all(value["current"] for metric in current for key, value in metric.items() if key != "type"), name


def test_another_token_counts_without_a_restart(production: Production) -> None:
    before = [pod["metadata"]["uid"] for tier in TIERS for pod in pods(tier)]
    old = production.token
    production.write_tokens()
    [create] = [line for line in commands("Production") if "octavo-client-tokens" in line]
    began_s = time.monotonic()
    production.run(f"{create} --dry-run=client --output=yaml | kubectl apply -f -")

    until(lambda: is_answered(production.outside(production.token)), "the new token counts", 180)
    print(json.dumps({"token_s": round(time.monotonic() - began_s)}), flush=True)
    # Each front reads the file by itself.
    until(lambda: production.outside(old) == REFUSED, "the old token is gone")
    assert [pod["metadata"]["uid"] for tier in TIERS for pod in pods(tier)] == before


@contextmanager
def ready_of(deployment: str) -> Iterator[list[int]]:
    """Note how many pods of a Deployment are ready, whenever it changes."""
    seen: list[int] = []
    command = ["kubectl", "--namespace", NAMESPACE, "get", deployment, "--watch"]
    command += ["--output", 'jsonpath={.status.readyReplicas}{"\\n"}']
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        seen.append(int(process.stdout.readline().strip() or 0))
        yield seen
    finally:
        process.terminate()
        seen += [int(line or 0) for line in process.communicate()[0].splitlines()]


@pytest.mark.parametrize("side", [(), ("--server-side", "--force-conflicts")], ids=["client-side", "server-side"])
def test_from_fixed_replicas_to_an_autoscaler_no_pod_goes(production: Production, side: tuple[str, ...]) -> None:
    kubectl("delete", "scaledobject,hpa", "--all", timeout_s=200)
    fixed = [
        item
        for item in manifests.parse(kubectl("kustomize", str(OVERLAY)))
        if item["kind"] not in ("ScaledObject", "HorizontalPodAutoscaler")
    ]
    for item in fixed:
        if item["kind"] in ("Deployment", "StatefulSet"):
            item["spec"]["replicas"] = TIERS[item["metadata"]["labels"]["app.kubernetes.io/component"]]
    kubectl("apply", *side, "--filename", "-", stdin=yaml.safe_dump_all(fixed))
    until(is_complete, "every tier is complete")
    half = len(of_both := commands("Autoscaling")) // 2

    with ready_of("deployment/octavo-executor") as executors, ready_of("deployment/octavo-front") as fronts:
        for command in of_both[half:] if side else of_both[:half]:
            production.run(command.replace("k8s/overlays/production", str(OVERLAY)))
        until(lambda: len(get("hpa")) == len(TIERS), "there are autoscalers")
        time.sleep(20)

    assert min(executors) == TIERS["executor"]
    assert min(fronts) == TIERS["front"]
    assert is_complete()


def test_nothing_is_left(production: Production) -> None:
    began_s = time.monotonic()
    kubectl("delete", "--kustomize", str(OVERLAY), timeout_s=300)
    print(json.dumps({"deleted_s": round(time.monotonic() - began_s)}), flush=True)
    left = kubectl("get", "all,secret,configmap,pvc,scaledobject,certificate", "--output", "name")
    assert left == ""
