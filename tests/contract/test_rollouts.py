"""`Client.rollouts` with fake executors: what a group has, when it ends, and what goes on while weights change."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.admin_client import AdminClient, PauseMode
from octavo.calls.rollouts import RolloutGroup
from octavo.client import Client
from octavo.errors import InvalidRequestError, RequestAbortedError
from octavo.values.outputs import FinishReason, Output
from tests.contract.test_resumption import Cutter
from tests.contract.test_weights import NEW_DIGEST, SLOW, weights, worker
from tests.support.stack import Stack, running_stack, until

__all__ = ["weights"]

pytestmark = pytest.mark.timeout(60)

PROMPTS = [[40 + number, *range(50, 90)] for number in range(5)]
PARAMS: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "ignore_eos": True}


async def rolled(
    client: Client, *, n: int = 3, prompts: Sequence[Any] = PROMPTS, **settings: Any
) -> list[RolloutGroup]:
    return [group async for group in client.rollouts(prompts, n, **{**PARAMS, **settings})]


def tokens(groups: Sequence[RolloutGroup]) -> dict[int, list[tuple[int, ...]]]:
    return {group.index: [output.token_ids for output in group.outputs] for group in groups}


async def prompt_logprobs(client: Client, prompt: Sequence[int], output: Output) -> tuple[float, ...]:
    """Return the log-probabilities of an output's tokens as a part of a prompt."""
    answer = await client.generate([*prompt, *output.token_ids], prompt_logprobs=0, max_tokens=1)
    assert answer.prompt_logprobs is not None
    return answer.prompt_logprobs.logprobs[len(prompt) - 1 :]


@pytest.mark.parametrize("max_groups", [1, 32])
async def test_outputs_differ_come_again_with_their_seeds_and_have_the_log_probabilities_of_a_prompt(
    max_groups: int,
) -> None:
    async with running_stack(FakeWorker(), FakeWorker()) as stack, Client(stack.address) as client:
        groups = await rolled(client, seed=7, max_groups=max_groups)
        assert {group.index for group in groups} == set(range(len(PROMPTS)))
        for group in groups:
            assert (list(group.prompt_token_ids), group.errors, group.unfinished) == (PROMPTS[group.index], (), ())
            assert len({output.token_ids for output in group.outputs}) == 3
            for place, output in enumerate(group.outputs):
                assert (output.output_index, output.finish_reason) == (place, FinishReason.LENGTH)
                alone = await client.generate(group.prompt, **PARAMS, seed=group.seeds[place], logprobs=0)
                [again] = alone.outputs
                assert (again.token_ids, again.logprobs) == (output.token_ids, output.logprobs)
                assert await prompt_logprobs(client, group.prompt_token_ids, output) == output.logprobs
        assert tokens(await rolled(client, seed=7, max_groups=3)) == tokens(groups)
        assert tokens(await rolled(client, seed=8)) != tokens(groups)


async def test_a_group_computes_its_prompt_once() -> None:
    async with (
        running_stack(FakeWorker(block_size_tokens=8)) as stack,
        Client(stack.address) as client,
        AdminClient(stack.service.other_addresses["admin"]) as admin,
    ):
        await rolled(client, n=4, prompts=PROMPTS[:1])
        assert (await admin.get_state()).num_hit_tokens == 3 * 40


async def test_groups_that_were_not_taken_hold_back_the_next_ones_while_those_that_have_begun_go_on() -> None:
    begun: list[int] = []

    def prompts() -> Any:
        for number, prompt in enumerate(PROMPTS):
            begun.append(number)
            yield prompt

    async with running_stack(FakeWorker()) as stack, Client(stack.address) as client:
        taken = 0
        async with aclosing(client.rollouts(prompts(), 2, max_groups=2, **PARAMS)) as groups:
            async for _ in groups:
                taken += 1
                await until(lambda: not stack.engine.requests)  # all that have begun
                assert len(begun) == min(taken + 2, len(PROMPTS))
        assert taken == len(PROMPTS)


