"""Where new weights come from and lie: what may be read, how much may be written, and when it is removed."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from executor_svc.fake.worker import FakeWorker
from executor_svc.service import weight_updates
from executor_svc.service.servicer import ExecutionServicer
from executor_svc.service.weight_updates import WeightUpdates
from executor_svc.worker.interface import Agree
from octavo.execution.v1 import capability_pb2
from octavo.execution.v1 import execution_service_pb2 as pb
from octavo_shared.errors import CallerError

WEIGHTS_BYTES = 10


async def sent(*contents: bytes) -> AsyncIterator[pb.UpdateWeightsRequest]:
    for number, content in enumerate(contents, 1):
        chunk = pb.WeightsChunk(content=content, begins_file=True, is_last=number == len(contents))
        yield pb.UpdateWeightsRequest(chunk=chunk)


async def content_of(
    updates: WeightUpdates, messages: AsyncIterator[pb.UpdateWeightsRequest], source: str = ""
) -> bytes:
    async with updates.receiving(pb.UpdateWeightsBegin(source=source), messages, WEIGHTS_BYTES) as folder:
        return b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))


def incoming(folder: Path) -> list[Path]:
    return list(folder.glob(".incoming-*"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of --weights-dir, with a hub's snapshot in it, whose file is a link to a blob."""
    for path, content in {"hub/blobs/1": b"blob", "other/model.safetensors": b"other"}.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_bytes(content)
    (tmp_path / "hub/snapshots").mkdir()
    (tmp_path / "hub/snapshots/model.safetensors").symlink_to("../blobs/1")
    (tmp_path / "hub/.hidden").mkdir()
    (tmp_path / "hub/out").mkdir()
    (tmp_path / "hub/out/model.safetensors").symlink_to(tmp_path / "other/model.safetensors")
    (tmp_path / "hub/seen").symlink_to(".hidden")
    return tmp_path / "hub"


async def test_links_are_followed_in_the_folder_and_refused_out_of_it_as_hidden_names_are(folder: Path) -> None:
    updates = WeightUpdates([folder])
    assert await content_of(updates, sent(), "snapshots") == b"blob"
    for source, reason in {
        "out": "without links out of --weights-dir; put model.safetensors there",
        ".hidden": "whose name does not begin with a dot",
        "seen": "whose name does not begin with a dot",
        "../other": "in one of the folders of --weights-dir",
    }.items():
        with pytest.raises(CallerError, match=reason):
            await content_of(updates, sent(), source)


async def test_more_bytes_than_twice_the_model_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    updates = WeightUpdates([folder])
    assert await content_of(updates, sent(b"x" * 30)) == b"x" * 30
    monkeypatch.setattr(weight_updates, "SMALLEST_LIMIT_BYTES", 15)
    assert await content_of(updates, sent(b"x" * 15, b"y" * 5)) == b"x" * 15 + b"y" * 5
    with pytest.raises(CallerError, match="more than 20 bytes, twice the weight files of the model or 15"):
        await content_of(updates, sent(b"x" * 15, b"y" * 6))
    assert not incoming(folder)


@pytest.mark.parametrize(
    ("place", "num_bytes", "reason"),
    [
        ("/dev/full/1", 1, "Not a directory"),
        ("/dev/full", 2**20, "No space left on device"),
        ("/dev/full", 1, "No space left on device"),
    ],
    ids=["open", "write", "close"],
)
async def test_a_disk_that_takes_nothing_is_a_refusal_that_names_it(
    folder: Path, place: str, num_bytes: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode: opened(path if path.name == "lock" else Path(place), mode))
    with pytest.raises(CallerError, match=f"cannot be written to {folder}: {reason}; make room there, or start"):
        await content_of(WeightUpdates([folder]), sent(b"x" * num_bytes))
    assert not incoming(folder)


async def test_what_a_killed_process_leaves_is_removed_and_what_another_one_receives_is_not(folder: Path) -> None:
    for name in ("killed", "killed-at-once"):
        (folder / f".incoming-{name}").mkdir()
    (folder / ".incoming-killed/lock").touch()
    (folder / ".incoming-killed/00001.safetensors").write_bytes(b"content")
    async with WeightUpdates([folder]).receiving(pb.UpdateWeightsBegin(), sent(b"content"), WEIGHTS_BYTES) as received:
        WeightUpdates([folder]).remove_left_over()
        assert incoming(folder) == [received]
    assert not incoming(folder)


async def test_a_call_that_is_cut_while_its_files_are_loaded_removes_them_afterwards(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, may_go_on = threading.Event(), threading.Event()
    removing_threads: list[threading.Thread] = []

    class Slow(FakeWorker):
        def update_weights(self, folder: Path, weights_digest: str, agree: Agree = lambda _: None) -> None:
            loading.set()
            may_go_on.wait(10)
            super().update_weights(folder, weights_digest, agree)

    def remove(path: Path, *, ignore_errors: bool) -> None:
        removing_threads.append(threading.current_thread())
        removed(path, ignore_errors=ignore_errors)

    removed = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", remove)
    (folder / ".incoming-killed").mkdir()
    worker = Slow(updates_weights=True)
    servicer = ExecutionServicer(weights_dirs=[folder])
    await servicer.load(lambda: worker)
    assert not incoming(folder)
    capabilities = [capability_pb2.CAPABILITY_NUMERICS, capability_pb2.CAPABILITY_WEIGHT_VERSIONS]
    attach = pb.AttachRequest(
        scheduler_id="a", lease_ms=60_000, min_wire_version=2, max_wire_version=2, capabilities=capabilities
    )
    epoch = (await servicer.Attach(attach, None)).epoch  # type: ignore[arg-type]

    async def messages() -> AsyncIterator[pb.UpdateWeightsRequest]:
        yield pb.UpdateWeightsRequest(begin=pb.UpdateWeightsBegin(epoch=epoch))
        async for message in sent(b"new weights"):
            yield message

    call = asyncio.create_task(servicer.UpdateWeights(messages(), None))  # type: ignore[arg-type]
    await asyncio.to_thread(loading.wait)
    call.cancel()
    await asyncio.sleep(0.05)
    assert incoming(folder)
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert worker.info.weights_digest != FakeWorker(updates_weights=True).info.weights_digest
    assert not incoming(folder)
    assert threading.current_thread() not in removing_threads
    servicer.close()


async def test_a_folder_is_removed_though_all_is_cancelled_before_a_thread_is_free(folder: Path) -> None:
    async def never() -> AsyncIterator[pb.UpdateWeightsRequest]:
        await asyncio.Event().wait()
        yield pb.UpdateWeightsRequest()

    is_free = threading.Event()
    thread = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(thread)
    call = asyncio.create_task(content_of(WeightUpdates([folder]), never()))
    await asyncio.sleep(0)
    thread.submit(is_free.wait, 10)
    for _ in range(3):
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0.01)
    assert len(incoming(folder)) == 1
    is_free.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not incoming(folder)
