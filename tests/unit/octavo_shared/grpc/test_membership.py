import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from octavo_shared.grpc import membership
from octavo_shared.grpc.membership import Membership, resolve
from tests.simulation.loop import SimulationLoop

INTERVAL_S = 0.001


class Names:
    """A name server with one entry a name; an entry that is missing is an error."""

    def __init__(self, **addresses: set[str]) -> None:
        self.addresses = addresses
        self.num_lookups = 0

    async def resolve(self, name: str, port: int) -> set[str]:
        self.num_lookups += 1
        if name not in self.addresses:
            raise OSError(f"{name} is not known")
        return {f"{host}:{port}" for host in self.addresses[name]}

    async def looked_up_again(self) -> None:
        """Return once every name was looked up with what is known now."""
        enough = self.num_lookups + 2 * len(self.addresses) + 2
        while self.num_lookups < enough:
            await asyncio.sleep(0)


async def watch(membership: Membership, on_change: Callable[[list[str]], None]) -> None:
    async def tell(addresses: list[str]) -> None:
        on_change(addresses)

    await membership.watch(tell)


@asynccontextmanager
async def watching(membership: Membership, on_change: Callable[[list[str]], None]) -> AsyncIterator[None]:
    task = asyncio.create_task(watch(membership, on_change))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_list_is_told_once_in_its_order_and_without_repetition() -> None:
    seen: list[list[str]] = []
    await watch(Membership(["b:2", "a:1", "b:2"], INTERVAL_S), seen.append)
    assert seen == [["b:2", "a:1"]]


async def test_a_name_server_that_is_silent_delays_neither_the_list_nor_other_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "LOOK_UP_S", 0.01)

    async def resolve_or_hang(name: str, port: int) -> set[str]:
        if name == "silent":
            await asyncio.Event().wait()
        return {f"{name}:{port}"}

    seen, targets = list[list[str]](), ["dns:///silent:1", "a:1", "dns:///x:1"]
    async with watching(Membership(targets, 60.0, resolve_or_hang), seen.append):
        async with asyncio.timeout(10):
            while not seen:
                await asyncio.sleep(0.001)
    assert seen == [["a:1", "x:1"]]


async def test_a_name_stands_for_all_its_addresses_behind_those_of_the_list() -> None:
    names, seen = Names(pods={"y", "x", "a"}), list[list[str]]()
    peers = Membership(["dns:///pods:1", "a:1"], INTERVAL_S, names.resolve)
    async with watching(peers, seen.append):
        await names.looked_up_again()
    assert seen == [["a:1", "x:1", "y:1"]]
    assert peers.addresses == seen[0]


async def test_changes_are_told_and_only_changes() -> None:
    names, seen = Names(pods={"x"}, more=set()), list[list[str]]()
    async with watching(Membership(["dns:///pods:1", "dns:///more:2"], INTERVAL_S, names.resolve), seen.append):
        await names.looked_up_again()
        names.addresses["pods"] = {"x", "y"}
        await names.looked_up_again()
        names.addresses["pods"] = {"y"}
        names.addresses["more"] = {"z"}
        await names.looked_up_again()
        names.addresses["pods"] = set()
        await names.looked_up_again()
    assert seen[0] == ["x:1"]
    assert seen[1] == ["x:1", "y:1"]
    assert seen[-2] == ["y:1", "z:2"]
    assert seen[-1] == ["z:2"]


def test_a_peer_that_answers_is_forgotten_when_no_look_up_has_named_it_for_a_while_and_another_one_at_once() -> None:
    """In simulated time: `late` is named by every other look-up, `gone` and `silent` by none after the first."""
    names, told = Names(pods={"late", "gone", "silent"}), list[tuple[float, list[str]]]()

    async def look() -> None:
        peers = Membership(["dns:///pods:1"], 5.0, names.resolve)

        async def tell(addresses: list[str]) -> None:
            told.append((loop.time() - begin_s, addresses))

        begin_s = loop.time()
        watching = asyncio.create_task(peers.watch(tell, lambda address: address != "silent:1"))
        for second in range(1, 300):
            await asyncio.sleep(1)
            names.addresses["pods"] = {"late"} if second // 5 % 2 else set()
        names.addresses.clear()  # what cannot be looked up is no word on who is there
        await asyncio.sleep(300)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    loop = SimulationLoop("0")  # type: ignore[abstract]
    try:
        loop.run_until_complete(look())
    finally:
        loop.close()
    assert [addresses for _, addresses in told] == [["gone:1", "late:1", "silent:1"], ["gone:1", "late:1"], ["late:1"]]
    assert told[1][0] == pytest.approx(5, abs=0.5)
    assert 90 <= told[2][0] <= 101


async def test_a_name_that_cannot_be_looked_up_keeps_its_addresses_and_is_in_trouble(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names, seen = Names(pods={"x"}), list[list[str]]()
    peers = Membership(["dns:///pods:1"], INTERVAL_S, names.resolve)
    async with watching(peers, seen.append):
        await names.looked_up_again()
        known = names.addresses.pop("pods")
        await names.looked_up_again()
        assert peers.addresses == ["x:1"]
        assert peers.troubles == {"pods:1": "pods:1 cannot be looked up: pods is not known"}
        names.addresses["pods"] = known
        await names.looked_up_again()
        assert peers.troubles == {}
    assert seen == [["x:1"]]
    assert [record.getMessage() for record in caplog.records] == [
        "event=name_not_resolved name=pods:1 cause='pods is not known'"
    ]


async def test_a_name_that_was_never_found_leaves_the_list_alone() -> None:
    names, seen = Names(), list[list[str]]()
    async with watching(Membership(["a:1", "dns:///pods:1"], INTERVAL_S, names.resolve), seen.append):
        await names.looked_up_again()
    assert seen == [["a:1"]]


async def test_one_name_in_trouble_does_not_hide_what_another_one_says() -> None:
    names, seen = Names(pods={"x"}), list[list[str]]()
    async with watching(Membership(["dns:///gone:1", "dns:///pods:1"], INTERVAL_S, names.resolve), seen.append):
        await names.looked_up_again()
    assert seen == [["x:1"]]


async def test_the_name_server_of_the_machine_is_asked() -> None:
    assert "127.0.0.1:50061" in await resolve("localhost", 50061)
    assert await resolve("::1", 50061) == {"[::1]:50061"}
