"""A target that speaks octavo.generation.v1."""

import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from octavo.bench.errors import RequestFailedError
from octavo.bench.record import RequestRecord, TargetInfo, TokenUsage
from octavo.client import Client
from octavo.errors import InvalidRequestError
from octavo.values.outputs import Delta, Finished, FinishReason
from octavo.values.sampling_params import SamplingParams


class OctavoTarget:
    """A scheduler; see `Target`. Use it as `async with OctavoTarget(...) as target`.

    Args:
        client: Not open yet.
        temperature: 0: greedy.
        ignore_eos: Whether outputs go on after the end-of-sequence token.
        timeout_s: Longest that one request may take.
        account: Whose requests they are: further arguments of `Client.stream`.
        in_words: Returns what the scheduler says of a field in the words of whoever set it.
    """

    def __init__(
        self,
        client: Client,
        *,
        temperature: float,
        ignore_eos: bool,
        timeout_s: float,
        account: Mapping[str, Any],
        in_words: Callable[[str], str] = str,
    ) -> None:
        self._client = client
        self._temperature = temperature
        self._ignore_eos = ignore_eos
        self._timeout_s = timeout_s
        self._account = account
        self._in_words = in_words

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def describe(self) -> TargetInfo:
        """Ask which model is served. Raises OctavoError: those of `Client.get_model`."""
        model = await self._client.get_model()
        return TargetInfo("octavo", self._client.address, model.model_id, model.max_model_len, model.vocab_size)

    async def send(self, record: RequestRecord) -> None:
        """Run one request. Raises OctavoError: those of `Client.stream`, or somebody aborted it."""
        planned = record.planned
        params = SamplingParams(
            temperature=self._temperature, max_tokens=planned.max_tokens, ignore_eos=self._ignore_eos
        )
        try:
            await self._receive(record, params)
        except InvalidRequestError as error:
            raise InvalidRequestError(self._in_words(str(error)), field=error.field) from error

    async def _receive(self, record: RequestRecord, params: SamplingParams) -> None:
        stream = self._client.stream(record.planned.prompt, params, timeout_s=self._timeout_s, **self._account)
        async with aclosing(stream) as events:
            async for event in events:
                if isinstance(event, Delta):
                    if event.token_ids:
                        record.add_event(time.perf_counter(), len(event.token_ids))
                elif isinstance(event, Finished):
                    usage = event.usage
                    record.usage = TokenUsage(usage.num_prompt_tokens, usage.num_output_tokens, usage.num_cached_tokens)
                    if event.outputs[0].finish_reason is FinishReason.ABORT:
                        raise RequestFailedError("the request was aborted")
