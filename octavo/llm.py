"""The offline API: both services on this machine, prompts in, outputs in the same order out.

    from octavo import LLM, SamplingParams

    with LLM("smollm2") as llm:
        for output in llm.generate(["The sky is", "Water is"], SamplingParams(max_tokens=16)):
            print(output.outputs[0].text)

Synchronous on purpose; octavo/client.py is the async way in, octavo/local.py starts the services.
"""

import asyncio
import os
import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from octavo.client import Client
from octavo.errors import ClosedError, InvalidRequestError
from octavo.event_loop_thread import EventLoopThread
from octavo.local import LocalOptions, LocalServices
from octavo.model_names import resolve_model
from octavo.outputs import ChatMessage, ModelInfo, Prompt, RequestOutput
from octavo.sampling_params import SamplingParams

_Result = TypeVar("_Result")

# Requests in flight: more than a batch holds, so that it never runs dry, and fewer than the scheduler's
# waiting queue takes, so that none is refused.
_MAX_IN_FLIGHT_REQUESTS = 128


@dataclass(frozen=True, slots=True)
class _Account:
    """How requests of one call are told apart from others."""

    priority: int
    tenant: str
    cache_salt: str


class LLM:
    """A model on this machine. It is ready when the constructor returns.

    Nothing is left running: both services end with `close()`, at the end of a `with` block, when the
    object is garbage, when the interpreter ends, and when the process is killed.

    Args:
        model: "smollm2" (the demo model, made on first use), a Hugging Face directory, or a hub id.
        progress: Whether to show on stderr what is being waited for.
        verbose: Whether the services' logs go to stderr.
        dtype: Number format of weights and cache; None, here and below: the service's default.
        quantization: "int8": weights in a quarter of float32's memory; on a CPU a single stream is faster.
        attention_backend: "auto", "triton", "flash_attn", "xformers" or "torch".
        device: "cpu" or "cuda".
        tp: Ranks that share the model, each a process.
        kv_cache_gib: Size of the KV cache, in GiB.
        host_cache_gib: Size of the pool of host memory that preempted sequences are swapped to, in GiB; 0: none.
        max_model_len: Longest sequence, prompt and output together, in tokens.
        max_num_batched_tokens: Token budget of a step.
        max_num_seqs: Most sequences in the batch.

    Raises:
        LocalServiceError: a service did not start; the message has its reason.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        progress: bool = True,
        verbose: bool = False,
        dtype: str | None = None,
        quantization: str | None = None,
        attention_backend: str | None = None,
        device: str | None = None,
        tp: int | None = None,
        kv_cache_gib: float | None = None,
        host_cache_gib: float | None = None,
        max_model_len: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_num_seqs: int | None = None,
    ) -> None:
        self._console = Console(stderr=True, quiet=not progress)
        options = LocalOptions(
            model=resolve_model(model, progress=progress),
            dtype=dtype,
            quantization=quantization,
            attention_backend=attention_backend,
            device=device,
            tp=tp,
            kv_cache_gib=kv_cache_gib,
            host_cache_gib=host_cache_gib,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
        )
        loop_thread = EventLoopThread()
        with self._console.status("starting") as status:
            services = LocalServices.from_options(options, on_status=status.update, is_verbose=verbose)
            # From here on, whatever happens, the services are stopped and the thread ends.
            self._finalizer = weakref.finalize(self, _close, loop_thread, services, os.getpid())
            self._loop_thread = loop_thread
            self._services = services
            try:
                loop_thread.run(services.start)
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; the outputs are in their order.

        Args:
            prompts: One text, or a list of texts or of lists of token ids.
            sampling_params: For all prompts, or one for each; None: all defaults.
            priority: A lower number is served first.
            tenant: On whose account the prompts run; tenants share the model fairly.
            cache_salt: Prompts share cached blocks only with equal `tenant` and `cache_salt`.
            progress: Whether to show a progress bar on stderr.

        Raises:
            OctavoError: the first failure; the other requests are then cancelled. Of several prompts, the sentence of
                InvalidRequestError begins with `prompts[INDEX]: `, from 0.
        """
        each: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        return self._run_all(each, sampling_params, _Account(priority, tenant, cache_salt), progress)

    def chat(
        self,
        conversations: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, rendered with the model's chat template.

        A conversation is a list of `{"role": ..., "content": ...}`; the rest is as in `generate`.
        """
        is_one = bool(conversations) and isinstance(conversations[0], dict)
        each = cast("Sequence[Prompt]", [conversations] if is_one else conversations)
        return self._run_all(each, sampling_params, _Account(priority, tenant, cache_salt), progress)

    def get_model(self) -> ModelInfo:
        """Describe the model."""
        return self._run(lambda: _get_model(self._services.address))

    def close(self) -> None:
        """Stop both services; closing twice is fine."""
        self._finalizer()

    def _run_all(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        account: _Account,
        progress: bool,
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params_list: Sequence[SamplingParams | None] = [sampling_params] * len(prompts)
        else:
            params_list = sampling_params
        if len(params_list) != len(prompts):
            raise InvalidRequestError(
                f"there are {len(params_list)} sampling_params for {len(prompts)} prompts; give one, or one for each",
                field="sampling_params",
            )
        with _make_progress(is_shown=progress) as bar:
            task_id = bar.add_task("generating", total=len(prompts), num_tokens=0)
            num_tokens = 0

            def on_output(output: RequestOutput) -> None:
                nonlocal num_tokens
                num_tokens += output.usage.num_output_tokens
                bar.update(task_id, advance=1, num_tokens=num_tokens)

            address = self._services.address
            return self._run(lambda: _generate_all(address, prompts, params_list, account, on_output))

    def _run(self, work: Callable[[], Coroutine[None, None, _Result]]) -> _Result:
        if not self._finalizer.alive:
            raise ClosedError("the LLM is closed; make a new one")
        return self._loop_thread.run(lambda: self._services.run_beside(work()))


def _close(loop_thread: EventLoopThread, services: LocalServices, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a forked copy of us owns neither the thread nor the services
        loop_thread.close(services.stop)


async def _get_model(address: str) -> ModelInfo:
    async with Client(address) as client:
        return await client.get_model()


async def _generate_all(
    address: str,
    prompts: Sequence[Prompt],
    sampling_params: Sequence[SamplingParams | None],
    account: _Account,
    on_output: Callable[[RequestOutput], None],
) -> list[RequestOutput]:
    slots = asyncio.Semaphore(_MAX_IN_FLIGHT_REQUESTS)

    async with Client(address) as client:

        async def generate(index: int, prompt: Prompt, params: SamplingParams | None) -> RequestOutput:
            try:
                async with slots:
                    output = await client.generate(
                        prompt,
                        params,
                        priority=account.priority,
                        tenant=account.tenant,
                        cache_salt=account.cache_salt,
                    )
            except InvalidRequestError as error:
                if len(prompts) == 1:
                    raise
                raise InvalidRequestError(f"prompts[{index}]: {error}", field=error.field) from error
            on_output(output)
            return output

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(generate(index, prompt, params))
                    for index, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True))
                ]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]


def _make_progress(*, is_shown: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[num_tokens]} tokens"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not is_shown,
    )
