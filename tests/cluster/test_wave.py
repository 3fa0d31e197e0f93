"""A wave of load through KEDA: from one executor to three and back, without flapping, with its seconds taken apart."""

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime

import pytest

from tests.cluster.conftest import Load
from tests.cluster.kube import NAMESPACE, OVERLAYS, Object, apply, get, is_ready, kubectl, logs, names, pods, until
from tests.cluster.test_faults import under

NUM_STREAMS = 16
# Within the pod, so that neither a scrape nor kubectl rounds the time; metrics have no TLS.
FIRST_STEP = """
import re, time, urllib.request
while True:
    try:
        text = urllib.request.urlopen("http://127.0.0.1:9090/metrics").read().decode()
    except OSError:
        text = ""
    found = re.search(r"^octavo_executor_steps_total(?:{.*})? (\\S+)", text, re.MULTILINE)
    if found and float(found[1]):
        break
    time.sleep(0.1)
print(time.time())
"""


@pytest.fixture
def wave(addons: None) -> Iterator[Load]:
    """A cell at rest, and a load that has not begun."""
    apply(OVERLAYS / "wave")
    until(lambda: [*map(is_ready, pods("executor"))] == [True] and all(map(is_ready, pods("front"))), "it runs", 240)
    until(lambda: len(get("hpa")) == 2, "KEDA has made autoscalers")
    load = Load()
    yield load
    load.stop()
    kubectl("delete", "--wait", "--kustomize", str(OVERLAYS / "wave"), timeout_s=300)


@contextmanager
def wanted() -> Iterator[list[tuple[float, int]]]:
    """Note how many executors there are to be, and when that changed."""
    seen: list[tuple[float, int]] = []
    command = ["kubectl", "--namespace", NAMESPACE, "get", "deployment/octavo-executor", "--watch"]
    command += ["--output", 'jsonpath={.spec.replicas}{"\\n"}']
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if not seen or seen[-1][1] != int(line):
                seen.append((time.time(), int(line)))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield seen
    finally:
        process.terminate()
        process.wait()
        reader.join()
        assert process.stdout is not None
        process.stdout.close()


def seconds(text: str) -> float:
    """Return the time of an ISO date."""
    return datetime.fromisoformat(text).timestamp()


def first_step(name: str) -> float:
    """Return when an executor had run its first step, once it has."""
    return float(kubectl("exec", name, "--", "python", "-c", FIRST_STEP))


def taken_apart(pod: Object, first_step_s: float) -> dict[str, float]:
    """Return the seconds of a pod's way, from its creation to its first step; Kubernetes' own times are whole ones."""
    conditions = {one["type"]: seconds(one["lastTransitionTime"]) for one in pod["status"]["conditions"]}
    [status] = pod["status"]["containerStatuses"]
    events = {line["event"]: seconds(line["time"]) for line in logs(pod["metadata"]["name"]) if "event" in line}
    attached = [
        seconds(line["time"])
        for name in names("scheduler")
        for line in logs(name)
        if line.get("event") == "attached" and pod["status"]["podIP"] in line["executor"]
    ]
    at = {
        "created": seconds(pod["metadata"]["creationTimestamp"]),
        "scheduled": conditions["PodScheduled"],
        "container started": seconds(status["state"]["running"]["startedAt"]),
        "Python and torch imported": events["loading"],
        "model loaded": events["loaded"],
        "ready": events["ready"],
        "attached": min(attached),
        "first step": first_step_s,
    }
    return {name: round(value - at["created"], 2) for name, value in at.items()}


def test_a_wave_of_load(wave: Load) -> None:
    with wanted() as seen:
        began_s = time.time()
        wave.start(NUM_STREAMS)
        loaded_s = time.time()
        first = names("executor")
        with under(wave):
            until(lambda: len(names("executor")) == 3, "two more executors are wanted", 300)
            new = [name for name in names("executor") if name not in first]
            until(lambda: len([pod for pod in pods("executor") if _runs(pod)]) == 3, "their containers run")
            with ThreadPoolExecutor() as at_once:
                steps = list(at_once.map(first_step, new))
            for pod, first_step_s in zip(
                [pod for pod in pods("executor") if pod["metadata"]["name"] in new], steps, strict=True
            ):
                print(json.dumps(taken_apart(pod, first_step_s)), flush=True)
        time.sleep(60)
        wave.stop()
        ended_s = time.time()
        until(lambda: len(names("executor")) == 1, "one executor is left", 600)
    print(
        json.dumps(
            {
                "load_learned_s": round(loaded_s - began_s, 1),
                "from_load_s": [(round(at_s - loaded_s, 1), number) for at_s, number in seen],
                "from_end_s": [(round(at_s - ended_s, 1), number) for at_s, number in seen if at_s > ended_s],
            }
        ),
        flush=True,
    )
    numbers = [number for _, number in seen]
    peak = numbers.index(3)
    assert numbers[: peak + 1] == sorted(set(numbers[: peak + 1])), f"it flaps: {numbers}"
    assert numbers[peak:] == sorted(set(numbers[peak:]), reverse=True), f"it flaps: {numbers}"


def _runs(pod: Object) -> bool:
    return any("running" in status["state"] for status in pod["status"].get("containerStatuses", []))
