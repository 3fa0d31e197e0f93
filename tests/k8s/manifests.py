"""What kustomize renders, and the few questions that the checks ask of it."""

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[2]
K8S = REPOSITORY / "k8s"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
COMPONENTS = sorted(path.name for path in (K8S / "components").iterdir())
BIN = Path(sys.executable).parent

# Each component by itself, with those that it needs, and what no overlay puts together.
COMBINATIONS = [
    ("client-tokens",),
    ("fronts",),
    ("fronts", "client-tokens", "tracing"),
    ("mtls", "fronts", "fronts-mtls"),
    ("mtls", "fronts", "fronts-mtls", "client-tokens", "gateway", "inference-pool"),
    ("fronts", "monitoring", "fronts-hpa", "hpa"),
    ("gpu",),
    ("hpa",),
    ("leader-worker-set",),
    ("leader-worker-set", "mtls"),
    ("mtls",),
    ("mtls", "client-tokens"),
    ("monitoring",),
    ("monitoring", "keda"),
    ("prefix-key",),
    ("fronts", "placement"),
    ("tracing",),
]

IDENTITY = frozenset(f"app.kubernetes.io/{key}" for key in ("name", "instance", "component"))

Object = dict[str, Any]


@dataclass(frozen=True)
class PodTemplate:
    """The template of a workload's pods. `leader` is false for the ranks of a group that serve nothing."""

    owner: str
    labels: Mapping[str, str]
    spec: Object
    group_size: int = 1
    leader: bool = True

    @property
    def component(self) -> str:
        """The value of app.kubernetes.io/component."""
        return self.labels.get("app.kubernetes.io/component", "")

    @property
    def containers(self) -> list[Object]:
        """The containers that stay."""
        return list(self.spec["containers"])

    @property
    def all_containers(self) -> list[Object]:
        """Init containers too."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    def port(self, name: str) -> int | None:
        """Return the number of the container port `name`."""
        for container in self.containers:
            for port in container.get("ports", []):
                if port.get("name") == name:
                    return int(port["containerPort"])
        return None


@dataclass(frozen=True)
class Manifests:
    """The objects of one rendering."""

    name: str
    objects: Sequence[Object]

    @property
    def namespace(self) -> str:
        """The namespace of all objects."""
        return str(self.of_kind("Namespace")[0]["metadata"]["name"])

    @property
    def cell(self) -> str:
        """The value of app.kubernetes.io/instance."""
        pod = next(pod for pod in self.pod_templates() if pod.component == "scheduler")
        return pod.labels["app.kubernetes.io/instance"]

    def of_kind(self, *kinds: str) -> list[Object]:
        """Return the objects of the kinds, in order."""
        return [item for item in self.objects if item["kind"] in kinds]

    def find(self, kind: str, name: str) -> Object | None:
        """Return the object, or None."""
        return next((item for item in self.of_kind(kind) if item["metadata"]["name"] == name), None)

    def named(self, kind: str, name: str) -> Object | None:
        """Return the object of this name, with the prefix that an overlay may have set."""
        return next((item for item in self.of_kind(kind) if _is_named(item, name)), None)

    def pod_templates(self) -> list[PodTemplate]:
        """Return the templates of all workloads."""
        return [template for item in self.objects for template in _templates(item)]

    def selected(self, selector: Mapping[str, Any]) -> list[PodTemplate]:
        """Return the pods that a label selector selects."""
        return [pod for pod in self.pod_templates() if selects(selector, pod.labels)]


def _is_named(item: Object, name: str) -> bool:
    return f"-{item['metadata']['name']}".endswith(f"-{name}")


def _templates(item: Object) -> Iterator[PodTemplate]:
    owner = title(item)
    if item["kind"] in ("Deployment", "StatefulSet", "Job"):
        template = item["spec"]["template"]
        yield PodTemplate(owner, template["metadata"]["labels"], template["spec"])
    elif item["kind"] == "LeaderWorkerSet":
        group = item["spec"]["leaderWorkerTemplate"]
        for name, leader in (("leaderTemplate", True), ("workerTemplate", False)):
            template = group[name]
            yield PodTemplate(
                f"{owner} {name}", template["metadata"]["labels"], template["spec"], group["size"], leader
            )


def title(item: Object) -> str:
    """Return how a finding names the object."""
    return f"{item['kind']}/{item['metadata']['name']}"


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Say whether a LabelSelector selects labels; of expressions only In is known."""
    wanted = selector.get("matchLabels", {})
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In", expression
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return True


def environment(container: Object) -> dict[str, str]:
    """Return the variables that have a literal value."""
    return {item["name"]: item["value"] for item in container.get("env", []) if "value" in item}


@functools.cache
def _render(directory: Path) -> str:
    command = [str(BIN / "kubectl"), "kustomize", str(directory)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if run.returncode != 0:
        raise AssertionError(f"kustomize cannot render {directory.name}: {run.stderr}")
    if run.stderr:
        raise AssertionError(f"kustomize warns about {directory.name}: {run.stderr}")
    return run.stdout


def overlay(name: str) -> Manifests:
    """Return an overlay, freshly parsed: the caller may change it."""
    return Manifests(name, parse(_render(K8S / "overlays" / name)))


def _render_kustomization(**fields: Any) -> str:
    """Render a kustomization whose paths begin with K8S/."""
    with tempfile.TemporaryDirectory() as work:
        kustomization = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", **fields}
        text = yaml.safe_dump(kustomization).replace("K8S/", f"{os.path.relpath(K8S, Path(work).resolve())}/")
        (Path(work) / "kustomization.yaml").write_text(text, encoding="utf-8")
        return _render.__wrapped__(Path(work))


@functools.cache
def _render_components(names: tuple[str, ...]) -> str:
    return _render_kustomization(
        namespace="octavo", resources=["K8S/base"], components=[f"K8S/components/{name}" for name in names]
    )


def renamed(name: str, cell: str, namespace: str, transformers: list[str]) -> Manifests:
    """Return an overlay as another cell, in another namespace."""
    labels = {"pairs": {"app.kubernetes.io/instance": cell}, "includeSelectors": True}
    text = _render_kustomization(
        namespace=namespace,
        namePrefix=f"{cell}-",
        labels=[labels],
        resources=[f"K8S/overlays/{name}"],
        transformers=transformers,
    )
    return Manifests(name, parse(text))


def components(*names: str) -> Manifests:
    """Return the base with components, in this order."""
    return Manifests(f"base with {', '.join(names)}", parse(_render_components(names)))


def parse(text: str) -> list[Object]:
    """Return the documents of a YAML stream."""
    return [item for item in yaml.load_all(text, Loader=yaml.CSafeLoader) if item]
