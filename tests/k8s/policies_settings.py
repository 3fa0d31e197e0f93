"""The settings in ConfigMaps, variables and arguments are settings of the services, with values that they take."""

import re
import tempfile
from pathlib import Path
from typing import Any

from executor_svc.config import ExecutorConfig
from octavo_shared.process.config import CONFIG_VARIABLE, ConfigError, load_config
from octavo_shared.process.service_config import ServiceConfig
from scheduler_svc.config.client_side_config import FrontConfig
from scheduler_svc.config.scheduler_config import SchedulerConfig
from tests.k8s.manifests import Manifests, Object, PodTemplate, environment

SERVICES: dict[str, type[ServiceConfig]] = {
    "scheduler": SchedulerConfig,
    "front": FrontConfig,
    "executor": ExecutorConfig,
}

# The setting that says where, and the name of the container port.
PORTS = {
    "listen": "grpc",
    "health_listen": "grpc-health",
    "metrics_listen": "metrics",
    "openai_listen": "openai",  # of the scheduler and of fronts
    "engine_listen": "engine",  # of the scheduler
}
FILES = (
    "tls_cert",
    "tls_key",
    "tls_client_ca",
    "executor_tls_ca",
    "executor_tls_cert",
    "executor_tls_key",
    "front_tls_ca",
    "engine_tls_ca",
    "engine_tls_cert",
    "engine_tls_key",
    "tokens_file",
    "prefix_key_file",
)
KEYS_OF_TLS_SECRETS = {"tls.crt", "tls.key", "ca.crt"}
KEYS_OF_SECRETS = {"tokens_file": {"tokens"}, "prefix_key_file": {"prefix.key"}}


def check_settings(manifests: Manifests) -> list[str]:
    """Both services would start with what their containers get, on the ports that the manifests name."""
    findings = []
    for pod in manifests.pod_templates():
        for container in pod.containers:
            if container["name"] in SERVICES:
                where = f"{pod.owner} {container['name']}"
                config, mistakes = load_settings(manifests, pod, container)
                findings += [f"{where}: {mistake}" for mistake in mistakes]
                if environment(container).get("GRPC_VERBOSITY") != "ERROR":
                    findings.append(f"{where}: gRPC writes lines that are no JSON")
                if config is not None:
                    findings += [f"{where}: {mistake}" for mistake in _port_mistakes(pod, config)]
                    findings += [f"{where}: {mistake}" for mistake in _file_mistakes(pod, container, config)]
                    findings += [f"{where}: {mistake}" for mistake in _group_mistakes(pod, container, config)]
    return findings


def load_settings(
    manifests: Manifests, pod: PodTemplate, container: Object
) -> tuple[ServiceConfig | None, tuple[str, ...]]:
    """Return the configuration that the container would have, or its mistakes."""
    variables = environment(container)
    for item in container.get("env", []):
        if "resourceFieldRef" in item.get("valueFrom", {}):  # whole cores
            kind, _, resource = item["valueFrom"]["resourceFieldRef"]["resource"].partition(".")
            variables[item["name"]] = container["resources"][kind][resource]
    known = {"LWS_GROUP_SIZE": str(pod.group_size)}
    for name, value in variables.items():  # a variable knows those before it
        known[name] = re.sub(r"\$\((\w+)\)", lambda match: known.get(match[1], match[0]), value)
    variables = known
    text, mistake = _mounted_file(manifests, pod, container, variables.get(CONFIG_VARIABLE, ""))
    if text is None:
        return None, (mistake,)
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "octavo.toml"
        path.write_text(text, encoding="utf-8")
        variables[CONFIG_VARIABLE] = str(path)
        try:
            return load_config(SERVICES[container["name"]], container.get("args", []), variables), ()
        except ConfigError as error:
            return None, tuple(sentence.replace(work, "") for sentence in error.mistakes)


def _mounted_file(manifests: Manifests, pod: PodTemplate, container: Object, path: str) -> tuple[str | None, str]:
    """Return the text that a mounted ConfigMap has at a path, and what is wrong if there is none."""
    volume = _volume_of(pod, container, path)
    if volume is None or "configMap" not in volume:
        return None, f"{CONFIG_VARIABLE} is {path or 'unset'}, where no ConfigMap is mounted"
    config_map = manifests.find("ConfigMap", volume["configMap"]["name"])
    text = config_map["data"].get(Path(path).name) if config_map else None
    return text, f"there is no {Path(path).name} in ConfigMap {volume['configMap']['name']}"


def _volume_of(pod: PodTemplate, container: Object, path: str) -> Object | None:
    for mount in container.get("volumeMounts", []):
        if str(Path(path).parent) == mount["mountPath"]:
            return next((item for item in pod.spec["volumes"] if item["name"] == mount["name"]), None)
    return None


def _port_mistakes(pod: PodTemplate, config: ServiceConfig) -> list[str]:
    mistakes = []
    for setting, port_name in PORTS.items():
        address = getattr(config, setting, None)
        number = pod.port(port_name)
        if address is None and number is None:
            continue
        if pod.leader and str(address) != f"0.0.0.0:{number}":
            mistakes.append(f"{setting} is {address}, and port {port_name} is {number}")
    for setting in ("admin_listen", "page_listen"):  # of operators, for whom a port is forwarded
        address = getattr(config, setting, None)
        if address is not None and not address.startswith("127.0.0.1:"):
            mistakes.append(f"{setting} is {address}, open to other pods")
    return mistakes


def _file_mistakes(pod: PodTemplate, container: Object, config: ServiceConfig) -> list[str]:
    mistakes = []
    for setting in FILES:
        path = getattr(config, setting, None)
        if path is None:
            continue
        volume = _volume_of(pod, container, str(path))
        keys = KEYS_OF_SECRETS.get(setting, KEYS_OF_TLS_SECRETS)
        if volume is None or "secret" not in volume or Path(path).name not in keys:
            mistakes.append(f"{setting} is {path}, where no Secret is mounted")
    return mistakes


def _group_mistakes(pod: PodTemplate, container: Object, config: ServiceConfig) -> list[str]:
    """The ranks of a group know who they are (executor_svc/parallel/ranks.py)."""
    if pod.group_size == 1:
        return []
    items: dict[str, Any] = {item["name"]: item for item in container.get("env", [])}
    label = items.get("RANK", {}).get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
    mistakes = []
    if "leaderworkerset.sigs.k8s.io/worker-index" not in label:
        mistakes.append("RANK is not the pod's index in its group")
    if items.get("WORLD_SIZE", {}).get("value") != "$(LWS_GROUP_SIZE)":
        mistakes.append("WORLD_SIZE is not the size of the group")
    if items.get("MASTER_ADDR", {}).get("value") != "$(LWS_LEADER_ADDRESS)":
        mistakes.append("MASTER_ADDR is not the leader")
    if not items.get("MASTER_PORT", {}).get("value", "").isdecimal():
        mistakes.append("MASTER_PORT is no number")
    if getattr(config, "tp", 0) != pod.group_size:
        mistakes.append(f"tp is {getattr(config, 'tp', 0)} in a group of {pod.group_size}")
    return mistakes
