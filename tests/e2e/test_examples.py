"""Programs of examples/ do what they say."""

import re
from pathlib import Path

import pytest

from examples.grpo import run


@pytest.mark.timeout(120)
async def test_the_reward_of_grpo_rises_over_changing_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = await run(10, tmp_path)
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
    printed = capsys.readouterr().out
    differences = [float(found) for found in re.findall(r"largest difference (\S+)", printed)]
    assert 0 < max(differences) < 1e-5
    assert len(set(re.findall(r"weights (\w+)", printed))) == 10
