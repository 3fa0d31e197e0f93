"""The scheduler's configuration: flags, environment, TOML file (see `shared/config.py`)."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from shared.config import ADDRESS_PATTERN, ServiceConfig


class SchedulerConfig(ServiceConfig):
    """Serve clients: tokenize, schedule steps on an executor, stream what it samples."""

    service: ClassVar[str] = "scheduler"
    program: ClassVar[str] = "python -m scheduler_svc"

    listen: str = Field(
        "127.0.0.1:50051",
        pattern=ADDRESS_PATTERN,
        description="Address to serve clients on, host:port; port 0 takes a free one. The default is this machine "
        "only, because the protocol has no authentication.",
    )
    executor: str = Field(
        "127.0.0.1:50061",
        pattern=ADDRESS_PATTERN,
        description="Address of the executor, host:port; the default is an executor's own default.",
    )
    scheduler_id: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Identity that an executor knows this scheduler by, stable over restarts, so that a restarted "
        "one takes over at once; by default host name and listen address.",
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
        description="Time after which an executor that does not answer a step counts as lost, in seconds. Only a hang "
        "takes so long: a broken connection is noticed at once, and a large prefill on a CPU takes minutes.",
    )
    lease_s: float = Field(
        10.0,
        ge=1,
        le=600,
        description="Time after the last heartbeat for which an executor is kept from other schedulers, in seconds; "
        "heartbeats come five times as often.",
    )
