"""Which Host a foreign page cannot have, and what a browser says of where a call comes from."""

from scheduler_svc.http.origin_checks import is_cross_site, is_local_host
from tests.support.each_row import each_row


@each_row(
    *("127.0.0.1", "127.0.0.1:50052", "10.1.2.3:80", "[::1]", "[::1]:50052", "[2001:db8::1]:80"),
    *("localhost", "localhost:50052", "LOCALHOST", "localhost.", "octavo.localhost:50052", "a.b.localhost."),
)
def test_addresses_and_localhost_are_local(host: str) -> None:
    assert is_local_host([host])


@each_row(
    *("example.com", "example.com:50052", "localhost.example.com", "notlocalhost", "127.0.0.1.example.com"),
    *("", ":80", "[]", "[::1", "::1", "127.0.0.1:x", "127.0.0.1 ", "a@127.0.0.1", "127.1", "0x7f000001", "1"),
    *("[127.0.0.1]x", "localhost:1:2", "[example.com]", ".localhost.example", "127.0.0.1\nlocalhost"),
)
def test_other_names_are_not(host: str) -> None:
    assert not is_local_host([host])


def test_no_host_and_two_hosts_are_not() -> None:
    assert not is_local_host([])
    assert not is_local_host(["localhost", "localhost"])


@each_row(
    (None, False), ("same-origin", False), ("none", False), ("same-site", True), ("cross-site", True), ("x", True)
)
def test_calls_of_other_sites_are_known(said: str | None, expected: bool) -> None:
    assert is_cross_site(said) is expected
