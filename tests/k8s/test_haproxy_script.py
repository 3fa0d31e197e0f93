"""haproxy.sh starts HAProxy, asks it to read its certificate again when that changes, and ends with it."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.k8s.manifests import K8S

SCRIPT = K8S / "components/openai-gateway-mtls/haproxy.sh"

# In HAProxy's place: it says what it is asked to do.
STAND_IN = """#!/bin/sh
trap 'echo reload' USR2
trap 'echo end; exit 3' TERM
echo "start $*"
while :; do sleep 0.05; done
"""


@contextmanager
def running(tmp_path: Path, stand_in: str = STAND_IN) -> "Iterator[subprocess.Popen[str]]":
    """Run the script with a stand-in for HAProxy, over a directory with one certificate."""
    directory = tmp_path / "tls"
    directory.mkdir()
    (directory / "tls.crt").write_text("first", encoding="ascii")
    haproxy = tmp_path / "haproxy"
    haproxy.write_text(stand_in, encoding="ascii")
    haproxy.chmod(0o755)
    process = subprocess.Popen(
        ["sh", str(SCRIPT), "haproxy.cfg", str(directory)],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "CHECK_INTERVAL_S": "0.05"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        # The group may outlive its leader: what sleeps between two looks.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def next_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


@pytest.mark.timeout(30)
def test_haproxy_reads_again_what_has_changed_and_ends_on_sigterm(tmp_path: Path) -> None:
    with running(tmp_path) as process:
        assert next_line(process) == "start -W -db -f haproxy.cfg"

        for content in ("second", "third"):
            # In one piece, as the kubelet does it: half a change would be a change of its own.
            (tmp_path / "new").write_text(content, encoding="ascii")
            (tmp_path / "new").replace(tmp_path / "tls" / "tls.crt")
            assert next_line(process) == "reload"

        process.terminate()
        assert next_line(process) == "end"
        assert process.wait() == 3


@pytest.mark.timeout(30)
def test_the_script_ends_with_haproxy(tmp_path: Path) -> None:
    with running(tmp_path, "#!/bin/sh\nexit 5\n") as process:
        assert process.wait() == 5
