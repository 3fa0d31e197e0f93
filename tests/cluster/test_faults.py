"""What breaks on a cluster, under streams of known answers: none is wrong or lost; no client notices but a pause."""

import json
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise

import pytest

from tests.cluster.conftest import Load
from tests.cluster.kube import (
    NAMESPACE,
    get,
    is_ready,
    kill_for,
    kubectl,
    logs,
    machine,
    names,
    pods,
    rolled_out,
    until,
)

EXECUTOR, SCHEDULER, FRONT = "deployment/octavo-executor", "statefulset/octavo-scheduler", "deployment/octavo-front"
TIERS = (EXECUTOR, SCHEDULER, FRONT)
ALL = frozenset({"octavo", "grpc", "openai"})
# A client whose own front dies without a word: only ours goes on by itself (docs/failures.md).
GOES_ON = frozenset({"octavo"})


@contextmanager
def under(load: Load, *, unharmed: Collection[str] = ALL, settle_s: float = 10.0) -> Iterator[None]:
    """Whatever happens meanwhile, answers of these kinds of clients end, and each of all is right as far as it came."""
    since_s = time.time()
    yield
    time.sleep(settle_s)
    until_s = time.time()
    answers = load.answers(since_s, until_s)
    errors = [answer for answer in answers if answer.error]
    pauses = sorted(answer.pause_s for answer in answers if not answer.error) or [0.0]
    began_s = sorted(answer.began_s for answer in answers if not answer.error)
    figures = {
        "seconds": round(until_s - since_s),
        "answers": len(answers),
        "wrong": sum(bool(answer.wrong) for answer in answers),
        "errors": {kind: sum(answer.kind == kind for answer in errors) for kind in sorted(ALL)},
        "longest_pause_s": round(pauses[-1], 2),
        "median_pause_s": round(statistics.median(pauses), 2),
        # In which nobody's request was taken.
        "longest_gap_s": round(max((later - one for one, later in pairwise(began_s)), default=0.0), 2),
    }
    print(json.dumps(figures), flush=True)
    assert answers, "the load has ended"
    assert not figures["wrong"], [answer for answer in answers if answer.wrong][:3]
    assert not (unexpected := [answer for answer in errors if answer.kind in unharmed]), unexpected[:5]


def scale(what: str, *numbers: int) -> None:
    """Scale a tier step by step."""
    for number in numbers:
        kubectl("scale", what, f"--replicas={number}")
        until(partial(_is_complete, what, number), f"{what} has {number} pods", 240)


def _is_complete(what: str, number: int) -> bool:
    status = get(what)["status"]
    return bool(status.get("readyReplicas", 0) == number == status["replicas"])


def restart(*what: str) -> None:
    """Restart tiers, all at once."""
    for each in what:
        kubectl("rollout", "restart", each)
    rolled_out(*what, timeout_s=400)


def kill(component: str, *flags: str) -> None:
    """Delete one pod of a tier, and wait until as many are ready as before."""
    before = names(component)
    kubectl("delete", "pod", before[0], *flags, timeout_s=200)
    until(lambda: sum(map(is_ready, pods(component))) == len(before), f"{component} is complete again", 240)


def evict(component: str) -> None:
    """Evict one pod of a tier, as a drain does; its disruption budget allows that."""
    before = names(component)
    name = before[0]
    metadata = {"name": name, "namespace": NAMESPACE}
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction"
    kubectl("create", "--raw", path, "--filename", "-", stdin=json.dumps(eviction))
    until(lambda: name not in names(component), f"{name} goes")
    until(lambda: sum(map(is_ready, pods(component))) == len(before), f"{component} is complete again", 240)


def exceed_memory(component: str) -> None:
    """Let the first process of a pod be killed by the pod's limit of memory; its container starts again."""
    [name, *_] = names(component)
    # The kernel takes the largest process of a container: many small ones push the first one out.
    takes = "import os, time\nwhile os.fork(): time.sleep(0.1)\nkept = b'x' * (32 << 20)\ntime.sleep(300)"
    with suppress(AssertionError):  # it may end with its container
        kubectl("exec", name, "--", "python", "-c", takes)
    until(lambda: _last_end(name) == "OOMKilled", f"{name} was killed by its limit")
    until(lambda: all(map(is_ready, pods(component))), f"{component} is complete again", 240)


def _last_end(name: str) -> str:
    [status] = get("pod", name)["status"]["containerStatuses"]
    return str({**status["lastState"], **status["state"]}.get("terminated", {}).get("reason", ""))


NOW = ("--grace-period=0", "--force")

