"""What every pod must have: probes, restricted security, matching GPUs, images with versions."""

from collections.abc import Iterator

import octavo
from tests.k8s.manifests import Manifests, Object, PodTemplate, selects
from tests.k8s.policies_settings import load_settings

GPU = "nvidia.com/gpu"
ZONE, NODE = "topology.kubernetes.io/zone", "kubernetes.io/hostname"
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
RESTRICTED_VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "secret", "projected", "downwardAPI"}


def check_probes(manifests: Manifests) -> list[str]:
    """Who serves has all three probes, on the health port; who does not serve has none."""
    findings = []
    for pod in manifests.pod_templates():
        for container in pod.containers:
            where = f"{pod.owner} {container['name']}"
            if not pod.leader:
                findings += [
                    f"{where}: {probe} of a rank that serves nothing" for probe in PROBES if probe in container
                ]
                continue
            findings += [f"{where}: no {probe}" for probe in PROBES if probe not in container]
            findings += [
                f"{where}: {probe} {mistake}"
                for probe in PROBES
                if probe in container and (mistake := _probe_mistake(pod, probe, container[probe]))
            ]
    return findings


def _probe_mistake(pod: PodTemplate, probe: str, value: Object) -> str | None:
    if "grpc" in value:
        port, health = value["grpc"]["port"], pod.port("grpc-health")
        if port != health:
            return f"asks port {port}, and grpc-health is {health}"
        service = value["grpc"].get("service")
        allowed = {"livenessProbe": ["liveness"], "readinessProbe": ["readiness"]}.get(probe, ["liveness", "readiness"])
        return None if service in allowed else f"asks for {service}"
    return "is not gRPC"


def check_gpus(manifests: Manifests) -> list[str]:
    """GPUs are asked for as they are limited, their nodes' taint is tolerated, and the model runs on them."""
    findings = []
    for pod in manifests.pod_templates():
        for container in pod.containers:
            where = f"{pod.owner} {container['name']}"
            resources = container.get("resources", {})
            asked, limit = (resources.get(key, {}).get(GPU) for key in ("requests", "limits"))
            if asked != limit:
                findings.append(f"{where}: asks for {asked} GPUs, its limit is {limit}")
            tolerated = any(item.get("key") == GPU for item in pod.spec.get("tolerations", []))
            if limit and not tolerated:
                findings.append(f"{where}: has a GPU and does not tolerate the taint {GPU}")
            if container["name"] == "executor":
                config, _ = load_settings(manifests, pod, container)
                device = getattr(config, "device", None)
                if config and (device == "cuda") != bool(limit):
                    findings.append(f"{where}: device is {device}, with {limit or 'no'} GPUs")
    return findings


def check_images(manifests: Manifests) -> list[str]:
    """Every image is of a version, ours of this one."""
    findings = []
    for pod in manifests.pod_templates():
        for container in pod.all_containers:
            name, _, tag = container["image"].rpartition("/")[2].partition(":")
            if name not in ("scheduler", "executor"):
                findings.append(f"{pod.owner} {container['name']}: {container['image']} is no image of ours")
            elif tag.partition("-")[0] != octavo.__version__:
                findings.append(f"{pod.owner} {container['name']}: {container['image']} is not {octavo.__version__}")
    return findings


def check_pod_security(manifests: Manifests) -> list[str]:
    """The rules of the restricted Pod Security Standard, a root file system that is read only, and no API token."""
    findings = [
        f"Namespace/{item['metadata']['name']}: does not enforce restricted pods"
        for item in manifests.of_kind("Namespace")
        if item["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce") != "restricted"
    ]
    findings += [
        f"ServiceAccount/{item['metadata']['name']}: mounts its token"
        for item in manifests.of_kind("ServiceAccount")
        if item.get("automountServiceAccountToken") is not False
    ]
    for pod in manifests.pod_templates():
        findings += [f"{pod.owner}: {mistake}" for mistake in _pod_mistakes(pod)]
        for container in pod.all_containers:
            findings += [f"{pod.owner} {container['name']}: {mistake}" for mistake in _container_mistakes(container)]
    return findings


def _pod_mistakes(pod: PodTemplate) -> Iterator[str]:
    security = pod.spec.get("securityContext", {})
    if pod.spec.get("automountServiceAccountToken") is not False:
        yield "mounts a token"
    if security.get("runAsNonRoot") is not True or not security.get("runAsUser"):
        yield "may run as root"
    if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "has no seccomp profile"
    yield from (f"has {key}" for key in ("hostNetwork", "hostPID", "hostIPC") if pod.spec.get(key))
    constraints = pod.spec.get("topologySpreadConstraints", [])
    affinity = pod.spec.get("affinity", {}).get("podAntiAffinity", {})
    terms = [item["podAffinityTerm"] for item in affinity.get("preferredDuringSchedulingIgnoredDuringExecution", [])]
    for place, key, items in (("zone", ZONE, constraints), ("node", NODE, terms)):
        mine = [item for item in items if item["topologyKey"] == key and selects(item["labelSelector"], pod.labels)]
        if pod.group_size == 1 and not mine:
            yield f"may all be in one {place}"
    # kube-scheduler leaves a node out of all constraints that lacks the label of one.
    if any(item["topologyKey"] != ZONE for item in constraints):
        yield "is not spread where nodes have no zone"
    for volume in pod.spec.get("volumes", []):
        kinds = volume.keys() - {"name"}
        if not kinds <= RESTRICTED_VOLUMES:
            yield f"has a volume of {', '.join(kinds)}"
        if "emptyDir" in volume and "sizeLimit" not in (volume["emptyDir"] or {}):
            yield f"its volume {volume['name']} has no limit"


def _container_mistakes(container: Object) -> Iterator[str]:
    security = container.get("securityContext", {})
    if security.get("privileged"):
        yield "is privileged"
    if security.get("allowPrivilegeEscalation") is not False:
        yield "may escalate its privileges"
    if security.get("readOnlyRootFilesystem") is not True:
        yield "may write to its root file system"
    if security.get("capabilities", {}).get("drop") != ["ALL"] or security.get("capabilities", {}).get("add"):
        yield "has capabilities"
    if "runAsUser" in security or "runAsNonRoot" in security:
        yield "overrides the pod's user"
    if any("hostPort" in port for port in container.get("ports", [])):
        yield "takes a port of the node"
    if "memory" not in container.get("resources", {}).get("limits", {}):
        yield "has no memory limit"
