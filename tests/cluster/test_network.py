"""Who may talk to whom: each port of the table in docs/kubernetes.md, tried from everywhere."""

import json
from collections.abc import Iterator

import pytest

from tests.cluster.conftest import LOAD_IMAGE, Load, pod_of_ours
from tests.cluster.kube import NAMESPACE, kubectl, names, pods

PORTS = {
    "scheduler": (50051, 8080, 50052, 50053, 50054, 50055, 9090),
    "front": (50051, 8080, 50053, 9090),
    "executor": (50061, 50063, 9090),
}
HEALTH = {"scheduler:50053", "front:50053", "executor:50063"}
FOR_CLIENTS = {"front:50051", "front:8080"}

# From where, and what is open from there; with fronts.
OPEN = {
    "other namespace": HEALTH,
    "namespace with octavo/client": HEALTH | FOR_CLIENTS,
    "this namespace": set[str](),
    "this namespace with octavo/client": FOR_CLIENTS,
    "front": {"scheduler:50054"},
    "scheduler": {"executor:50061", "front:50053"},
    "executor": {"scheduler:50053", "executor:50061"},
}

TRY = """
import asyncio, json, sys

async def is_open(host, port):
    try:
        async with asyncio.timeout(3):
            (await asyncio.open_connection(host, port))[1].close()
        return True
    except (OSError, TimeoutError):
        return False

async def main(targets):
    found = await asyncio.gather(*(is_open(host, port) for _, host, port in targets))
    print(json.dumps([f"{name}:{port}" for (name, _, port), opened in zip(targets, found) if opened]))

asyncio.run(main(json.loads(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def places(cell: Load) -> Iterator[dict[str, tuple[str, str]]]:
    """Namespace and pod of each place; pods of our own where there are none."""
    made = {
        "other namespace": ("octavo-others", {}),
        "namespace with octavo/client": ("octavo-clients", {}),
        "this namespace": (NAMESPACE, {}),
        "this namespace with octavo/client": (NAMESPACE, {"octavo/client": "true"}),
    }
    spaces = ("octavo-others", "octavo-clients")
    for space in spaces:
        kubectl("create", "namespace", space)
    kubectl("label", "namespace", "octavo-clients", "octavo/client=true")
    found = {tier: (NAMESPACE, names(tier)[0]) for tier in PORTS}
    for number, (place, (space, labels)) in enumerate(made.items()):
        pod = pod_of_ours(f"try-{number}", LOAD_IMAGE, ["sleep", "3600"], labels)
        kubectl("apply", "--namespace", space, "--filename", "-", stdin=json.dumps(pod))
        found[place] = (space, f"try-{number}")
    for space, pod_name in found.values():
        kubectl("wait", "--namespace", space, "--for=condition=Ready", f"pod/{pod_name}", "--timeout=60s")
    yield found
    for space in spaces:
        kubectl("delete", "namespace", space, "--wait=false")
    for number in range(len(made)):
        kubectl("delete", "pod", f"try-{number}", "--now", "--ignore-not-found")


@pytest.mark.parametrize("place", OPEN)
def test_what_is_open_from(place: str, places: dict[str, tuple[str, str]]) -> None:
    space, pod = places[place]
    # Of another pod than the one that asks.
    others = {tier: next(item for item in pods(tier) if item["metadata"]["name"] != pod) for tier in PORTS}
    targets = [(tier, others[tier]["status"]["podIP"], port) for tier, ports in PORTS.items() for port in ports]

    opened = kubectl("exec", "--namespace", space, pod, "--", "python", "-c", TRY, json.dumps(targets))

    # kube-router has both directions of a policy in one chain: what anybody may reach at a tier, the tier may as well.
    of_itself = {port for port in HEALTH if port.startswith(f"{place}:")}
    assert set(json.loads(opened)) - of_itself == OPEN[place]
