"""OpenAI's API by OpenAI's own client: the real SMG gateway, a scheduler and fake executors, each a process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from octavo import Client, SamplingParams
from octavo.admin.v1 import admin_pb2, admin_service_pb2, admin_service_pb2_grpc
from octavo.outputs import ChatMessage
from tests.support.patience import PATIENCE_S
from tests.support.processes import Service, running_service, start_service

pytestmark = pytest.mark.timeout(120)

FAKE = "executor_svc.fake"
SCHEDULER = "scheduler_svc"
GATEWAY = "octavo.gateway"

ATTACHED = admin_pb2.EXECUTOR_STATUS_ATTACHED
MODEL = "fake"
PROMPT = "Tell me a story"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": PROMPT}]
ENDLESS = 7000

# In the kernel's tables: 127.0.0.1 with its bytes from the last to the first, and the state of a server's socket.
LOOPBACK = "0100007F"
TCP_LISTEN = "0A"

# So that a full queue is answered at once; `test_readme.py` has the gateway as it is.
NO_RETRIES = ("--retry-max-retries", "1")


def greedy(**params: Any) -> dict[str, Any]:
    return {"model": MODEL, "temperature": 0, "max_tokens": 24, **params}


@asynccontextmanager
async def openai_client(gateway: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://{gateway.address}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


@asynccontextmanager
async def running_api(
    *executors: Service, flags: tuple[str, ...] = ()
) -> AsyncIterator[tuple[openai.AsyncOpenAI, Service]]:
    """Run a scheduler for the executors and the gateway in front; yield a client and the scheduler.

    The gateway listens on this machine only, and leaves with its parent.
    """
    addresses = ",".join(executor.address for executor in executors)
    async with running_service(SCHEDULER, "--executor", addresses, "--vllm-engine", *flags) as scheduler:
        while len(await losses_of_attached(scheduler)) < len(executors):
            await asyncio.sleep(0.01)
        async with (
            running_service(GATEWAY, "--scheduler", scheduler.address, *NO_RETRIES) as gateway,
            openai_client(gateway) as client,
        ):
            yield client, scheduler
            assert listening_hosts(gateway.process.pid) == [LOOPBACK, LOOPBACK]  # the API, and SMG's metrics
            assert gateway.process.stdin is not None
            gateway.process.stdin.close()  # what the end of its parent does
            assert await gateway.process.wait() == 0


@asynccontextmanager
async def admin_stub(scheduler: Service) -> "AsyncIterator[admin_service_pb2_grpc.AdminServiceAsyncStub]":
    async with grpc.aio.insecure_channel(scheduler.other_addresses["admin"]) as channel:
        yield admin_service_pb2_grpc.AdminServiceStub(channel)


async def losses_of_attached(scheduler: Service) -> dict[str, int]:
    """Return the address of every attached executor, and how often it was lost."""
    return {e.address: e.num_losses for e in await executors_of(scheduler) if e.status == ATTACHED}


async def executors_of(scheduler: Service) -> list[admin_pb2.ExecutorState]:
    async with admin_stub(scheduler) as admin:
        return list((await admin.GetSchedulerState(admin_service_pb2.GetSchedulerStateRequest())).executors)


async def live_requests(scheduler: Service) -> int:
    async with admin_stub(scheduler) as admin:
        return len((await admin.ListRequests(admin_service_pb2.ListRequestsRequest())).requests)


async def no_live_request(scheduler: Service) -> None:
    while await live_requests(scheduler):
        await asyncio.sleep(0.01)


async def text_of(stream: Any) -> str:
    """Return what a stream of a chat or a completion adds up to."""
    text = ""
    async for chunk in stream:
        for choice in chunk.choices:
            text += (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""
    return text


async def check_answers(client: openai.AsyncOpenAI, scheduler: Service) -> None:
    """A chat and a completion, whole and streamed, are what GenerationService answers."""
    async with Client(scheduler.address) as octavo_client:
        params = SamplingParams(temperature=0.0, max_tokens=24)
        of_chat = await octavo_client.generate([ChatMessage(role="user", content=PROMPT)], params)
        of_text = await octavo_client.generate(PROMPT, params)
    chat = await client.chat.completions.create(messages=MESSAGES, **greedy())
    assert chat.choices[0].message.content == of_chat.outputs[0].text
    assert chat.choices[0].finish_reason == "length"
    assert chat.usage is not None
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (of_chat.usage.num_prompt_tokens, 24)
    streamed = await client.chat.completions.create(messages=MESSAGES, stream=True, **greedy())
    assert await text_of(streamed) == of_chat.outputs[0].text
    completion = await client.completions.create(prompt=PROMPT, **greedy())
    assert completion.choices[0].text == of_text.outputs[0].text
    assert await text_of(await client.completions.create(prompt=PROMPT, stream=True, **greedy())) == (
        of_text.outputs[0].text
    )


async def check_usage(client: openai.AsyncOpenAI) -> None:
    """Usage counts the tokens, also of a stream, and those of the prefix cache."""
    prompt = "A long prompt that fills some blocks of the cache, so that it is found there again. " * 2
    for num_cached in (0, len(prompt) // 16 * 16):
        stream = await client.completions.create(
            prompt=prompt, stream=True, stream_options={"include_usage": True}, **greedy()
        )
        usage = [chunk.usage async for chunk in stream][-1]
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 24)
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == num_cached


async def check_sampling(client: openai.AsyncOpenAI) -> None:
    """Seeds, several outputs, stop strings, log-probabilities."""
    drawn = [
        await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, seed=seed, n=2) for seed in (1, 1, 2)
    ]
    texts = [[choice.text for choice in completion.choices] for completion in drawn]
    assert texts[0] == texts[1]
    assert len({text for pair in texts for text in pair}) == 4
    equal = await client.chat.completions.create(messages=MESSAGES, n=3, **greedy())
    assert len({choice.message.content for choice in equal.choices}) == 1
    assert [choice.index for choice in equal.choices] == [0, 1, 2]

    whole = (await client.completions.create(prompt=PROMPT, **greedy())).choices[0].text
    stop = whole[8:10]
    stopped = await client.completions.create(prompt=PROMPT, stop=[stop], **greedy())
    assert stopped.choices[0].text == whole[: whole.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens == len(whole[: whole.index(stop) + 2].encode()), "it went on after the stop"

    chat = await client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **greedy())
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 24
    assert all(token.top_logprobs[0].logprob == token.logprob for token in logprobs.content)


async def check_refusals(client: openai.AsyncOpenAI) -> None:
    """What cannot be honoured is an error of the caller, with the sentence of the scheduler."""
    schema: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    with pytest.raises(openai.BadRequestError, match="json_schema is set; it must be unset"):
        await client.chat.completions.create(messages=MESSAGES, response_format=schema, **greedy())
    with pytest.raises(openai.BadRequestError, match="max_tokens is 0; it must be at least 1"):
        await client.completions.create(prompt=PROMPT, **greedy(max_tokens=0))
    with pytest.raises(openai.BadRequestError, match="maximum context length is 8192 tokens"):
        await client.completions.create(prompt="x" * 9000, **greedy())
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(prompt=PROMPT, **greedy(model="another"))
    with pytest.raises(openai.APIStatusError) as embedding:
        await client.embeddings.create(model=MODEL, input="text")
    assert embedding.value.status_code == 501


async def check_streams_while_an_executor_is_killed(
    client: openai.AsyncOpenAI, scheduler: Service, doomed: Service
) -> None:
    """Streams that began on an executor which is killed are the same as undisturbed ones."""
    params: dict[str, Any] = {"model": MODEL, "seed": 11, "temperature": 0.9, "max_tokens": 500, "stream": True}
    # Shorter than a block: a prompt that is cached at one executor would go there again.
    prompts = [f"{index} story" for index in range(4)]
    begin = [client.completions.create(prompt=prompt, **params) for prompt in prompts]
    undisturbed = await asyncio.gather(*[text_of(await stream) for stream in begin])

    streams = [await client.completions.create(prompt=prompt, **params) for prompt in prompts]
    chunks = [aiter(stream) for stream in streams]
    begun = [(await anext(stream)).choices[0].text for stream in chunks]
    running = {executor.address: executor.num_running_requests for executor in await executors_of(scheduler)}
    assert running[doomed.address], "nobody runs on the executor that is to be killed"
    await doomed.kill()
    rests = await asyncio.gather(*map(text_of, chunks))
    assert [first + rest for first, rest in zip(begun, rests, strict=True)] == undisturbed


async def test_openais_client_gets_what_the_native_service_answers_and_a_killed_executor_changes_nothing() -> None:
    doomed = await start_service(FAKE, "--step-ms", "2")
    async with (
        running_service(FAKE, "--step-ms", "2") as survivor,
        running_api(doomed, survivor) as (client, scheduler),
    ):
        assert [model.id async for model in client.models.list()] == [MODEL]
        await check_answers(client, scheduler)
        await check_usage(client)
        await check_sampling(client)
        await check_refusals(client)
        await no_live_request(scheduler)
        await check_streams_while_an_executor_is_killed(client, scheduler, doomed)
        assert await losses_of_attached(scheduler) == {survivor.address: 0}


async def read_all(client: openai.AsyncOpenAI, is_streamed: bool) -> None:
    answer: Any = await client.completions.create(prompt=PROMPT, stream=is_streamed, **greedy(max_tokens=ENDLESS))
    if is_streamed:
        await text_of(answer)


async def test_a_full_queue_is_too_many_requests_and_a_client_that_hangs_up_ends_its_request() -> None:
    flags = ("--max-waiting-requests", "1", "--max-num-seqs", "1")
    async with (
        running_service(FAKE, "--step-ms", "50") as executor,  # a request would take 350 s
        running_api(executor, flags=flags) as (client, scheduler),
    ):
        held = []
        for num_live, is_streamed in ((1, False), (2, True)):
            held.append(asyncio.create_task(read_all(client, is_streamed)))
            while await live_requests(scheduler) < num_live:
                await asyncio.sleep(0.01)
        with pytest.raises(openai.RateLimitError, match="the waiting queue is full"):
            await client.completions.create(prompt=PROMPT, **greedy())
        for task in held:
            task.cancel()
        async with asyncio.timeout(PATIENCE_S):
            await no_live_request(scheduler)
        running = asyncio.create_task(read_all(client, is_streamed=True))
        while not await live_requests(scheduler):
            await asyncio.sleep(0.01)
        running.cancel()
        async with asyncio.timeout(PATIENCE_S):
            await no_live_request(scheduler)
        assert (await client.completions.create(prompt=PROMPT, **greedy())).choices[0].text


async def test_new_requests_wait_out_a_scheduler_that_starts_again() -> None:
    async with running_service(FAKE) as executor:
        # The same scheduler to its executor, which the next one takes over at once.
        flags = ("--executor", executor.address, "--vllm-engine", "--scheduler-id", "restarted")
        scheduler = await start_service(SCHEDULER, *flags)
        async with Client(scheduler.address) as octavo_client:
            await octavo_client.wait_until_ready(60)
        async with (
            running_service(GATEWAY, "--scheduler", scheduler.address) as gateway,
            openai_client(gateway) as client,
        ):
            before = await client.completions.create(prompt=PROMPT, **greedy())
            await scheduler.kill()
            # More than a circuit breaker would let fail.
            waiting = [asyncio.create_task(client.completions.create(prompt=PROMPT, **greedy())) for _ in range(12)]
            async with running_service(SCHEDULER, *flags, "--listen", scheduler.address):
                answers = await asyncio.gather(*waiting)
    assert {answer.choices[0].text for answer in answers} == {before.choices[0].text}


def listening_hosts(pid: int) -> list[str]:
    """Return the addresses, as the kernel writes them, of the sockets that a process listens on (Linux)."""
    own = {entry.readlink().name for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()}
    hosts = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == TCP_LISTEN and f"socket:[{fields[9]}]" in own:
                hosts.append(fields[1].partition(":")[0])
    return hosts
