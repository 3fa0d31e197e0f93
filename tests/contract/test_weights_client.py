"""`AdminClient` changes the weights of fake executors: every call, files in every form, refusals as typed errors."""

import hashlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from octavo.admin.v1 import admin_service_pb2 as pb
from octavo.admin_client import AdminClient
from octavo.calls.weight_files import PIECE_BYTES, WeightFile, update_messages
from octavo.errors import InvalidRequestError
from tests.contract.test_weights import NEW_DIGEST, weights, worker
from tests.support.stack import Stack, running_stack

__all__ = ["weights"]

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def stack(weights: Path) -> AsyncIterator[Stack]:
    async with running_stack(worker(), worker(), weights_dirs=[weights]) as stack:
        yield stack


def parts(content: bytes) -> Iterator[bytes]:
    yield content[:3]
    yield content[3:]


async def test_pauses_updates_sleep_and_their_refusals(stack: Stack, weights: Path) -> None:
    large = bytes(range(256)) * (2 * PIECE_BYTES // 256) + b"end"
    path = weights / "large.safetensors"
    path.write_bytes(large)
    forms: list[WeightFile] = [path, str(path), large, parts(large)]
    async with AdminClient(stack.service.other_addresses["admin"]) as client:
        with pytest.raises(InvalidRequestError, match="not paused"):
            await client.update_weights("new")
        for mode in ("abort", "wait", "keep", "recompute"):
            await client.pause(mode)
            assert (await client.weight_version()).mode == pb.PauseMode.Value(f"PAUSE_MODE_{mode.upper()}")
        assert await client.update_weights("new", weights_digest=NEW_DIGEST) == NEW_DIGEST
        for form in forms:
            assert await client.update_weights(files=[form, b"other"]) == hashlib.sha256(large + b"other").hexdigest()
        assert await client.update_weights(files=b"other") == hashlib.sha256(b"other").hexdigest()
        for refused, words in (
            (client.update_weights("nothing"), "nothing"),
            (client.update_weights(files=[large, weights / "missing"]), r"files\[1\] is .*missing.*No such file"),
            (client.update_weights(files=[[1]]), "must be a path, bytes, or parts"),  # type: ignore[list-item]
            (client.update_weights(files=5), "must be a path, bytes, or parts"),  # type: ignore[arg-type]
            (client.update_weights(files=str(weights / "missing")), r"files\[0\] is .*No such file"),
            (client.update_weights(), "give either source"),
            (client.pause("later"), "mode is later"),  # type: ignore[arg-type]
            (client.pause("unspecified"), "mode is unspecified"),  # type: ignore[arg-type]
            (client.sleep(3), "level"),
            (client.wake_up(), "do not sleep"),
        ):
            with pytest.raises(InvalidRequestError, match=words):
                await refused
        version = await client.weight_version()
        assert (version.num_updates, version.is_paused, version.world_size) == (2 + len(forms), True, 2)
        await client.sleep()
        with pytest.raises(InvalidRequestError, match="sleep"):
            await client.resume()
        await client.wake_up()
        await client.reset_prefix_cache()
        await client.resume()
        assert not (await client.weight_version()).is_paused


async def test_no_piece_of_a_file_is_larger_than_a_mebibyte() -> None:
    messages = [message async for message in update_messages([b"x" * (PIECE_BYTES + 1), b""], "")]
    sizes = [(len(message.content), message.begins_file, message.is_last) for message in messages]
    assert sizes == [
        (0, True, False),
        (PIECE_BYTES, False, False),
        (1, False, False),
        (0, True, False),
        (0, False, True),
    ]
