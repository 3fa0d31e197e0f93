"""The scheduler's configuration: flags, environment, TOML file (see `shared/config.py`)."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from shared.service_config import ADDRESS_PATTERN, ServiceConfig

ExecutorTarget = Annotated[str, Field(pattern=ADDRESS_PATTERN)]
ClientName = Annotated[str, Field(min_length=1)]
TenantWeight = Annotated[str, Field(pattern=r"^[^=]{1,256}=(0\.\d*[1-9]\d*|[1-9]\d{0,8}(\.\d{1,9})?)$")]


class SchedulerConfig(ServiceConfig):
    """Serve clients: tokenize, schedule steps on an executor, stream what it samples."""

    service: ClassVar[str] = "scheduler"
    program: ClassVar[str] = "python -m scheduler_svc"

    listen: str = Field(
        "127.0.0.1:50051",
        pattern=ADDRESS_PATTERN,
        description="Address to serve clients on, host:port; port 0 takes a free one. The default is this machine "
        "only: elsewhere, set --tls-cert and --tokens-file too.",
    )
    executor: tuple[ExecutorTarget, ...] = Field(
        ("127.0.0.1:50061",),
        min_length=1,
        description="Executors, host:port each, separated by commas; dns:///name:port stands for all addresses that "
        "the name has, and is looked up again and again. The default is an executor's own default.",
    )
    max_request_bytes: int = Field(
        4 * 2**20,
        ge=2**10,
        lt=2**31,
        description="Largest request of a client, in bytes; gRPC refuses a larger one with RESOURCE_EXHAUSTED. The "
        "default is gRPC's own, and holds a text of a million tokens.",
    )
    resolve_interval_s: float = Field(
        5.0, gt=0, description="Time between two lookups of the names in --executor, in seconds."
    )
    max_executors: int | None = Field(
        None,
        ge=1,
        description="Most executors that this scheduler attaches to, so that other schedulers find some: an executor "
        "serves one scheduler at a time. By default all that it can get.",
    )
    admin_listen: str = Field(
        "127.0.0.1:50052",
        pattern=ADDRESS_PATTERN,
        description="Address to serve operators on (AdminService, and a page for browsers), host:port; port 0 takes a "
        "free one. The default is this machine only.",
    )
    tokens_file: Path | None = Field(
        None,
        description="File with the bearer tokens of clients, one TENANT TOKEN a line; tenant * may act for any tenant "
        "and use AdminService. Read again when it changes. By default nobody is asked for a token.",
    )
    trusted_clients: tuple[ClientName, ...] = Field(
        (),
        description="Names in client certificates, separated by commas, whose owners need no token and may act for any "
        "tenant, such as an OpenAI gateway; needs --tls-client-ca.",
    )
    executor_tls_ca: Path | None = Field(
        None,
        description="PEM file with the authorities that executors' certificates may come from; the scheduler speaks "
        "TLS with its executors then. By default plaintext.",
    )
    executor_tls_cert: Path | None = Field(
        None,
        description="PEM file with the certificate that the scheduler shows to executors with --tls-client-ca; read at "
        "each connection.",
    )
    executor_tls_key: Path | None = Field(
        None, description="PEM file with the private key of --executor-tls-cert; read at each connection."
    )
    executor_tls_server_name: str | None = Field(
        None,
        min_length=1,
        description="Name in the certificates of the executors, if it is not that in --executor; with dns:/// they are "
        "dialled by IP address, so it must be given.",
    )
    scheduler_id: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Identity that an executor knows this scheduler by, stable over restarts, so that a restarted "
        "one takes over at once; by default host name and listen address, with port 0 a new one at each start.",
    )
    served_model_name: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Name of the model for clients: in GetModel, in OpenAI's API, and in the metrics with vLLM's "
        "names. By default the executor's: a hub id, or the last part of a directory.",
    )
    tokenizer: Path | None = Field(
        None, description="Directory with tokenizer.json; by default the executor sends the model's own."
    )
    max_num_seqs: int | None = Field(
        None, ge=1, description="Sequences that may run at once; by default as many as the executor has slots."
    )
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="Token budget of a step; prompts beyond it are computed in chunks. Lower: smoother streams; "
        "higher: more tokens a second. By default the executor's own limit.",
    )
    max_waiting_requests: int = Field(
        1024, ge=1, description="Requests that may wait before new ones get RESOURCE_EXHAUSTED."
    )
    max_waiting_requests_per_tenant: int | None = Field(
        None, ge=1, description="The same for each tenant by itself; by default a tenant may fill the queue."
    )
    policy: Literal["fcfs", "priority"] = Field(
        "fcfs",
        description="fcfs: first come, first served. priority: requests of a smaller `priority` first, and preempted "
        "last. Under both, tenants share fairly.",
    )
    tenant_weights: tuple[TenantWeight, ...] = Field(
        (),
        description="Tenants and their shares, name=weight, separated by commas; requests of others are refused. By "
        "default any tenant is served, with weight 1.",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="Where the value of a sampling parameter comes from that a request does not set. auto: from the "
        "model's generation_config.json, if it has one. none: always the default of the API.",
    )
    max_beam_width: int = Field(
        16, ge=2, description="Widest beam search that a request may ask for; a search of width w takes w slots."
    )
    preemption_mode: Literal["auto", "recompute", "swap"] = Field(
        "auto",
        description="What happens to a request that makes room for others. recompute: its tokens are computed again; "
        "swap: its blocks are moved to the executor's host memory, if it has some; auto: swap for several sequences.",
    )
    prefill_mode: Literal["chunked", "first"] = Field(
        "chunked",
        description="chunked: prompts are computed in what decodes leave of the budget; first: prompts go before "
        "decodes, in steps of their own, and streams stand still meanwhile, for four steps in a row at most.",
    )
    long_prefill_threshold: int = Field(
        0,
        ge=0,
        description="A prompt with more tokens to compute is long: it gets at most so many tokens a step, so that "
        "streams keep their pace beside it; 0: none is long.",
    )
    max_long_prefills: int = Field(1, ge=1, description="Long prompts that are computed at the same time.")
    watermark: float = Field(
        0.01,
        ge=0,
        lt=1,
        description="Share of the KV cache that new requests leave free for the growth of running ones; with less, "
        "they are preempted more often, with more, fewer run.",
    )
    prefix_caching: bool = Field(
        True,
        description="Take the computed blocks of an earlier prompt that begins alike, instead of computing them again.",
    )
    steps_in_flight: int = Field(
        2,
        ge=1,
        le=8,
        description="Steps sent before the first is answered: 1 is lock-step, 2 hides scheduling and the network.",
    )
    check_batch_table: bool = Field(
        False,
        description="Let the executor compare its batch table with the scheduler's in every step, for debugging; a "
        "difference fails the step. Off, because it hashes the whole table each time.",
    )
    step_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Time after which an executor that does not answer a step counts as lost in any case, in seconds. "
        "It matters for the first step: later ones hang when they take 2 s longer than steps like them did. A large "
        "prefill on a CPU takes minutes.",
    )
    orphan_timeout_s: float = Field(
        300.0,
        gt=0,
        allow_inf_nan=False,
        description="Time for which an accepted request waits while no attached executor can hold it, in seconds; then "
        "it ends with UNAVAILABLE. Enough for an executor to be restarted and to load a large model.",
    )
    lease_s: float = Field(
        10.0,
        ge=1,
        le=600,
        description="Time after the last heartbeat for which an executor is kept from other schedulers, in seconds; "
        "heartbeats come five times as often.",
    )
    vllm_engine: bool = Field(
        False,
        description="Serve vllm.grpc.engine.VllmEngine at --listen too, for the SMG gateway, which speaks OpenAI's "
        "API; needs octavo[openai].",
    )
    gateway_tenant: str = Field(
        "",
        max_length=256,
        description="Tenant of the requests that come through --vllm-engine; by default the empty one.",
    )

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
