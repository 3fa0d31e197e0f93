"""The overlay `one-gpu`, behind a GPU that a node only says it has."""

from collections.abc import Iterator

import pytest

from tests.cluster.kube import OVERLAYS, apply, kubectl, rolled_out


@pytest.fixture
def one_gpu(gpus: None) -> Iterator[None]:
    """The overlay, rolled out."""
    apply(OVERLAYS / "one-gpu")
    rolled_out("deployment/octavo-executor", "statefulset/octavo-scheduler")
    yield
    kubectl("delete", "--kustomize", str(OVERLAYS / "one-gpu"), timeout_s=300)


def test_it_answers_from_its_claim(one_gpu: None) -> None:
    generate = ("octavo", "generate", "--raw", "The capital of Japan is", "--max-tokens=8", "--temperature=0")

    assert "Tokyo" in kubectl("exec", "statefulset/octavo-scheduler", "--", *generate)
    limits = "{.items[*].spec.containers[*].resources.limits.nvidia\\.com/gpu}"
    selector = ("--selector", "app.kubernetes.io/component=executor")
    assert kubectl("get", "pods", *selector, "--output", f"jsonpath={limits}") == "1"
