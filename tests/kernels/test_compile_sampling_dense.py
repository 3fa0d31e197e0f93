"""The kernels compile for real devices, and fit into their registers and into the shared memory that all have."""

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SHARED_BYTES = 48 * 1024


def test_kernels_fit_a_device(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_cases_sampling_dense", "80", "90"],
        cwd=REPOSITORY,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    needs = json.loads(done.stdout)
    assert len(needs) >= 18
    for case in needs:
        assert 0 < case["registers"] <= 255, case
        assert case["spilled"] == 0, case
        assert case["shared"] <= SHARED_BYTES, case
