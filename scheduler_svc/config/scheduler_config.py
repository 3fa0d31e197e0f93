"""The scheduler's configuration: flags, environment, TOML file (see `octavo_shared/process/config.py`)."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from octavo_shared.process.service_config import ADDRESS_PATTERN, check_pair
from scheduler_svc.config.client_side_config import CertificateName, ClientSideConfig

ExecutorTarget = Annotated[str, Field(pattern=ADDRESS_PATTERN)]


class SchedulerConfig(ClientSideConfig):
    """Serve clients: tokenize, schedule steps on executors, stream the tokens."""

    service: ClassVar[str] = "scheduler"
    program: ClassVar[str] = "python -m scheduler_svc"
    removed: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            **ClientSideConfig.removed,
            "core_listen": "it is --engine-listen now",
            "core_insecure": "it is --engine-insecure now",
            "tenant_weights": "write a table for each tenant into a TOML file, such as [red] with weight = 2, and name "
            "it in --tenants-file",
        }
    )

    executor: tuple[ExecutorTarget, ...] = Field(
        ("127.0.0.1:50061",),
        min_length=1,
        description=(
            "Comma-separated addresses of the executors, host:port. dns:///name:port stands for every address of that "
            "name; the lookup is repeated every --resolve-interval-s."
        ),
    )
    fronts: str = Field(
        "0",
        pattern=r"^(auto|\d|[1-5]\d|6[0-4])$",
        coerce_numbers_to_str=True,
        description=(
            "Number of front-end processes that handle client calls: text, tokenization, streams; 0 to 64. 0: the "
            "scheduler's own process handles them. Use more to offload the scheduling process when many clients "
            "stream. auto: half of the CPUs that the process may use, at most 7; none below 4 CPUs."
        ),
    )
    engine_listen: str | None = Field(
        None,
        pattern=ADDRESS_PATTERN,
        description=(
            "Listen address for standalone fronts (octavo-front --engine), host:port, with TLS as at --listen. Not for "
            "clients. If other machines can reach it, set --front-tls-ca and --trusted-fronts. Port 0 picks a free "
            "port. Off by default."
        ),
    )
    front_tls_ca: Path | None = Field(
        None,
        description=(
            "PEM file with the certificate authorities of standalone fronts at --engine-listen. Fronts without a "
            "certificate are rejected. Reloaded when it changes. Requires --tls-cert."
        ),
    )
    trusted_fronts: tuple[CertificateName, ...] = Field(
        (),
        description=(
            "Comma-separated names in certificates of fronts: only these may join at --engine-listen. A front may run "
            "requests of all tenants. Requires --front-tls-ca."
        ),
    )
    engine_insecure: bool = Field(
        False,
        description=(
            "Allow any process that connects to --engine-listen to join as a front, without a certificate. Only where "
            "every process that can connect is trusted: on an isolated network, or on a machine of one user."
        ),
    )
    resolve_interval_s: float = Field(
        5.0, gt=0, description="Interval between DNS lookups of the names in --executor, in seconds."
    )
    max_executors: int | None = Field(
        None,
        ge=1,
        description=(
            "Maximum number of executors that this scheduler attaches to. Set it if several schedulers share a fleet. "
            "By default unlimited."
        ),
    )
    admin_listen: str = Field(
        "127.0.0.1:50052",
        pattern=ADDRESS_PATTERN,
        description="Listen address for operators, host:port: AdminService. Port 0 picks a free port.",
    )
    page_listen: str | None = Field(
        None,
        pattern=ADDRESS_PATTERN,
        description="Listen address of the live page over HTTP, host:port, with TLS and operators' tokens as at "
        "--admin-listen. Port 0 picks a free port. Off by default.",
    )
    executor_tls_ca: Path | None = Field(
        None,
        description="PEM file with the certificate authorities of the executors. Enables TLS to the executors.",
    )
    executor_tls_cert: Path | None = Field(
        None,
        description="PEM file with the certificate that the scheduler presents to executors. Read at each connection.",
    )
    executor_tls_key: Path | None = Field(
        None, description="PEM file with the private key of --executor-tls-cert. Read at each connection."
    )
    executor_tls_server_name: str | None = Field(
        None,
        min_length=1,
        description=(
            "Server name in the executors' certificates, if it differs from the host in --executor. Set it with "
            "dns:///, where the scheduler connects to IP addresses."
        ),
    )
    scheduler_id: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description=(
            "Identity of this scheduler at its executors. A restarted scheduler with the same id reattaches to its "
            "executors at once. By default host name and listen address; with port 0 a new id at each start."
        ),
    )
    prefix_key_file: Path | None = Field(
        None,
        description=(
            "File with at least 32 secret, random bytes. A scheduler restarted with the same file and --scheduler-id "
            "reuses the prefix caches of its executors. With --fronts, a restarted engine reuses them without a file."
        ),
    )
    served_model_name: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description=(
            "Model name that clients see. By default the executor's: a hub id, or the last part of a directory path."
        ),
    )
    max_num_seqs: int | None = Field(
        None,
        ge=1,
        description=(
            "Maximum number of sequences that run at once on an executor. By default as many as it has slots."
        ),
    )
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description=(
            "Maximum number of tokens per step; longer prompts are computed in chunks. Lower values make streams "
            "smoother, higher ones raise throughput. By default the executor's own limit."
        ),
    )
    max_waiting_requests: int = Field(
        1024,
        ge=1,
        description=(
            "Maximum number of waiting requests. Further ones fail with RESOURCE_EXHAUSTED. A full queue still accepts "
            "a request within its tenant's fair share (weights in --tenants-file, at least one request); to make "
            "space, the newest waiting requests of the tenant furthest above its share fail with RESOURCE_EXHAUSTED."
        ),
    )
    max_waiting_requests_per_tenant: int | None = Field(
        None,
        ge=1,
        description=(
            "Maximum number of waiting requests per tenant, where --tenants-file does not say another one. By default "
            "one tenant may fill the queue until others arrive."
        ),
    )
    max_waiting_tokens: int | None = Field(
        None,
        ge=1,
        description=(
            "Maximum number of prompt tokens in the queue, over all requests. Further requests fail with "
            "RESOURCE_EXHAUSTED, with the same fair shares; an empty queue accepts a prompt of any length. By default "
            "unlimited."
        ),
    )
    max_num_seqs_per_tenant: int | None = Field(
        None,
        ge=1,
        description=(
            "Maximum number of sequences per tenant that run at once, over all executors, where --tenants-file does "
            "not say another one; the tenant's other requests wait, and other tenants overtake them. A request with "
            "more sequences is refused. By default unlimited."
        ),
    )
    policy: Literal["fcfs", "priority"] = Field(
        "fcfs",
        description=(
            "fcfs: first come, first served. priority: requests with a smaller `priority` are admitted first, and "
            "preempted last when blocks run out. A running request is never preempted for a waiting one. Both share "
            "fairly among tenants."
        ),
    )
    tenants_file: Path | None = Field(
        None,
        description=(
            "TOML file with a table for each tenant: weight, slots, waiting, tokens_per_minute. Tenants without a "
            'table are rejected, unless there is a table ["*"] for them. A table [adapters.NAME] has the '
            "tokens_per_minute of a LoRA adapter. The file is reloaded when it changes. By default every tenant is "
            "accepted, with weight 1."
        ),
    )
    preemption_mode: Literal["auto", "recompute", "swap"] = Field(
        "auto",
        description=(
            "What happens to a preempted request. recompute: its tokens are recomputed later. swap: its blocks move to "
            "the executor's host cache, if it has one. auto: swap for requests with several sequences."
        ),
    )
    speculate: Literal["auto", "on", "off"] = Field(
        "auto",
        description=(
            "Speculative decoding: sequences may get several tokens in a step. auto: where drafts change no output, "
            "which is where an executor is invariant. on: also elsewhere, where outputs may differ in rounding."
        ),
    )
    prefill_mode: Literal["chunked", "first"] = Field(
        "chunked",
        description=(
            "chunked: decodes are scheduled first, and prompts get the rest of each step. first: prompts run before "
            "decodes, in separate steps; streams pause for at most four steps in a row."
        ),
    )
    long_prefill_threshold: int = Field(
        0,
        ge=0,
        description=(
            "A prompt with more uncomputed tokens than this counts as long and gets at most this many per step, to "
            "keep inter-token latency low. 0: no prompt counts as long."
        ),
    )
    max_long_prefills: int = Field(1, ge=1, description="Maximum number of long prompts computed at the same time.")
    watermark: float = Field(
        0.01,
        ge=0,
        lt=1,
        description=(
            "Fraction of the KV cache that admission keeps free for the growth of running requests. Lower: more "
            "requests run. Higher: fewer preemptions."
        ),
    )
    prefix_caching: bool = Field(
        True,
        description="Reuse the cached blocks of earlier prompts with the same prefix.",
    )
    host_prefixes: bool = Field(
        True,
        description=(
            "Copy cached blocks that no request uses to the executor's host cache, in a small share of each step, and "
            "bring them back where that costs less than computing them. Preempted requests go first."
        ),
    )
    block_transfers: bool = Field(
        True,
        description=(
            "Let executors with equal weights and numerics send each other cached blocks, where that costs less than "
            "computing them: for requests that go where their prefix is not, and before those that leave a draining "
            "executor."
        ),
    )
    prefill_role_tokens: int = Field(
        1024,
        ge=1,
        description=(
            "Prompts with more tokens to compute go to executors with --role prefill, if there are some, and move to "
            "others when they have their first token."
        ),
    )
    steps_in_flight: str = Field(
        "auto",
        pattern=r"^(auto|[1-8])$",
        coerce_numbers_to_str=True,
        description=(
            "Maximum number of steps in flight per executor, 1 to 8. 1: no overlap. 2: hides the latency of scheduling "
            "and of a fast network. auto: 1 to 4, as few as keep each executor busy."
        ),
    )
    check_batch_table: bool = Field(
        False,
        description=(
            "For debugging: the executor compares its batch table with the scheduler's in every step, and the step "
            "fails if they differ. Slow."
        ),
    )
    step_timeout_s: float = Field(
        600.0,
        gt=0,
        description=(
            "Step timeout, in seconds; an executor that exceeds it counts as lost. It applies mainly to the first "
            "step: later ones may take 2 s longer than similar steps did."
        ),
    )
    orphan_timeout_s: float = Field(
        300.0,
        gt=0,
        allow_inf_nan=False,
        description=(
            "Time that an accepted request waits while no attached executor can hold it, in seconds. It then fails "
            "with UNAVAILABLE."
        ),
    )
    lease_s: float = Field(
        10.0,
        ge=1,
        le=600,
        description=(
            "Lease time: how long an executor stays reserved for this scheduler after its last heartbeat, in seconds. "
            "At least five heartbeats are sent per lease time, and one a second."
        ),
    )
    step_log: Path | None = Field(
        None,
        description=(
            "Directory for a log of all scheduling decisions, for octavo replay. Protect it like the prompts; its "
            "files are readable by their owner only. Off by default."
        ),
    )
    step_log_max_mb: int = Field(
        1024,
        ge=8,
        description="Maximum total size of the files in --step-log, in MiB, at least 8. The oldest files are removed.",
    )
    step_log_tokens: Literal["plain", "masked"] = Field(
        "plain",
        description=(
            "Token ids in --step-log. masked: replaced by a secret permutation. Such a log cannot be run on an "
            "executor."
        ),
    )

    @model_validator(mode="after")
    def _check_identities(self) -> Self:
        check_pair("--executor-tls", self.executor_tls_cert, self.executor_tls_key)
        if self.executor_tls_ca is None and (self.executor_tls_cert or self.executor_tls_server_name):
            raise ValueError(
                "--executor-tls-cert and --executor-tls-server-name require --executor-tls-ca: without it the "
                "scheduler uses plaintext to its executors"
            )
        return self

    @model_validator(mode="after")
    def _check_fronts(self) -> Self:
        if self.engine_listen is None:
            if self.front_tls_ca or self.trusted_fronts or self.engine_insecure:
                raise ValueError(
                    "--front-tls-ca, --trusted-fronts and --engine-insecure require --engine-listen: without it no "
                    "standalone front can join"
                )
            return self
        if (self.front_tls_ca is None) != (not self.trusted_fronts):
            raise ValueError(
                "--front-tls-ca and --trusted-fronts must be set together: the authority of the fronts' certificates "
                "and the accepted names; an authority may have signed other certificates too"
            )
        if self.front_tls_ca is not None and self.tls_cert is None:
            raise ValueError(
                "--front-tls-ca requires --tls-cert and --tls-key: without TLS fronts present no certificate"
            )
        if self.front_tls_ca is not None and self.engine_insecure:
            raise ValueError("--engine-insecure and --front-tls-ca are mutually exclusive: remove one")
        if self.front_tls_ca is None and not self.engine_insecure:
            raise ValueError(
                f"--engine-listen {self.engine_listen} has no --front-tls-ca, and any process that joins there may "
                "run requests of all tenants: set --tls-cert, --tls-key, --front-tls-ca and --trusted-fronts, or "
                "--engine-insecure where every process that can connect is trusted"
            )
        return self

    @property
    def num_fronts(self) -> int:
        """Return `fronts` as a number, once auto has been replaced."""
        return int(self.fronts)
