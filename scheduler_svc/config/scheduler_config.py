"""The scheduler's configuration: flags, environment, TOML file (see `octavo_shared/process/config.py`)."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from octavo.values.address import is_loopback
from octavo_shared.process.service_config import ADDRESS_PATTERN
from scheduler_svc.config.client_side_config import CertificateName, ClientSideConfig, none_if_off

ExecutorTarget = Annotated[str, Field(pattern=ADDRESS_PATTERN)]
TenantWeight = Annotated[str, Field(pattern=r"^[^=]{1,256}=(0\.\d*[1-9]\d*|[1-9]\d{0,8}(\.\d{1,9})?)$")]


class SchedulerConfig(ClientSideConfig):
    """Serve clients: tokenize, schedule steps on executors, stream the tokens."""

    service: ClassVar[str] = "scheduler"
    program: ClassVar[str] = "python -m scheduler_svc"

    executor: tuple[ExecutorTarget, ...] = Field(
        ("127.0.0.1:50061",),
        min_length=1,
        description="Addresses of the executors, host:port, separated by commas. dns:///name:port means every "
        "address of that name, looked up again and again.",
    )
    fronts: str = Field(
        "0",
        pattern=r"^(auto|\d|[1-5]\d|6[0-4])$",
        coerce_numbers_to_str=True,
        description="Processes that hold the calls of clients: texts, tokenizers, streams; 0 to 64. 0: the scheduler's "
        "own process does. More take work off the process that decides steps, where many clients stream. auto: half "
        "of the CPUs that the process may use, at most 7; none below 4 CPUs.",
    )
    core_listen: str | None = Field(
        None,
        pattern=ADDRESS_PATTERN,
        description="Address where fronts of their own join (octavo-front --core), host:port, with TLS as at --listen. "
        "They are not for clients. If other machines reach it, set --front-tls-ca and --trusted-fronts. Port 0 takes "
        "a free one. By default none join.",
    )
    front_tls_ca: Path | None = Field(
        None,
        description="PEM file with the authorities of the certificates that fronts show at --core-listen. Whoever "
        "shows none is refused. It is read again when it changes. Needs --tls-cert.",
    )
    trusted_fronts: tuple[CertificateName, ...] = Field(
        (),
        description="Names in certificates of fronts, separated by commas: only these join at --core-listen. A front "
        "may run requests of all tenants. Needs --front-tls-ca.",
    )
    core_insecure: bool = Field(
        False,
        description="Let whoever reaches --core-listen join without a certificate, although other machines reach it. "
        "Only where the network keeps them out.",
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
        description="Address for operators, host:port: AdminService. Port 0 takes a free one.",
    )
    page_listen: str | None = Field(
        None,
        pattern=ADDRESS_PATTERN,
        description="Address of the live page over HTTP, host:port, with TLS and operators' tokens as at "
        "--admin-listen. Port 0 takes a free one. By default, and with the word off, it is not served.",
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
    prefix_key_file: Path | None = Field(
        None,
        description="File with at least 32 secret, random bytes. A scheduler that starts again with the same file and "
        "name finds what its executors have cached. With --fronts, the cores of one start find it without a file.",
    )
    served_model_name: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Name of the model that clients see. By default the executor's: a hub id, or the last part of a "
        "directory.",
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
        1024,
        ge=1,
        description="Most requests in the queue. Further ones get RESOURCE_EXHAUSTED. A full queue still takes "
        "requests within the fair share of their tenant (--tenant-weights), which is one request at least: the newest "
        "waiting requests of the tenant furthest above its own share end, with RESOURCE_EXHAUSTED.",
    )
    max_waiting_requests_per_tenant: int | None = Field(
        None,
        ge=1,
        description="Most requests of one tenant in the queue. By default one tenant may fill it, until others come.",
    )
    max_waiting_tokens: int | None = Field(
        None,
        ge=1,
        description="Most prompt tokens in the queue, over all requests. Further requests get RESOURCE_EXHAUSTED, "
        "with the same fair shares; where nothing waits, a prompt of any length may. By default only requests "
        "are counted.",
    )
    max_num_seqs_per_tenant: int | None = Field(
        None,
        ge=1,
        description="Most sequences of one tenant that run at a time, over all executors; its other requests wait, and "
        "others pass them. A request of more sequences runs when nothing else of its tenant does. By default any "
        "number.",
    )
    policy: Literal["fcfs", "priority"] = Field(
        "fcfs",
        description="fcfs: first come, first served. priority: waiting requests with a smaller `priority` are "
        "admitted first, and preempted last when blocks run out. A request that runs is not displaced for one that "
        "waits. Tenants share fairly with both.",
    )
    tenant_weights: tuple[TenantWeight, ...] = Field(
        (),
        description="Tenants and their shares: name=weight, separated by commas. Other tenants are refused. By "
        "default every tenant is served, with weight 1.",
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

    @field_validator("page_listen", mode="before")
    @classmethod
    def _serve_no_page_if_off(cls, value: object) -> object:
        return none_if_off(value)

    @model_validator(mode="after")
    def _check_identities(self) -> Self:
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

    @model_validator(mode="after")
    def _check_fronts(self) -> Self:
        if self.core_listen is None:
            if self.front_tls_ca or self.trusted_fronts or self.core_insecure:
                raise ValueError(
                    "--front-tls-ca, --trusted-fronts and --core-insecure need --core-listen: without it no front of "
                    "its own joins"
                )
            return self
        if (self.front_tls_ca is None) != (not self.trusted_fronts):
            raise ValueError(
                "--front-tls-ca and --trusted-fronts go together: who signed the certificates of fronts, and which "
                "names they have; an authority may have signed others too"
            )
        if self.front_tls_ca is not None and self.tls_cert is None:
            raise ValueError("--front-tls-ca needs --tls-cert and --tls-key: without TLS fronts show no certificate")
        if self.front_tls_ca is not None and self.core_insecure:
            raise ValueError("--core-insecure and --front-tls-ca exclude each other: leave out one of them")
        if self.front_tls_ca is None and not self.core_insecure and not is_loopback(self.core_listen):
            raise ValueError(
                f"--core-listen {self.core_listen} is reached from other machines, and who joins there may run "
                "requests of all tenants: set --tls-cert, --tls-key, --front-tls-ca and --trusted-fronts, or "
                "--core-insecure where the network keeps others out"
            )
        return self

    @property
    def num_fronts(self) -> int:
        """Return `fronts` as a number, once somebody has chosen one in place of auto."""
        return int(self.fronts)

    @property
    def weights_of_tenants(self) -> dict[str, float]:
        """Return `tenant_weights` by tenant; empty: any tenant is served."""
        return {name: float(weight) for name, _, weight in (item.rpartition("=") for item in self.tenant_weights)}
