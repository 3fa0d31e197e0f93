"""Every overlay, and every component on the base, passes every check."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.k8s.checks import CHECKS
from tests.k8s.manifests import COMBINATIONS, COMPONENTS, K8S, OVERLAYS, REPOSITORY, components, overlay, renamed, title
from tests.k8s.policies_settings import load_settings
from tests.k8s.policies_wiring import MADE_BY_HAND

RENDERINGS = [*OVERLAYS, *map("+".join, COMBINATIONS)]


@pytest.mark.parametrize("name", RENDERINGS)
def test_what_is_rendered_passes_every_check(name: str) -> None:
    manifests = overlay(name) if name in OVERLAYS else components(*name.split("+"))

    assert {name: findings for name, check in CHECKS.items() if (findings := check(manifests))} == {}


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_under_other_names_passes_every_check(name: str) -> None:
    manifests = renamed(name, "blue", "llm", transformers=["K8S/names"])

    assert {name: findings for name, check in CHECKS.items() if (findings := check(manifests))} == {}
    assert {item["metadata"].get("namespace", "llm") for item in manifests.objects} == {"llm"}
    assert [title(item) for item in manifests.objects if item["metadata"]["name"].startswith("octavo")] == []


def test_without_the_replacements_other_names_are_wrong() -> None:
    manifests = renamed("production", "blue", "llm", transformers=[])

    assert {name for name, check in CHECKS.items() if check(manifests)} == {"selectors", "services", "autoscaling"}


def test_every_component_is_rendered() -> None:
    assert {name for names in COMBINATIONS for name in names} == set(COMPONENTS)


def test_each_overlay_serves_with_both_tiers() -> None:
    for name in OVERLAYS:
        assert {pod.component for pod in overlay(name).pod_templates()} >= {"scheduler", "executor"}, name


def test_every_component_is_in_the_documentation() -> None:
    page = (REPOSITORY / "docs/kubernetes.md").read_text(encoding="utf-8")

    assert [name for name in (*OVERLAYS, *COMPONENTS) if f"`{name}`" not in page] == []


def test_the_times_of_an_end_are_in_the_documentation() -> None:
    page = (REPOSITORY / "docs/kubernetes.md").read_text(encoding="utf-8")
    alone, cell = overlay("cpu-demo"), components("fronts")
    pods = [(manifests, pod) for manifests in (alone, cell) for pod in manifests.pod_templates()]
    settings = {(m is cell, pod.component): load_settings(m, pod, pod.containers[0])[0] for m, pod in pods}
    delay = {tier: f"{config.shutdown_delay_s:g}" for (_, tier), config in settings.items() if config}
    grace = {key: f"{config.shutdown_grace_s:g}" for key, config in settings.items() if config}

    assert f"(`shutdown_delay_s`) | {delay['scheduler']} | {delay['front']} s | {delay['executor']} s," in page
    drains = f"{grace[False, 'scheduler']} s; with `fronts` {grace[True, 'scheduler']} s | {grace[True, 'front']} s"
    assert f"(`shutdown_grace_s`) | {drains} | {grace[True, 'executor']} s:" in page


def test_the_endpoint_picker_reads_names_that_are_served() -> None:
    page = (REPOSITORY / "docs/kubernetes.md").read_text(encoding="utf-8")
    served = (REPOSITORY / "docs/metrics.md").read_text(encoding="utf-8")

    assert set(re.findall("`(vllm:.+?)`", page)) == set(re.findall(r"^\| `(vllm:.+?)`", served, re.MULTILINE))


def test_what_is_made_by_hand_is_in_the_documentation() -> None:
    page = (REPOSITORY / "docs/kubernetes.md").read_text(encoding="utf-8")

    assert [name for _, name in MADE_BY_HAND if name not in page] == []


def test_the_file_of_settings_names_all_services() -> None:
    tables = tomllib.loads((K8S / "base/octavo.toml").read_text(encoding="utf-8"))

    assert set(tables) == {"scheduler", "front", "executor"}


def test_every_directory_of_a_component_is_one() -> None:
    assert [name for name in COMPONENTS if not Path(K8S / "components" / name / "kustomization.yaml").exists()] == []