async def test_a_group_ends_when_there_is_enough_of_it() -> None:
    def is_enough(group: RolloutGroup) -> bool:
        return len(group.outputs) == 2

    async with (
        running_stack(FakeWorker(step_ms=1)) as stack,
        Client(stack.address) as client,
        AdminClient(stack.service.other_addresses["admin"]) as admin,
    ):
        groups = await rolled(client, n=4, seed=1, is_enough=is_enough, stop_token_ids=[60, 61, 62], max_tokens=400)
        assert (await admin.get_state()).num_failed_requests > len(PROMPTS)
        for group in groups:
            assert len(group.outputs) == 2
            assert all(output.finish_reason is FinishReason.ABORT for output in group.unfinished)
            places = [output.output_index for output in (*group.outputs, *group.unfinished)]
            assert len(set(places)) == len(places) <= 4
        await until(lambda: not stack.engine.requests)
        one = await rolled(client, n=3, is_enough=lambda _: True)
        assert [len(group.outputs) for group in one] == [1] * len(PROMPTS)
        async for _ in client.rollouts(PROMPTS, 4, max_tokens=400, ignore_eos=True):
            break
        await until(lambda: not stack.engine.requests)


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort"])
async def test_outputs_go_on_while_weights_change_and_say_which_made_them(weights: Path, mode: PauseMode) -> None:
    async with (
        running_stack(worker(**SLOW), worker(**SLOW), weights_dirs=[weights]) as stack,
        Client(stack.address) as client,
        AdminClient(stack.service.other_addresses["admin"]) as admin,
    ):
        rolling = asyncio.create_task(rolled(client, max_tokens=60, max_groups=2))
        await until(lambda: any(request.num_output_tokens > 5 for request in stack.engine.requests.values()))
        await admin.pause(mode)
        await admin.update_weights("new")
        await admin.resume()
        groups = await rolling
        spans = [[span.weights_digest for span in output.provenance] for group in groups for output in group.outputs]
        errors = [error for group in groups for error in group.errors]
        assert all(span[-1] == NEW_DIGEST and len(span) <= 2 for span in spans)
        assert any(len(span) == 2 for span in spans) == (mode != "abort")
        assert bool(errors) == (mode == "abort")
        assert all(isinstance(error, RequestAbortedError) for error in errors)
        assert len(spans) + len(errors) == 3 * len(PROMPTS)


async def cut_again_and_again(cutter: Cutter, stack: Stack) -> None:
    for _ in range(3):
        await until(lambda: sum(request.num_output_tokens for request in stack.engine.requests.values()) > 20)
        cutter.close()
        await cutter.listen()


async def test_a_stream_that_breaks_changes_nothing() -> None:
    async with (
        running_stack(FakeWorker(**SLOW)) as stack,
        Client(stack.address) as client,
        Cutter(stack.address) as cutter,
        Client(cutter.address) as cut,
    ):
        whole = await rolled(client, seed=3, max_tokens=60)
        rolling = asyncio.create_task(rolled(cut, seed=3, max_tokens=60, max_groups=2))
        await cut_again_and_again(cutter, stack)
        assert tokens(await rolling) == tokens(whole)


async def test_what_fails_is_told_by_group_and_what_is_wrong_at_once(weights: Path) -> None:
    async with running_stack(FakeWorker(max_model_len=128)) as stack, Client(stack.address) as client:
        groups = await rolled(client, prompts=[PROMPTS[0], [40] * 500, "text"])
        by_index = {group.index: group for group in groups}
        assert [len(by_index[index].outputs) for index in range(3)] == [3, 0, 3]
        assert [type(error) for error in by_index[1].errors] == [InvalidRequestError] * 3
        assert by_index[2].prompt_token_ids
        for settings, words in (
            ({"n": 0}, "n is 0"),
            ({"max_groups": 0}, "max_groups is 0"),
            ({"best_of": 2}, "best_of is 2"),
            ({"prompts": [PROMPTS[0], 3.5]}, r"prompts\[1\]"),
            ({"prompts": "text"}, "prompts"),
        ):
            with pytest.raises(InvalidRequestError, match=words):
                await rolled(client, **settings)
        assert await rolled(client, prompts=[]) == []