HARMLESS: list[tuple[str, Callable[[], None]]] = [
    ("executors to 4, 1, 3", lambda: scale(EXECUTOR, 4, 1, 3)),
    ("schedulers to 1, 2", lambda: scale(SCHEDULER, 1, 2)),
    ("fronts to 3, 1, 2", lambda: scale(FRONT, 3, 1, 2)),
    ("executors restarted", lambda: restart(EXECUTOR)),
    ("schedulers restarted", lambda: restart(SCHEDULER)),
    ("fronts restarted", lambda: restart(FRONT)),
    ("all restarted at once", lambda: restart(*TIERS)),
    ("an executor deleted", lambda: kill("executor")),
    ("a scheduler deleted", lambda: kill("scheduler")),
    ("an executor killed", lambda: kill("executor", *NOW)),
    ("a scheduler killed", lambda: kill("scheduler", *NOW)),
    ("an executor evicted", lambda: evict("executor")),
    ("a front evicted", lambda: evict("front")),
    ("an executor above its memory", lambda: exceed_memory("executor")),
    ("a scheduler above its memory", lambda: exceed_memory("scheduler")),
]


@pytest.mark.parametrize(("name", "fault"), HARMLESS, ids=[name for name, _ in HARMLESS])
def test_no_client_notices(cell: Load, name: str, fault: Callable[[], None]) -> None:
    with under(cell):
        fault()


def test_a_front_that_dies_is_noticed_by_clients_of_others_alone(cell: Load) -> None:
    with under(cell, unharmed=GOES_ON):
        kill("front", *NOW)


def test_an_image_that_does_not_start_stops_the_update(cell: Load) -> None:
    with under(cell):
        for what, container in ((EXECUTOR, "executor"), (FRONT, "front")):
            kubectl("set", "image", what, f"{container}=registry.example.com/octavo/none:0")
        time.sleep(20)
        reasons = [
            status["state"].get("waiting", {}).get("reason")
            for component in ("executor", "front")
            for pod in pods(component)
            for status in pod["status"].get("containerStatuses", [])
        ]
        assert {"ErrImagePull", "ImagePullBackOff"} & set(reasons)
        for what in (EXECUTOR, FRONT):
            kubectl("rollout", "undo", what)
        rolled_out(EXECUTOR, FRONT)


def test_a_node_is_drained(cell: Load) -> None:
    node = get("nodes")[-1]["metadata"]["name"]
    with under(cell):
        kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=300s", timeout_s=310)
        kubectl("uncordon", node)
        until(lambda: all(map(is_ready, [*pods("executor"), *pods("scheduler"), *pods("front")])), "all is ready", 240)


of_this_machine = pytest.mark.skipif(
    os.environ.get("CLUSTER", "kind") in ("kind", "k3s"), reason="CLUSTER is no program that runs it on this machine"
)


@of_this_machine
def test_a_node_loses_its_power(cell: Load) -> None:
    node = get("nodes")[-1]["metadata"]["name"]
    with under(cell, unharmed=GOES_ON, settle_s=20):
        machine("stop", node)
        time.sleep(40)
        machine("start", node)
        until(lambda: all(map(is_ready, [*pods("executor"), *pods("scheduler"), *pods("front")])), "all is ready", 300)


@of_this_machine
@pytest.mark.parametrize(
    ("part", "seconds"),
    [("etcd", 0), ("kubelet", 60), ("kube-apiserver", 60)],
    ids=["etcd started again", "a kubelet killed for a minute", "API server and DNS away for a minute"],
)
def test_the_cluster_itself_fails(cell: Load, part: str, seconds: float) -> None:
    dns = ("deployment/coredns", "--namespace=kube-system")
    with under(cell):
        if part == "kube-apiserver":
            kubectl("scale", *dns, "--replicas=0")
            until(lambda: not get("pods", "--namespace=kube-system", "--selector=k8s-app=kube-dns"), "DNS is away")
        kill_for(seconds, part, get("nodes")[-1]["metadata"]["name"] if part == "kubelet" else "")
        if part == "kube-apiserver":
            kubectl("scale", *dns, "--replicas=2")
            kubectl("rollout", "status", *dns)
        until(lambda: all(map(is_ready, [*pods("executor"), *pods("scheduler"), *pods("front")])), "all is ready", 240)
        kill("executor", *NOW)


def test_no_executor_that_answers_was_retired_and_each_log_line_is_json(cell: Load) -> None:
    for name in (*names("front"), *names("executor")):
        assert all("event" in line or "message" in line for line in logs(name))
    for name in names("scheduler"):
        retired = set()
        for line in logs(name):
            if line.get("event") == "retired":
                retired.add(line["executor"])
            # Addresses of pods are not given again so soon.
            assert not (line.get("event") == "attached" and line["executor"] in retired), line
