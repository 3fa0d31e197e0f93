"""The gateway asks for keys, and has the settings that `python -m octavo.gateway` gives it."""

from collections.abc import Iterator

from octavo.gateway import smg_arguments
from tests.k8s.manifests import Manifests, Object, environment

# What of those settings is for one machine: addresses, keys, and how long it drains.
_OF_ONE_MACHINE = {
    "--host",
    "--port",
    "--worker-urls",
    "--prometheus-host",
    "--prometheus-port",
    "--control-plane-api-keys",
    "--shutdown-grace-period-secs",
}


def check_gateway(manifests: Manifests) -> list[str]:
    """Keys come from a Secret; retries, breaker and health checks are as we test them; no tokenizer from the hub."""
    return [
        f"{pod.owner}: {mistake}"
        for pod in manifests.pod_templates()
        for container in pod.containers
        if container["name"] == "gateway"
        for mistake in _mistakes(container)
    ]


def _mistakes(container: Object) -> Iterator[str]:
    secret = {item["name"] for item in container["env"] if "secretKeyRef" in item.get("valueFrom", {})}
    arguments = container["args"]
    for flag in ("--api-key", "--control-plane-api-keys"):
        if not any(item.startswith(f"{flag}=") and _variable(item) in secret for item in arguments):
            yield f"{flag} is not from a Secret"
    for argument in sorted(_tested_arguments() - set(arguments)):
        yield f"{argument} is missing"
    if environment(container).get("HF_ENDPOINT") != "http://127.0.0.1:9":
        yield "HF_ENDPOINT lets it look for tokenizers at the hub"


def _tested_arguments() -> set[str]:
    flags: list[str] = []
    for argument in smg_arguments("127.0.0.1", 8080, "127.0.0.1:50051"):
        if argument.startswith("--"):
            flags.append(argument)
        else:
            flags[-1] += f"={argument}"
    return {flag for flag in flags if flag.partition("=")[0] not in _OF_ONE_MACHINE}


def _variable(argument: str) -> str:
    return argument.rpartition("$(")[2].removesuffix(")")
