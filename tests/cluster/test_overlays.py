"""Every overlay, and every component on the base, is admitted by an API server."""

from collections.abc import Iterator

import pytest
import yaml

from tests.cluster.kube import NAMESPACE, ROOT, Object, kubectl
from tests.k8s import manifests

# Kinds whose operators no cluster of ours has; their fields are checked by tests/k8s.
FOREIGN = {("leaderworkerset.x-k8s.io", "LeaderWorkerSet"), ("inference.networking.k8s.io", "InferencePool")}


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
