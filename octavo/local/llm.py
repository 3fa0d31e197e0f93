"""The offline API: both services on this machine, prompts in, outputs in the same order out.

    from octavo import LLM, SamplingParams

    with LLM("smollm2") as llm:
        for output in llm.generate(["The sky is", "Water is"], SamplingParams(max_tokens=16)):
            print(output.outputs[0].text)

Synchronous on purpose; octavo/client.py is the async way in, octavo/local/services.py starts the services.
"""

import os
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from octavo.client import Client
from octavo.errors import ClosedError
from octavo.generation.v1.generation_service_pb2 import GenerateRequest
from octavo.local.event_loop_thread import EventLoopThread
from octavo.local.options import LocalOptions
from octavo.local.prompt_batch import Account, LocalRequest, generate_all, until_answered
from octavo.local.services import LocalServices
from octavo.local.tokenizer import Tokenizer
from octavo.values.outputs import FailedRequest, ModelInfo, Prompt, RequestOutput
from octavo.values.pooling import Embeddings, EmbedInput, Scores
from octavo.values.prompts import generate_request, list_conversations, list_encoder_prompts, list_prompts
from octavo.values.sampling_params import SamplingParams, list_params, one_for_each
from octavo.values.wording import kind_of

_Result = TypeVar("_Result")

# Between two deltas of a request: callers get whole outputs, and what was delivered need not be computed again if the
# scheduler dies.
_DELTA_INTERVAL_MS = 250


