"""The settings that every service has; `config.py` reads them from flags, environment and file."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_PORT = r"(6553[0-5]|655[0-2]\d|65[0-4]\d{2}|6[0-4]\d{3}|[1-5]\d{4}|\d{1,4})"
ADDRESS_PATTERN = rf"^.+:{_PORT}$"


def check_pair(flags: str, cert: Path | None, key: Path | None) -> None:
    """Raise ValueError if only one of a certificate and its key is set; `flags` begins the names of the settings."""
    if (cert is None) != (key is None):
        raise ValueError(f"{flags}-cert and {flags}-key must be set together: a certificate and its private key")


class ServiceConfig(BaseModel):
    """The settings of every service.

    `service` names the table and the variables, `program` is the command for people. `removed` has the settings of
    earlier releases, with their replacements.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    service: ClassVar[str]
    program: ClassVar[str]
    removed: ClassVar[Mapping[str, str]] = MappingProxyType({})

    listen: str = Field(
        pattern=ADDRESS_PATTERN, description="gRPC listen address, host:port. Each service has its own default."
    )
    health_listen: str | None = Field(
        None,
        pattern=ADDRESS_PATTERN,
        description=(
            "Listen address for health checks only, host:port. Always plaintext, so that Kubernetes can probe it. "
            "--listen also answers health checks."
        ),
    )
    announce_to: tuple[Annotated[str, Field(pattern=ADDRESS_PATTERN)], ...] = Field(
        (),
        description=(
            "Comma-separated addresses, host:port, of the --health-listen of the services that look for this one: an "
            "executor's schedulers, a scheduler's standalone fronts. dns:///name:port stands for every address of that "
            "name. It tells them that it is ready, so that they need not wait for DNS caches. Fronts announce nothing."
        ),
    )
    metrics_listen: str | None = Field(
        None,
        pattern=ADDRESS_PATTERN,
        description="Listen address for Prometheus metrics, host:port: HTTP at /metrics. Off by default.",
    )
    tls_cert: Path | None = Field(
        None,
        description=(
            "PEM file with the service's certificate chain. Enables TLS. Reloaded when it changes. Plaintext by "
            "default."
        ),
    )
    tls_key: Path | None = Field(
        None,
        description="PEM file with the private key of --tls-cert, without a passphrase. Reloaded when it changes.",
    )
    tls_client_ca: Path | None = Field(
        None,
        description=(
            "PEM file with the authorities of client certificates. Clients without a certificate are rejected (mutual "
            "TLS). By default no client certificate is required."
        ),
    )
    max_message_bytes: int = Field(
        64 * 2**20,
        ge=2**16,
        lt=2**31,
        description="Maximum message size in either direction, in bytes.",
    )
    shutdown_grace_s: float = Field(
        20.0,
        ge=0,
        description=(
            "Grace period for running work after SIGTERM, in seconds. Keep it below Kubernetes' default of 30 s."
        ),
    )
    shutdown_delay_s: float = Field(
        0.0,
        ge=0,
        description=(
            "After SIGTERM, keep taking work for this many seconds, and tell clients to go elsewhere meanwhile; the "
            "grace period begins after it. For Kubernetes, whose Services still lead to a pod that ends for a moment."
        ),
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level to log. info: one line per change of state."
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="Format of log lines on stderr: key=value pairs, or one JSON object per line."
    )
    tracing: Literal["off", "otlp"] = Field(
        "off",
        description=(
            "otlp: send a trace of each request to the OpenTelemetry collector configured by the OTEL_* variables. "
            "Requires the extra tracing: pip install '.[tracing]'."
        ),
    )
    exit_on_stdin_close: bool = Field(
        False, description="Exit when standard input closes, so that the service does not outlive its parent process."
    )

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        check_pair("--tls", self.tls_cert, self.tls_key)
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError(
                "--tls-client-ca requires --tls-cert and --tls-key: without TLS clients present no certificate"
            )
        return self
