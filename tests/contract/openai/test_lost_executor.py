"""An executor dies under many streams: nobody who reads them can tell."""

import asyncio

from executor_svc.fake.worker import FakeWorker
from tests.contract.openai.api import Api, Json, running_api
from tests.support.stack import until

NUM_STREAMS = 20
NUM_TOKENS = 60


async def streams(api: Api) -> list[tuple[list[Json], list[Json]]]:
    """Return the choices of each stream, and its usage."""

    async def one(number: int) -> tuple[list[Json], list[Json]]:
        prompt = [33 + number] * 20
        fields = {"prompt": prompt, "max_tokens": NUM_TOKENS, "seed": number, "logprobs": 1, "ignore_eos": True}
        answer = await api.complete(**fields, stream=True, stream_options={"include_usage": True})
        tokens = [choice["logprobs"] for event in answer.events for choice in event["choices"]]
        joined = [
            {name: [*values]} for entry in tokens if entry is not None for name, values in entry.items() if values
        ]
        usage = [{"completion": event["usage"]["completion_tokens"]} for event in answer.events if event["usage"]]
        return joined, usage

    return await asyncio.gather(*map(one, range(NUM_STREAMS)))


def tokens_of(stream: list[Json]) -> list[str]:
    return [token for entry in stream for token in entry.get("tokens", ())]


async def test_streams_go_on_elsewhere() -> None:
    async with running_api(FakeWorker(), FakeWorker()) as api:
        undisturbed = await streams(api)
    async with running_api(FakeWorker(step_ms=5), FakeWorker(step_ms=5), lease_s=1.0) as api:
        running = asyncio.create_task(streams(api))
        victim = api.stack.executors[0]
        await until(lambda: api.stack.num_groups_on(victim) and len(api.stack.engine.requests) == NUM_STREAMS)
        await until(lambda: any(request.num_output_tokens > 5 for request in api.stack.engine.requests.values()))
        await victim.kill()
        disturbed = await running
        num_lost = sum(ended.num_losses for ended in api.stack.engine.ended.values())
    assert num_lost > 0
    assert [tokens_of(joined) for joined, _ in disturbed] == [tokens_of(joined) for joined, _ in undisturbed]
    assert [usage for _, usage in disturbed] == [[{"completion": NUM_TOKENS}]] * NUM_STREAMS
