"""A cell on a cluster, under load. Without a cluster every test is skipped, with one sentence."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kube import NAMESPACE, OVERLAYS, Object, apply, get, kubectl, machine, rolled_out, until

LOAD_IMAGE = "registry.example.com/octavo/client:test"
MODELS = Path("/var/tmp/octavo-models")
# Each with one of its definitions.
ADDONS = {
    "cert-manager": "certificates.cert-manager.io",
    "keda": "scaledobjects.keda.sh",
    "prometheus": "podmonitors.monitoring.coreos.com",
    "envoy-gateway": "backendtlspolicies.gateway.networking.k8s.io",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; skip them where there is no cluster."""
    # Never a cluster that somebody happens to work with.
    is_asked = os.environ.get("OCTAVO_CLUSTER_TEST") and shutil.which("kubectl")
    reason = None if is_asked else "no cluster: `make cluster-test` starts or takes one"
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def pod_of_ours(name: str, image: str, command: list[str], labels: dict[str, str]) -> Object:
    """Return a restricted pod, for the first node; a drain of the others leaves it alone."""
    container = {
        "name": name,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "nodeSelector": {"kubernetes.io/hostname": get("nodes")[0]["metadata"]["name"]},
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


@dataclass(frozen=True)
class Answer:
    """A line of load.py."""

    kind: str
    began_s: float
    ended_s: float
    pause_s: float
    error: str
    wrong: str


class Load:
    """Streams of known answers against the Services of the namespace, from a pod in it.

    With the name of a Secret, which has ca.crt, tls.crt and tls.key, by TLS; `token` is what its clients show.
    """

    name = "load"

    def __init__(self, secret: str = "", token: str = "") -> None:
        self._secret = secret
        self._token = token

    def start(self, num_streams: int) -> None:
        """Start them, and return once they run."""
        source = (Path(__file__).parent / "load.py").read_text(encoding="utf-8")
        command = [
            "python",
            "/load/load.py",
            "octavo-scheduler:50051",
            f"http{'s' if self._secret else ''}://octavo-openai:8080/v1",
            str(num_streams),
            *(["/tls", self._token] if self._secret else []),
        ]
        pod = pod_of_ours(self.name, LOAD_IMAGE, command, {"octavo/client": "true"})
        volumes = {"load": {"configMap": {"name": "load"}}}
        volumes |= {"tls": {"secret": {"secretName": self._secret}}} if self._secret else {}
        pod["spec"]["containers"][0]["volumeMounts"] = [{"name": each, "mountPath": f"/{each}"} for each in volumes]
        pod["spec"]["volumes"] = [{"name": each, **source} for each, source in volumes.items()]
        config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "load"}, "data": {"load.py": source}}
        for item in (config, pod):
            kubectl("apply", "--filename", "-", stdin=json.dumps(item))
        until(lambda: self._lines(), "the load has learned its answers", 180)

    def _lines(self) -> list[dict[str, Any]]:
        try:
            printed = kubectl("logs", self.name).splitlines()
        except AssertionError:
            return []
        assert not any(line.startswith("Traceback") for line in printed), "\n".join(printed[-20:])
        return [json.loads(line) for line in printed]

    def answers(self, since_s: float, until_s: float) -> list[Answer]:
        """Return the answers of which a part came in this time."""
        lines = [Answer(**line) for line in self._lines() if line["kind"] != "answers"]
        return [line for line in lines if line.ended_s >= since_s and line.began_s <= until_s]

    def stop(self) -> None:
        """End them."""
        kubectl("delete", "pod/load", "configmap/load", "--ignore-not-found", "--now")


@pytest.fixture(scope="session")
def namespace() -> Iterator[None]:
    """No namespace yet; it is gone at the end, unless it is to be looked at."""
    keeps = "OCTAVO_CLUSTER_KEEP" in os.environ
    there = subprocess.run(["kubectl", "get", "namespace", NAMESPACE], capture_output=True, check=False).returncode == 0
    if there and not keeps:
        pytest.exit(f"the cluster has a namespace {NAMESPACE}, which these tests would delete", returncode=1)
    yield
    if not keeps:
        subprocess.run(["kubectl", "delete", "namespace", NAMESPACE, "--ignore-not-found"], check=True, timeout=300)


def num_streams() -> int:
    """Return how many streams a load has."""
    return int(os.environ.get("OCTAVO_CLUSTER_STREAMS", "32"))


def installed(overlay: str) -> Iterator[Load]:
    """Yield the load of a cell that runs."""
    apply(OVERLAYS / overlay)
    rolled_out("deployment/octavo-executor", "statefulset/octavo-scheduler")
    load = Load()
    load.start(num_streams())
    time.sleep(5)
    yield load
    load.stop()
    if "OCTAVO_CLUSTER_KEEP" not in os.environ:
        kubectl("delete", "--wait", "--kustomize", str(OVERLAYS / overlay), timeout_s=300)


@pytest.fixture(scope="module")
def cell(namespace: None) -> Iterator[Load]:
    """Two fronts, two schedulers, three executors, under load."""
    yield from installed("cell")


@pytest.fixture(scope="module")
def single(namespace: None) -> Iterator[Load]:
    """One scheduler and two executors, under load."""
    yield from installed("single")


@pytest.fixture(scope="session")
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
def gpus(namespace: None) -> Iterator[None]:
    """Nodes say that they have GPUs."""
    path = "/status/capacity/nvidia.com~1gpu"
    nodes = [node["metadata"]["name"] for node in get("nodes") if "nvidia.com/gpu" not in node["status"]["capacity"]]

    def patch(change: Object) -> None:
        for node in nodes:
            kubectl("patch", "node", node, "--subresource=status", "--type=json", "--patch", json.dumps([change]))

    patch({"op": "add", "path": path, "value": "2"})
    yield
    patch({"op": "remove", "path": path})
