"""TLS between the scheduler and its executors, on the scheduler's side."""

from octavo.calls.tls import TlsOptions
from scheduler_svc.config.scheduler_config import SchedulerConfig

# The beginning of the names of its settings.
FLAGS = "--executor-tls"


def executor_tls(config: SchedulerConfig) -> TlsOptions | None:
    """Return how to speak TLS with executors; None: plaintext."""
    if config.executor_tls_ca is None:
        return None
    return TlsOptions(
        ca=config.executor_tls_ca,
        cert=config.executor_tls_cert,
        key=config.executor_tls_key,
        server_name=config.executor_tls_server_name,
    )
