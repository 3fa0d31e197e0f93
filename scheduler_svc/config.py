"""The scheduler's configuration: flags, environment, TOML file (see `shared/config.py`)."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from shared.service_config import ADDRESS_PATTERN, ServiceConfig

ExecutorTarget = Annotated[str, Field(pattern=ADDRESS_PATTERN)]
ClientName = Annotated[str, Field(min_length=1)]
TenantWeight = Annotated[str, Field(pattern=r"^[^=]{1,256}=(0\.\d*[1-9]\d*|[1-9]\d{0,8}(\.\d{1,9})?)$")]


# In place of an address: the port is not opened.
OFF = "off"


class SchedulerConfig(ServiceConfig):
    """Serve clients: tokenize, schedule steps on executors, stream the tokens."""

    service: ClassVar[str] = "scheduler"
    program: ClassVar[str] = "python -m scheduler_svc"

    listen: str = Field(
        "127.0.0.1:50051",
        pattern=ADDRESS_PATTERN,
        description="Address for clients, host:port. Port 0 takes a free one. To serve other machines, set "
        "--tls-cert and --tokens-file too.",
    )
    executor: tuple[ExecutorTarget, ...] = Field(
        ("127.0.0.1:50061",),
        min_length=1,
        description="Addresses of the executors, host:port, separated by commas. dns:///name:port means every "
        "address of that name, looked up again and again.",
    )
    max_request_bytes: int = Field(
        4 * 2**20,
        ge=2**10,
        lt=2**31,
        description="Largest request of a client, in bytes. gRPC refuses a larger one with RESOURCE_EXHAUSTED.",
    )
    fronts: int = Field(
        0,
        ge=0,
        le=64,
        description="Processes that hold the calls of clients: texts, tokenizers, streams. 0: the scheduler's own "
        "process does. More take work off the process that decides steps, where many clients stream.",
    )
    resolve_interval_s: float = Field(
        5.0, gt=0, description="Seconds between two DNS lookups of the names in --executor."
    )
    max_executors: int | None = Field(
        None,
        ge=1,
        description="Most executors that this scheduler attaches to. Set it if several schedulers share a fleet. By "
        "default there is no limit.",
    )
    admin_listen: str = Field(
        "127.0.0.1:50052",
        pattern=ADDRESS_PATTERN,
        description="Address for operators, host:port: AdminService, and a page for browsers. Port 0 takes a free one.",
    )
    tokens_file: Path | None = Field(
        None,
        description="File with the tokens of clients, one TENANT TOKEN a line; tenant * may act for any tenant and "
        "use AdminService. It is read again when it changes. By default no token is needed.",
    )
    trusted_clients: tuple[ClientName, ...] = Field(
        (),
        description="Names in client certificates, separated by commas. These clients need no token and may act for "
        "any tenant. Needs --tls-client-ca.",
    )
    executor_tls_ca: Path | None = Field(
        None,
        description="PEM file with the authorities that signed the executors' certificates. It turns on TLS to the "
        "executors.",
    )
    executor_tls_cert: Path | None = Field(
        None,
        description="PEM file with the certificate that the scheduler shows to executors. It is read at each "
        "connection.",
    )
    executor_tls_key: Path | None = Field(
        None, description="PEM file with the private key of --executor-tls-cert. It is read at each connection."
    )
    executor_tls_server_name: str | None = Field(
        None,
        min_length=1,
        description="Name in the executors' certificates, if it differs from the one in --executor. Set it with "
        "dns:///, where the scheduler connects to IP addresses.",
    )
    scheduler_id: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Name by which executors know this scheduler. A scheduler that restarts with the same name gets "
        "its executors back at once. By default host name and listen address; with port 0 a new name at each start.",
    )
    served_model_name: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Name of the model that clients see. By default the executor's: a hub id, or the last part of a "
        "directory.",
    )
    tokenizer: Path | None = Field(
        None, description="Directory with tokenizer.json. By default the executor sends the model's own."
    )
    max_num_seqs: int | None = Field(
        None, ge=1, description="Most sequences that run at once. By default as many as the executor has slots."
    )
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="Most tokens in one step; longer prompts are computed in chunks. Less makes streams smoother, "
        "more gives more tokens a second. By default the executor's own limit.",
    )
    max_waiting_requests: int = Field(
        1024, ge=1, description="Most requests in the queue. Further ones get RESOURCE_EXHAUSTED."
    )
    max_waiting_requests_per_tenant: int | None = Field(
        None, ge=1, description="Most requests of one tenant in the queue. By default one tenant may fill it."
    )
    policy: Literal["fcfs", "priority"] = Field(
        "fcfs",
        description="fcfs: first come, first served. priority: requests with a smaller `priority` run first and are "
        "preempted last. Tenants share fairly with both.",
    )
    tenant_weights: tuple[TenantWeight, ...] = Field(
        (),
        description="Tenants and their shares: name=weight, separated by commas. Other tenants are refused. By "
        "default every tenant is served, with weight 1.",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="Defaults of sampling parameters. auto: those in the model's generation_config.json, if it has "
        "one. none: always those of the API.",
    )
    max_beam_width: int = Field(
        16, ge=2, description="Widest beam search that a request may ask for. A search of width w takes w slots."
    )
    preemption_mode: Literal["auto", "recompute", "swap"] = Field(
        "auto",
        description="How a request makes room for others. recompute: its tokens are computed again later. swap: its "
        "blocks move to the executor's host memory, if there is some. auto: swap for requests with several "
        "sequences.",
    )
    prefill_mode: Literal["chunked", "first"] = Field(
        "chunked",
        description="chunked: decodes run first, and prompts get the rest of each step. first: prompts run before "
        "decodes, in steps of their own; streams pause for at most four steps in a row.",
    )
    long_prefill_threshold: int = Field(
        0,
        ge=0,
        description="A prompt with more tokens to compute is long: it gets at most this many in one step, so that "
        "streams keep their pace. 0: no prompt is long.",
    )
    max_long_prefills: int = Field(1, ge=1, description="Most long prompts that are computed at the same time.")
    watermark: float = Field(
        0.01,
        ge=0,
        lt=1,
        description="Share of the KV cache that new requests leave free, so that running ones can grow. Less: more "
        "requests run. More: fewer preemptions.",
    )
    prefix_caching: bool = Field(
        True,
        description="Reuse the cached blocks of an earlier prompt that begins with the same tokens.",
    )
    steps_in_flight: str = Field(
        "auto",
        pattern=r"^(auto|[1-8])$",
        coerce_numbers_to_str=True,
        description="Most steps that are sent and not yet answered, 1 to 8. 1: one after the other. 2: hides the time "
        "for scheduling and a fast network. auto: 1 to 4, as few as keep each executor busy.",
    )
    check_batch_table: bool = Field(
        False,
        description="For debugging: the executor compares its batch table with the scheduler's in every step, and a "
        "difference fails the step. It is slow.",
    )
    step_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Longest time of a step, in seconds; then its executor is lost. It matters for the first step: "
        "later ones may take 2 s longer than steps like them did.",
    )
    orphan_timeout_s: float = Field(
        300.0,
        gt=0,
        allow_inf_nan=False,
        description="Time that an accepted request waits while no attached executor can hold it, in seconds. Then it "
        "ends with UNAVAILABLE.",
    )
    lease_s: float = Field(
        10.0,
        ge=1,
        le=600,
        description="Time after the last heartbeat for which an executor stays reserved for this scheduler, in "
        "seconds. Five heartbeats are sent in that time.",
    )
    step_log: Path | None = Field(
        None,
        description="Folder for a log of all decisions, for octavo replay. It is as secret as the prompts: files are "
        "readable by their owner only. By default none is written.",
    )
    step_log_max_mb: int = Field(
        1024,
        ge=8,
        description="Most megabytes (2^20 bytes) of all files in --step-log, at least 8. The oldest are removed.",
    )
    step_log_tokens: Literal["plain", "masked"] = Field(
        "plain",
        description="Token ids in --step-log. masked: each stands for another one, and nobody knows for which. Such a "
        "log cannot be run on an executor.",
    )
    openai_listen: str | None = Field(
        None,
        pattern=ADDRESS_PATTERN,
        description="Address for OpenAI's API over HTTP, host:port, with TLS and tokens as at --listen. Port 0 takes a "
        "free one. By default, and with the word off, it is not served.",
    )
    openai_unknown_fields: Literal["refuse", "ignore"] = Field(
        "refuse",
        description="What becomes of a field that OpenAI's API here does not know. refuse: the request is refused, and "
        "the field is named. ignore: the header x-octavo-ignored-fields of the answer names it.",
    )
    vllm_engine: bool = Field(
        False,
        description="Serve vllm.grpc.engine.VllmEngine at --listen too: the SMG gateway needs it for OpenAI's API. "
        "Needs octavo[openai].",
    )
    gateway_tenant: str = Field(
        "",
        max_length=256,
        description="Tenant of the requests that come through --vllm-engine. By default the one without a name.",
    )
    tool_call_parser: Literal[
        "auto",
        "none",
        "hermes",
        "llama3_json",
        "mistral",
        "qwen3_coder",
        "deepseek_v3",
        "deepseek_v31",
        "glm45",
        "granite",
        "hunyuan_a13b",
        "kimi_k2",
        "minimax_m2",
        "olmo3",
        "phi4_mini_json",
        "pythonic",
        "seed_oss",
        "json",
    ] = Field(
        "auto",
        description="How the model writes tool calls, for OpenAI's API. auto: as its chat template shows. none: "
        "requests with tools are refused. The others are families of models.",
    )
    reasoning_parser: Literal["auto", "none", "deepseek_r1", "qwen3", "mistral", "seed_oss"] = Field(
        "auto",
        description="How the model marks its reasoning, for OpenAI's API. auto: as its chat template shows. none: "
        "reasoning is part of the answer. The others are families of models.",
    )

    @field_validator("openai_listen", mode="before")
    @classmethod
    def _serve_nothing_if_off(cls, value: object) -> object:
        """A file may have set an address: the word takes it back, in a flag or a variable."""
        return None if value == OFF else value

    @model_validator(mode="after")
    def _check_identities(self) -> Self:
        if self.trusted_clients and self.tls_client_ca is None:
            raise ValueError("--trusted-clients needs --tls-client-ca: without it no client proves its name")
        if (self.executor_tls_cert is None) != (self.executor_tls_key is None):
            raise ValueError(
                "--executor-tls-cert and --executor-tls-key go together: a certificate and its private key"
            )
        if self.executor_tls_ca is None and (self.executor_tls_cert or self.executor_tls_server_name):
            raise ValueError(
                "--executor-tls-cert and --executor-tls-server-name need --executor-tls-ca: without it the scheduler "
                "speaks plaintext with its executors"
            )
        return self

    @property
    def weights_of_tenants(self) -> dict[str, float]:
        """Return `tenant_weights` by tenant; empty: any tenant is served."""
        return {name: float(weight) for name, _, weight in (item.rpartition("=") for item in self.tenant_weights)}
