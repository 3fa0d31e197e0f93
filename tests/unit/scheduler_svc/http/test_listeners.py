"""Which addresses the port opens for what people write, and what is said when it cannot."""

import re
import socket
from collections.abc import Iterator

import pytest

from octavo_shared.errors import AddressError
from scheduler_svc.http.listeners import is_free, is_shared_by_others, open_listeners, reserve
from tests.support.each_row import each_row

TAKEN = "it is in use, or not an address of this machine; set --page-listen to another one"


@pytest.fixture
def opened() -> Iterator[list[socket.socket]]:
    """Sockets to close at the end."""
    sockets: list[socket.socket] = []
    yield sockets
    for each in sockets:
        each.close()


def answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def test_one_address_is_one_socket(opened: list[socket.socket]) -> None:
    opened += open_listeners("127.0.0.1:0", "--page-listen")
    [listener] = opened
    assert listener.getsockname()[0] == "127.0.0.1"
    assert answers("127.0.0.1", port_of(listener))
    assert not listener.getblocking()


@each_row("0.0.0.0", "[::]", "::")
def test_a_wildcard_of_either_family_is_both(host: str, *, opened: list[socket.socket]) -> None:
    opened += open_listeners(f"{host}:0", "--page-listen")
    assert answers("127.0.0.1", port_of(opened[0]))
    assert answers("::1", port_of(opened[0])) == socket.has_dualstack_ipv6()


def test_a_name_is_all_its_addresses_on_one_port(opened: list[socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.2", 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0)),  # not ours, left out
    ]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)
    opened += open_listeners("several:0", "--page-listen")
    assert [listener.getsockname()[0] for listener in opened] == ["127.0.0.1", "127.0.0.2"]
    assert len(set(map(port_of, opened))) == 1


def test_the_brackets_of_ipv6_are_taken_off(opened: list[socket.socket]) -> None:
    opened += open_listeners("[::1]:0", "--page-listen")
    assert opened[0].getsockname()[0] == "::1"


@each_row("127.0.0.1", "0.0.0.0", "[::]", "localhost")
def test_an_address_in_use_is_refused(host: str, *, opened: list[socket.socket]) -> None:
    opened += open_listeners("127.0.0.1:0", "--page-listen")
    taken = f"{host}:{port_of(opened[0])}"
    with pytest.raises(AddressError) as caught:
        opened += open_listeners(taken, "--page-listen")
    assert str(caught.value) == f"cannot listen on {taken}: {TAKEN}"


@each_row("192.0.2.1:0", "nobody.invalid:0")
def test_an_address_that_is_not_ours_is_refused(address: str) -> None:
    with pytest.raises(AddressError) as caught:
        open_listeners(address, "--page-listen")
    assert TAKEN in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost", "0.0.0.0", "[::]"])
def test_what_is_reserved_is_for_those_who_share_it(opened: list[socket.socket], host: str) -> None:
    if "::" in host and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    opened += reserve(f"{host}:0", "--listen")
    port = port_of(opened[0])
    assert not answers("localhost", port), "nobody listens yet"
    with pytest.raises(AddressError):
        open_listeners(f"{host}:{port}", "--listen")
    for _ in range(2):
        opened += open_listeners(f"{host}:{port}", "--listen", is_shared=True)
    assert answers("::1" if host == "[::1]" else "127.0.0.1", port)


def test_a_name_is_reserved_with_all_its_addresses_on_one_port(
    opened: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{last}", 0)) for last in (1, 2)]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)
    opened += reserve("several:0", "--listen")
    assert [each.getsockname()[0] for each in opened] == ["127.0.0.1", "127.0.0.2"]
    assert len(set(map(port_of, opened))) == 1


@each_row("192.0.2.1:0", "nowhere.invalid:0")
def test_what_is_not_ours_is_not_reserved(listen: str) -> None:
    with pytest.raises(AddressError, match=f"cannot listen on {re.escape(listen)}"):
        reserve(listen, "--listen")


def test_where_somebody_listens_nothing_is_reserved(opened: list[socket.socket]) -> None:
    opened += open_listeners("127.0.0.1:0", "--listen", is_shared=True)
    listen = f"127.0.0.1:{port_of(opened[0])}"
    with pytest.raises(AddressError):
        reserve(listen, "--listen")
    assert (is_free(listen), is_shared_by_others(listen)) == (False, True)


def test_who_listens_alone_shares_with_nobody(opened: list[socket.socket]) -> None:
    opened += open_listeners("127.0.0.1:0", "--listen")
    listen = f"127.0.0.1:{port_of(opened[0])}"
    assert (is_free(listen), is_shared_by_others(listen)) == (False, False)
    opened.pop().close()
    assert (is_free(listen), is_shared_by_others(listen)) == (True, False)
    assert (is_free("192.0.2.1:0"), is_shared_by_others("192.0.2.1:0")) == (True, False)
