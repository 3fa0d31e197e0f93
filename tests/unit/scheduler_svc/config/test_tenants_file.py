"""The file of tenants: what it gives to each one, and the sentence of each mistake."""

from pathlib import Path

import pytest

from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.config.tenants_file import TenantsFileError, read_tenants
from scheduler_svc.core.waiting.tenant_shares import TenantShare
from scheduler_svc.engine.tenants import TenantQuota, Tenants
from tests.support.each_row import each_row

CONFIG = SchedulerConfig.model_validate(
    {
        "max_waiting_requests": 10,
        "max_waiting_requests_per_tenant": 7,
        "max_num_seqs_per_tenant": 4,
        "tls_cert": "c",
        "tls_key": "k",
        "tls_client_ca": "a",
        "trusted_clients": ("gateway",),
        "engine_listen": "127.0.0.1:0",
        "front_tls_ca": "f",
        "trusted_fronts": ("octavo-front",),
    }
)
ALL_OF_RED = "[red]\nweight = 2\nslots = 3\nwaiting = 10\ntokens_per_minute = 600\n"


def read(folder: Path, text: str | bytes) -> Tenants:
    path = folder / "tenants.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_tenants(path, CONFIG)


def test_a_table_has_the_quotas_of_its_tenant_and_the_flags_say_the_rest(tmp_path: Path) -> None:
    default = TenantQuota(TenantShare(1.0, 4), 7)
    all_of_red = TenantQuota(TenantShare(2.0, 3), 10, 600)
    assert read(tmp_path, ALL_OF_RED + '["a.b"]\nweight = 0.5\n[""]\n') == Tenants(
        {"red": all_of_red, "a.b": TenantQuota(TenantShare(0.5, 4), 7), "": default}, default, serves_others=False
    )
    adapters = '[adapters.a]\ntokens_per_minute = 9\n[adapters."b.c"]\ntokens_per_minute = 8\n'
    assert read(tmp_path, f"[red]\n{adapters}").tokens_per_minute_of_adapters == {"a": 9, "b.c": 8}
    assert read(tmp_path, "[adapters]\nslots = 3\n").of("adapters").share.max_num_seqs == 3
    assert read(tmp_path, '[red]\n["*"]\nslots = 1\n') == Tenants({"red": default}, TenantQuota(TenantShare(1.0, 1), 7))


@each_row(
    ("", r'contains no tenant, so no request could run; write a table such as [red], or ["*"] for all'),
    ("[red", "is not a TOML file: Expected ']' at the end of a table declaration (at end of document)"),
    (b"[\xff]", "is not a TOML file: 'utf-8' codec can't decode byte 0xff in position 1: invalid start byte"),
    ("[red]\n[red]\n", "is not a TOML file: Cannot declare ('red',) twice (at line 2, column 5)"),
    ("[red]\nslots = 1\nslots = 2\n", "is not a TOML file: Cannot overwrite a value (at line 3, column 10)"),
    ("red = 2\n", ", [red] is 2; write a table for each tenant, such as [red] with weight = 2"),
    ("[a.b]\nslots = 1\n", ', [a] has a table b; put a tenant whose name has dots in quotes, such as ["a.b"]'),
    (f"[{'a' * 257}]\n", f", [{'a' * 256}...]: the tenant is 257 characters long; use at most 256"),
    ("[adapters.a]\ntokens_per_minute = 9\n", "contains no tenant, so no request could run"),
    ("[red]\n[adapters.a]\nslots = 9\n", ", [adapters.a] must have tokens_per_minute, and nothing else"),
    ("[red]\n[adapters.a]\ntokens_per_minute = 0\n", ", [adapters.a]: tokens_per_minute is 0"),
    ("[red]\n[adapters]\nslots = 1\n[adapters.a]\ntokens_per_minute = 1", ", [adapters.slots] must have"),
    ("[red]\nweights = 2\n", ", [red]: weights is not a quota; did you mean weight?"),
    ("[red]\ncolour = 2\n", ", [red]: colour is not a quota; use weight, slots, waiting, tokens_per_minute"),
    ('["a\\nb"]\nslots = 0\n', r", ['a\nb']: slots is 0; it must be at least 1"),
    ("[red]\nslots = " + "9" * 5000, "is not a TOML file: Exceeds the limit (4300 digits) for integer string"),
    ("[red]\nweight = 0\n", ", [red]: weight is 0; it must be a number from 1e-9 to 1e9"),
    ("[red]\nweight = -1.5\n", ", [red]: weight is -1.5; it must be a number from 1e-9 to 1e9"),
    ("[red]\nweight = nan\n", ", [red]: weight is nan; it must be a number from 1e-9 to 1e9"),
    ("[red]\nweight = true\n", ", [red]: weight is true; it must be a number from 1e-9 to 1e9"),
    ("[red]\nslots = 0\n", ", [red]: slots is 0; it must be at least 1: to refuse a tenant, remove its table"),
    ("[red]\nslots = 1.5\n", ", [red]: slots is 1.5; it must be a whole number"),
    ('["*"]\nwaiting = "9"\n', ", [*]: waiting is '9'; it must be a whole number"),
    ("[red]\nwaiting = 11\n", ", [red]: waiting is 11; it must be at most 10 (--max-waiting-requests)"),
    ("[red]\ntokens_per_minute = -5\n", ", [red]: tokens_per_minute is -5; it must be at least 1: to refuse a"),
    ("[gateway]\n", ", [gateway] is also a name in --trusted-clients: a client with that certificate acts for"),
    ("[octavo-front]\n", ", [octavo-front] is also a name in --trusted-fronts: a client with that certificate acts"),
)
def test_a_wrong_file_is_one_sentence_with_its_place(text: str | bytes, sentence: str, *, tmp_path: Path) -> None:
    with pytest.raises(TenantsFileError) as caught:
        read(tmp_path, text)
    place = f"--tenants-file {tmp_path / 'tenants.toml'}"
    assert str(caught.value).startswith(f"{place}{sentence}" if sentence.startswith(",") else f"{place} {sentence}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TenantsFileError, match=r"--tenants-file .* cannot be read \(No such file or directory\)"):
        read_tenants(tmp_path / "nowhere", CONFIG)
