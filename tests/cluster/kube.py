"""kubectl, and what the tests ask a cluster."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OVERLAYS = Path(__file__).parent / "overlays"
NAMESPACE = "octavo"

Object = dict[str, Any]


def kubectl(*arguments: str, stdin: str = "", timeout_s: float = 120) -> str:
    """Run kubectl in our namespace and return what it prints; AssertionError with its words if it fails."""
    command = ["kubectl", "--namespace", NAMESPACE, *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
    return done.stdout


def get(*what: str) -> Any:
    """Return an object, or the items of a list."""
    found = json.loads(kubectl("get", *what, "--output", "json"))
    return found["items"] if found["kind"].endswith("List") else found


def pods(component: str) -> list[Object]:
    """Return the pods of a tier that are not being deleted, by name."""
    found = get("pods", "--selector", f"app.kubernetes.io/component={component}")
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def names(component: str) -> list[str]:
    """Return the names of a tier's pods."""
    return [pod["metadata"]["name"] for pod in pods(component)]


def is_ready(pod: Object) -> bool:
    """Return whether a pod is in its Services."""
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", []))


def apply(directory: Path) -> None:
    """Apply an overlay as strictly as can be; a warning of the API server is a failure."""
    command = ["kubectl", "apply", "--server-side", "--force-conflicts", "--validate=strict", "--warnings-as-errors"]
    done = subprocess.run([*command, "-k", str(directory)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def rolled_out(*what: str, timeout_s: int = 300) -> None:
    """Wait until workloads are as they should be."""
    for each in what:
        kubectl("rollout", "status", each, f"--timeout={timeout_s}s", timeout_s=timeout_s + 10)


def until(holds: Callable[[], Any], what: str, limit_s: float = 120) -> Any:
    """Return what `holds` returns, once it is true."""
    deadline_s = time.monotonic() + limit_s
    while not (value := holds()):
        assert time.monotonic() < deadline_s, f"not within {limit_s:g} s: {what}"
        time.sleep(0.25)
    return value


def logs(pod: str, *flags: str) -> list[Object]:
    """Return the log of a pod: every line has to be JSON."""
    return [json.loads(line) for line in kubectl("logs", pod, *flags).splitlines()]


def machine(*arguments: str) -> None:
    """Tell the program that runs the cluster something, such as `stop node-2`, a cut of power."""
    subprocess.run([os.environ["CLUSTER"], *arguments], check=True, timeout=120, capture_output=True)


def kill_for(seconds: float, part: str, node: str = "") -> None:
    """Kill a program of the cluster that runs on this machine, such as `etcd`, and start it again after a while.

    Args:
        seconds: How long it is away.
        part: Name of the program.
        node: Only the one of this node.
    """
    commands = {
        int(path.parent.name): path.read_text(errors="replace") for path in Path("/proc").glob("[0-9]*/cmdline")
    }
    pids = [pid for pid, command in commands.items() if Path(command.split("\0")[0]).name == part and node in command]
    assert pids, f"no {part} runs here"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), f"{part} has ended")
    time.sleep(seconds)
    machine("up")
    until(lambda: kubectl("version"), "the API server answers")