class LLM:
    """A model on this machine. It is ready when the constructor returns.

    A service that ends by itself is started again, as by `octavo up`, and what it was asked for goes on.

    Nothing is left running: both services end with `close()`, at the end of a `with` block, when the
    object is garbage, when the interpreter ends, and when the process is killed.

    The settings of the services are keywords, each under its own name, such as `LLM("smollm2", max_model_len=2048,
    block_size_tokens=32, policy="priority")`; docs/reference/configuration.md has all of them. A name that both
    services have, such as `log_level`, is for both. `executor` and `scheduler` take what is for one of them only, and
    ports, which always are: `executor={"metrics_listen": "127.0.0.1:9101"}`.

    Args:
        model: "smollm2" (the demo model, fetched on first use), a Hugging Face directory, a GGUF file, or a hub id.
        progress: Whether to show on stderr what is being waited for.
        verbose: Whether the services' logs go to stderr.
        executor: Settings of the executor only.
        scheduler: Settings of the scheduler only.
        settings: Settings by name; None: the service's default.

    Raises:
        SettingsError: a setting is wrong, and nothing was started.
        LocalServiceError: a service did not start; the message has its reason.
        TypeError: a keyword is no setting.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        progress: bool = True,
        verbose: bool = False,
        executor: Mapping[str, object] = MappingProxyType({}),
        scheduler: Mapping[str, object] = MappingProxyType({}),
        **settings: Any,
    ) -> None:
        _check_arguments(model, settings)
        self._console = Console(stderr=True, quiet=not progress)
        options = LocalOptions(model, settings, executor=executor, scheduler=scheduler, is_private=True)
        options.prepare_model(progress=progress)
        # More than a batch holds, so that it never runs dry; what a short queue refuses then waits here.
        self._max_in_flight = 2 * options.executor.config.max_num_seqs
        loop_thread = EventLoopThread()
        self._owner_pid = os.getpid()
        with self._console.status("starting") as status:
            say = partial(self._console.print, markup=False, highlight=False)  # of ours it must not hold more
            services = LocalServices.from_options(options, on_status=status.update, on_restart=say, is_verbose=verbose)
            # From here on, whatever happens, the services are stopped and the thread ends.
            self._clients: list[Client] = []  # of short calls; one, once there was a call
            self._finalizer = weakref.finalize(self, _close, loop_thread, services, self._clients, self._owner_pid)
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
        prompts: str | Iterable[str] | Iterable[int] | Iterable[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        speculate: bool = True,
        encoder_prompts: str | Iterable[int] | Iterable[str | Sequence[int] | None] | None = None,
        progress: bool = True,
        **keywords: Any,
    ) -> list[RequestOutput | FailedRequest]:
        """Complete prompts; the outputs are in their order.

        What is no prompt at all is refused before anything runs. A prompt that the scheduler refuses, such as a too
        long one, has a FailedRequest in its place, and the rest is answered. If none is answered, the error of the
        first one is raised.

        Args:
            prompts: One text or one list of token ids, or any number of either; arrays of numpy or torch are lists too.
            sampling_params: For all prompts, or one for each; None: all defaults.
            priority: A lower number is served first.
            tenant: The tenant that the prompts run for; tenants share the model fairly.
            cache_salt: Prompts share cached blocks only with equal `tenant` and `cache_salt`.
            speculate: False: one token a step, also where the scheduler speculates; the tokens are the same.
            encoder_prompts: What the model's encoder reads, one for each prompt, which is the decoder's then. None,
                also for one of them: the encoder, if there is one, reads the prompt.
            progress: Whether to show a progress bar on stderr.
            keywords: Fields of SamplingParams, such as `temperature=0`; they win over `sampling_params`.

        Raises:
            OctavoError: an argument is wrong, no prompt was answered, or a service stopped and cannot be started again.
                Of several prompts, the sentence of what is wrong with one begins with `prompts[INDEX]`, from 0.
            TypeError: a keyword is no field of SamplingParams.
        """
        account = Account(priority, tenant, cache_salt, speculate)
        each, params = list_prompts(prompts), list_params(sampling_params, keywords, "generate")
        encoded = list_encoder_prompts(encoder_prompts, len(each), "prompts")
        return self._run_all(each, params, account, "prompts", progress, encoded)

    def chat(
        self,
        conversations: Sequence[Mapping[str, object]] | Iterable[Sequence[Mapping[str, object]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        speculate: bool = True,
        progress: bool = True,
        **keywords: Any,
    ) -> list[RequestOutput | FailedRequest]:
        """Answer one conversation or a list of them, rendered with the model's chat template.

        A conversation is a list of ChatMessage, `{"role": ..., "content": ...}`; the rest is as in `generate`.
        """
        account = Account(priority, tenant, cache_salt, speculate)
        each = list_conversations(conversations)
        return self._run_all(each, list_params(sampling_params, keywords, "chat"), account, "conversations", progress)

    def embed(
        self,
        inputs: EmbedInput | Iterable[EmbedInput],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        tenant: str = "",
        progress: bool = True,
    ) -> Embeddings:
        """Return the vectors of texts; arguments and errors are as in `Client.embed`.

        `progress`: whether to show a progress bar on stderr.
        """
        return self._pool(
            lambda client, on_progress: client.embed(
                inputs,
                prompt_name=prompt_name,
                dimensions=dimensions,
                truncate_prompt_tokens=truncate_prompt_tokens,
                priority=priority,
                tenant=tenant,
                on_progress=on_progress,
            ),
            "embedding",
            progress,
        )

    def score(
        self,
        queries: str | Iterable[str],
        documents: str | Iterable[str],
        *,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        tenant: str = "",
        progress: bool = True,
    ) -> Scores:
        """Return how well documents answer queries; arguments and errors are as in `Client.score`.

        `progress`: whether to show a progress bar on stderr.
        """
        return self._pool(
            lambda client, on_progress: client.score(
                queries,
                documents,
                truncate_prompt_tokens=truncate_prompt_tokens,
                priority=priority,
                tenant=tenant,
                on_progress=on_progress,
            ),
            "scoring",
            progress,
        )

    def get_model(self) -> ModelInfo:
        """Describe the model."""
        return self._run_with_client(lambda client: client.get_model())

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer; it works until the LLM is closed."""
        return Tokenizer(self._run_with_client)

    def close(self) -> None:
        """Stop both services; closing twice is fine."""
        self._finalizer()

    def _run_all(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None,
        account: Account,
        name: str,
        progress: bool,
        encoder_prompts: Sequence[Prompt | None] | None = None,
    ) -> list[RequestOutput | FailedRequest]:
        """Run prompts that the caller calls `name`."""
        each = one_for_each(sampling_params, len(prompts), name)
        names = [name if len(prompts) == 1 else f"{name}[{index}]" for index in range(len(prompts))]

        def message(
            prompt: Prompt, params: SamplingParams | None, name: str, encoded: Prompt | None
        ) -> GenerateRequest:
            return generate_request(
                prompt,
                params,
                name=name,
                encoder_prompt=encoded,
                encoder_name=name.replace("prompts", "encoder_prompts", 1),
                min_delta_interval_ms=_DELTA_INTERVAL_MS,
                **asdict(account),
            )

        requests = [
            LocalRequest(prompt, message(prompt, params, its_name, encoded), its_name)
            for prompt, params, its_name, encoded in zip(
                prompts, each, names, encoder_prompts or [None] * len(prompts), strict=True
            )
        ]
        with _make_progress(is_shown=progress) as bar:
            task_id = bar.add_task("generating", total=len(prompts), num=0)
            num_tokens = 0

            def on_output(output: RequestOutput | FailedRequest) -> None:
                nonlocal num_tokens
                num_tokens += output.usage.num_output_tokens if isinstance(output, RequestOutput) else 0
                bar.update(task_id, advance=1, num=num_tokens)

            outputs = self._run(lambda: generate_all(self._services, requests, self._max_in_flight, on_output))
        if outputs and all(isinstance(output, FailedRequest) for output in outputs):
            [error, *_] = [output.error for output in outputs]
            assert error is not None
            raise error
        return outputs

    def _pool(
        self,
        work: Callable[[Client, Callable[[int], None]], Coroutine[None, None, _Result]],
        what: str,
        progress: bool,
    ) -> _Result:
        with _make_progress(is_shown=progress, unit="inputs") as bar:
            task_id = bar.add_task(what, total=None, num=0)

            def ask(client: Client) -> Coroutine[None, None, _Result]:
                return work(client, lambda num: bar.update(task_id, num=num))

            return self._run_with_client(lambda client: until_answered(self._services, lambda: ask(client)))

    def _run_with_client(self, work: Callable[[Client], Coroutine[None, None, _Result]]) -> _Result:
        async def run() -> _Result:
            if not self._clients:
                self._clients.append(await Client(self._services.address).__aenter__())
            return await work(self._clients[0])

        return self._run(run)

    def _run(self, work: Callable[[], Coroutine[None, None, _Result]]) -> _Result:
        if os.getpid() != self._owner_pid:  # the thread of the event loop stayed behind
            raise ClosedError(
                "this LLM belongs to the process that made it; make one after the fork, or `spawn` workers"
            )
        if not self._finalizer.alive:
            raise ClosedError("the LLM is closed; make a new one")
        return self._loop_thread.run(lambda: self._services.run_beside(work()))


def _close(loop_thread: EventLoopThread, services: LocalServices, clients: Sequence[Client], owner_pid: int) -> None:
    async def stop() -> None:
        for client in clients:
            await client.close()
        await services.stop()

    if os.getpid() == owner_pid:  # a forked copy of us owns neither the thread nor the services
        loop_thread.close(stop)


def _check_arguments(model: object, settings: Mapping[str, Any]) -> None:
    """Raise TypeError for what Python itself would refuse, had each setting a place in the signature of LLM."""
    if not isinstance(model, str | os.PathLike):
        kinds = "a Hugging Face directory, a hub id, or the name of a demo model, such as 'smollm2'"
        raise TypeError(f"LLM: model is {kind_of(model)}; it must be {kinds}")
    if not settings:
        return
    from octavo.local.service_settings import unknown_name  # needs the packages of the services

    for name in settings:
        if trouble := unknown_name(name):
            raise TypeError(f"LLM: {trouble}")


def _make_progress(*, is_shown: bool, unit: str = "tokens") -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(f"{{task.fields[num]}} {unit}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not is_shown,
    )
