"""The file of tenants: TOML, with a table of quotas for each one.

[red]
weight = 2                   # share of the queue and of what is computed, beside other tenants; by default 1
slots = 16                   # sequences that run; by default --max-num-seqs-per-tenant
waiting = 100                # requests that wait; by default --max-waiting-requests-per-tenant
tokens_per_minute = 60000    # tokens of prompts and answers; by default unlimited

["*"]                        # each tenant that has no table; without this one, they are refused
slots = 2

[adapters.legal]             # an adapter, over all tenants
tokens_per_minute = 90000
"""

import tomllib
from pathlib import Path

from octavo.values.wording import did_you_mean, shown
from octavo_shared.errors import OctavoServiceError
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.core.waiting.tenant_shares import TenantShare
from scheduler_svc.engine.tenants import TenantQuota, Tenants
from scheduler_svc.request.engine_request import MAX_TENANT_LENGTH

# Stands for each tenant without a table.
OTHERS = "*"

# Holds the tables of adapters: a tenant's own table has no tables in it.
ADAPTERS = "adapters"

KEYS = ("weight", "slots", "waiting", "tokens_per_minute")
MIN_WEIGHT, MAX_WEIGHT = 1e-9, 1e9
MAX_COUNT = 10**12


class TenantsFileError(OctavoServiceError):
    """The file of tenants cannot be used; the message names the table and the key."""


def default_quota(config: SchedulerConfig) -> TenantQuota:
    """Return the quota of a tenant of which no file says anything."""
    return TenantQuota(TenantShare(1.0, config.max_num_seqs_per_tenant), config.max_waiting_requests_per_tenant)


def read_tenants(path: Path, config: SchedulerConfig) -> Tenants:
    """Read a file of tenants.

    Raises: TenantsFileError: it is unreadable, a value is wrong, or it contradicts itself or the other settings.
    """
    place = f"--tenants-file {path}"
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise TenantsFileError(
            f"{place} cannot be read ({error.strerror}); give a file that this process may read"
        ) from error
    except (ValueError, RecursionError) as error:
        raise TenantsFileError(f"{place} is not a TOML file: {error}") from error
    adapters = _adapters(place, tables)
    if not tables:
        raise TenantsFileError(
            f'{place} contains no tenant, so no request could run; write a table such as [red], or ["*"] for all'
        )
    quotas = {tenant: _quota(f"{place}, [{_named(tenant)}]", tenant, table, config) for tenant, table in tables.items()}
    others = quotas.pop(OTHERS, None)
    return Tenants(
        quotas,
        others or default_quota(config),
        serves_others=others is not None,
        tokens_per_minute_of_adapters=adapters,
    )


def _adapters(place: str, tables: dict[str, object]) -> dict[str, int]:
    """Take the tables of adapters out; return the tokens a minute of each."""
    adapters = tables.get(ADAPTERS)
    if not isinstance(adapters, dict) or not any(isinstance(table, dict) for table in adapters.values()):
        return {}  # there are none, or it is a tenant
    del tables[ADAPTERS]
    quotas: dict[str, int] = {}
    for name, table in adapters.items():
        whose = f"{place}, [{ADAPTERS}.{_named(name)}]"
        if not isinstance(table, dict) or list(table) != ["tokens_per_minute"]:
            raise TenantsFileError(
                f"{whose} must have tokens_per_minute, and nothing else: it is all that adapters have"
            )
        tokens = _count(whose, table, "tokens_per_minute", None)
        assert tokens is not None, "it is there"
        quotas[name] = tokens
    return quotas


def _quota(place: str, tenant: str, table: object, config: SchedulerConfig) -> TenantQuota:
    if not isinstance(table, dict):
        raise TenantsFileError(
            f"{place} is {_shown(table)}; write a table for each tenant, such as [red] with weight = 2"
        )
    if len(tenant) > MAX_TENANT_LENGTH:
        raise TenantsFileError(f"{place}: the tenant is {len(tenant)} characters long; use at most {MAX_TENANT_LENGTH}")
    for flag, names in (("--trusted-clients", config.trusted_clients), ("--trusted-fronts", config.trusted_fronts)):
        if tenant in names:
            raise TenantsFileError(
                f"{place} is also a name in {flag}: a client with that certificate acts for any tenant, so a quota of "
                "its name would limit nothing; remove one of them"
            )
    for key, value in table.items():
        if isinstance(value, dict):
            raise TenantsFileError(
                f'{place} has a table {_named(key)}; put a tenant whose name has dots in quotes, such as ["a.b"]'
            )
        if key not in KEYS:
            hint = did_you_mean(key, KEYS) or f"; use {', '.join(KEYS)}"
            raise TenantsFileError(f"{place}: {_named(key)} is not a quota{hint}")
    default = default_quota(config)
    most_waiting = config.max_waiting_requests
    return TenantQuota(
        TenantShare(_weight(place, table), _count(place, table, "slots", default.share.max_num_seqs)),
        _count(place, table, "waiting", default.max_waiting, most_waiting, f"{most_waiting} (--max-waiting-requests)"),
        _count(place, table, "tokens_per_minute", None),
    )


def _weight(place: str, table: dict[str, object]) -> float:
    weight = table.get("weight", 1.0)
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise TenantsFileError(f"{place}: weight is {_shown(weight)}; it must be a number from 1e-9 to 1e9")
    return float(weight)


def _count(
    place: str,
    table: dict[str, object],
    key: str,
    default: int | None,
    most: int = MAX_COUNT,
    most_in_words: str = str(MAX_COUNT),
) -> int | None:
    if key not in table:
        return default
    count = table[key]
    if not isinstance(count, int) or isinstance(count, bool):
        raise TenantsFileError(f"{place}: {key} is {_shown(count)}; it must be a whole number")
    if count < 1:
        raise TenantsFileError(
            f"{place}: {key} is {count}; it must be at least 1: to refuse a tenant, remove its table"
        )
    if count > most:
        raise TenantsFileError(f"{place}: {key} is {count}; it must be at most {most_in_words}")
    return count


def _named(name: str) -> str:
    """Return a name as it stands in the file, on one line."""
    return shown(name if name.isprintable() else repr(name), MAX_TENANT_LENGTH)


def _shown(value: object) -> str:
    """Return a value roughly as it stands in the file."""
    return str(value).lower() if isinstance(value, bool) else shown(repr(value))
