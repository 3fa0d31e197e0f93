"""The overlay `production`, installed with the commands of docs/kubernetes.md, and what it promises."""

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

from tests.cluster.conftest import LOAD_IMAGE, Load, num_streams, pod_of_ours
from tests.cluster.kube import NAMESPACE, OVERLAYS, ROOT, Object, get, is_ready, kubectl, pods, until
from tests.cluster.test_faults import kill, under
from tests.cluster.test_main_job import commands
from tests.k8s import manifests

OVERLAY = OVERLAYS / "production"
GATEWAY = Path(__file__).parent / "gateway.yaml"
TIERS = {"front": 2, "scheduler": 2, "executor": 3}
PROXIES = "envoy-gateway-system"
OUTSIDE = "octavo-outside"
REFUSED = {"openai": "AuthenticationError", "grpc": "UnauthenticatedError"}


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
        kubectl("apply", "--namespace=", "--filename", str(GATEWAY))
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

    def close_the_gateway(self) -> None:
        """Leave it as it was."""
        kubectl("label", "namespace", PROXIES, "octavo/client-")
        patch = json.dumps({"spec": {"tls": None}})
        kubectl("patch", "gateway", "public", "--namespace=ingress", "--type=merge", "--patch", patch)
        kubectl("delete", "--namespace=", "--filename", str(GATEWAY), "--ignore-not-found")
        kubectl("delete", "secret", "public-tls", "--namespace=ingress", "--ignore-not-found")
        kubectl("delete", "namespace", OUTSIDE, "--ignore-not-found")

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
def production(addons: None, gpus: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Production]:
    """The overlay, installed by the page."""
    made = Production(tmp_path_factory.mktemp("production"))
    began_s = time.monotonic()
    made.install()
    made.open_the_gateway()
    until(is_complete, "every tier is complete", 400)
    print(json.dumps({"installed_s": round(time.monotonic() - began_s)}), flush=True)
    yield made
    if "OCTAVO_CLUSTER_KEEP" not in os.environ:
        made.close_the_gateway()
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
    # Of families, since a counter of errors has no series until there is one.
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


CERTIFICATES = {
    "octavo-front-tls": ("front", "clients"),
    "octavo-front-internal-tls": ("front", "internal"),
    "octavo-scheduler-tls": ("scheduler", "clients"),
    "octavo-scheduler-internal-tls": ("scheduler", "internal"),
    "octavo-executor-tls": ("executor", "internal"),
}


def certificate_of(secret: str) -> str:
    """Return the certificate that lies in a Secret."""
    return b64decode(get("secret", secret)["data"]["tls.crt"]).decode()


def test_certificates_are_renewed_under_streams(production: Production) -> None:
    load = Load("client-tls", production.token)
    load.start(num_streams())
    old = {secret: certificate_of(secret) for secret in CERTIFICATES}
    issuing = {"type": "Issuing", "status": "True", "reason": "ManuallyTriggered", "message": "as `cmctl renew` does"}
    with under(load):
        for secret in CERTIFICATES:
            conditions = [*get("certificate", secret)["status"]["conditions"], issuing]
            patch = json.dumps({"status": {"conditions": conditions}})
            kubectl("patch", "certificate", secret, "--subresource=status", "--type=merge", "--patch", patch)
        until(lambda: all(certificate_of(secret) != old[secret] for secret in CERTIFICATES), "cert-manager renews", 120)
        began_s = time.monotonic()
        new = {secret: certificate_of(secret) for secret in CERTIFICATES}

        def is_mounted(secret: str) -> bool:
            tier, folder = CERTIFICATES[secret]
            read = ("cat", f"/etc/octavo-tls/{folder}/tls.crt")
            return all(kubectl("exec", pod["metadata"]["name"], "--", *read) == new[secret] for pod in pods(tier))

        until(lambda: all(map(is_mounted, CERTIFICATES)), "kubelets have written them", 180)
        print(json.dumps({"mounted_s": round(time.monotonic() - began_s)}), flush=True)
        serves = "import ssl; print(ssl.get_server_certificate(('octavo-openai', 8080)))"
        shown = kubectl("exec", "within", "--", "python", "-c", serves)
        assert new["octavo-front-tls"].startswith(shown.strip()), "the front shows the old one"
        # All links anew, one pod after the other.
        for tier in TIERS:
            kill(tier)
        time.sleep(30)
    load.stop()


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
