"""A rollout's log-probabilities are those of its text as a prompt, to the bit, with a real model."""

from pathlib import Path

import pytest

from octavo.client import Client
from tests.contract.test_rollouts import prompt_logprobs, rolled
from tests.numerics.real_model import RealModel
from tests.numerics.tiny_models import save_tiny_model
from tests.support.stack import running_stack

PROMPTS = [[3 + number, *range(10, 50)] for number in range(3)]


@pytest.mark.usefixtures("one_thread")
async def test_log_probabilities_are_those_of_the_text_as_a_prompt(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    worker = RealModel(tmp_path, 16, 64, max_num_seqs=8).new_worker()
    async with running_stack(worker) as stack, Client(stack.address) as client:
        groups = await rolled(client, n=4, prompts=PROMPTS, seed=1, max_tokens=30)
        outputs = [(group, output) for group in groups for output in group.outputs]
        assert len({output.token_ids for _, output in outputs}) == 12
        for group, output in outputs:
            assert await prompt_logprobs(client, group.prompt_token_ids, output) == output.logprobs
