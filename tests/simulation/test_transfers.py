"""Transfers between simulated executors: each ends once at each end that lives, and brings its own blocks or none."""

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.execution.v1 import execution_service_pb2 as pb
from octavo.execution.v1 import execution_service_pb2_grpc, step_pb2
from tests.simulation.loop import SimulationLoop
from tests.simulation.network.client import SimulatedChannel
from tests.simulation.network.link import Network, Weather
from tests.simulation.processes import SimulatedProcess
from tests.simulation.services import SimulatedExecutor

NUM_SEEDS = 60
NUM_BLOCKS, NUM_TRANSFERS = 64, 3
EVENTS = ("nothing", "nothing", "cancel at the sender", "cancel at the receiver", "attach", "kill", "stall", "cut")


class Party:
    """An executor, and what its scheduler does."""

    def __init__(self, network: Network, loop: SimulationLoop, name: str) -> None:
        def make_worker(thread: Any, instance_id: str) -> FakeWorker:
            return FakeWorker(
                num_device_blocks=NUM_BLOCKS,
                max_transfers=NUM_TRANSFERS,
                sleep=thread.occupy,
                clock=thread.clock,
                step_ms=3.0,
                instance_id=instance_id,
            )

        self.process = SimulatedProcess(name, loop)
        self.executor = SimulatedExecutor(network, f"{name}:1", self.process, make_worker, lambda: 1.7e9)
        channel: Any = SimulatedChannel(network, f"{name}:1")
        self.stub: Any = execution_service_pb2_grpc.ExecutionServiceStub(channel)
        self.ends: dict[int, str] = {}
        self.begun: set[int] = set()

    async def attach(self) -> None:
        request = pb.AttachRequest(scheduler_id="one", lease_ms=600_000, min_wire_version=1, max_wire_version=2)
        request.capabilities.extend([8, 9])  # type: ignore[list-item]
        self._epoch, self._step_id = (await self.stub.Attach(request)).epoch, 0
        self.begun.clear()

    async def run(self, **fields: Any) -> None:
        """Run a step, and note the ends that it tells."""
        self._step_id += 1
        step = step_pb2.ExecuteModelRequest(
            epoch=self._epoch, step_id=self._step_id, feature_bits=256 if fields else 0, **fields
        )
        answer = await self.stub.ExecuteModel(step, timeout=10.0)
        for how in ("arrived", "sent", "cancelled"):
            for transfer_id in getattr(answer, f"{how}_transfers"):
                assert transfer_id in self.begun, "it ended twice, or never began"
                self.begun.remove(transfer_id)
                self.ends[transfer_id] = how

    async def poll(self) -> None:
        """Run empty steps until all has ended."""
        wait_s = 0.01
        while self.begun:
            await self.run()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 5.0)


async def play(loop: SimulationLoop, seed: str) -> str:
    """Let transfers meet something; return what."""
    draw = random.Random(seed)
    network = Network(loop, seed, Weather(jitter_s=0.01, window_bytes=512))
    source, target = Party(network, loop, "source"), Party(network, loop, "target")
    for party in (source, target):
        party.executor.start(0.1)
    await asyncio.sleep(0.3)
    await source.attach()
    await target.attach()
    content = np.random.default_rng(draw.randrange(2**32)).integers(1, 2**63, (NUM_BLOCKS, 16), np.uint64)
    source.executor.worker.write_blocks(np.arange(NUM_BLOCKS, dtype=np.int32), content)
    blocks = {number: draw.sample(range(16 * number, 16 * number + 16), 9) for number in range(NUM_TRANSFERS)}
    secret = draw.randbytes(16)

    async def send() -> None:
        await asyncio.sleep(draw.random() * 0.3)
        source.begun |= blocks.keys()
        sends = [
            step_pb2.BlockSend(
                transfer_id=number, address="target:1", instance_id="target", block_ids=ids, secret=secret
            )
            for number, ids in blocks.items()
        ]
        await source.run(blocks_to_send=sends)

    async def receive() -> None:
        await asyncio.sleep(draw.random() * 0.3)
        target.begun |= blocks.keys()
        receives = [
            step_pb2.BlockReceive(transfer_id=number, block_ids=ids[::-1], secret=secret)
            for number, ids in blocks.items()
        ]
        await target.run(blocks_to_receive=receives)

    await asyncio.gather(send(), receive())
    event = draw.choice(EVENTS)
    await asyncio.sleep(draw.random() * 0.05)
    left = {source, target}
    if event.startswith("cancel"):
        await (source if event.endswith("sender") else target).run(transfers_to_cancel=[0, 1])
    elif event == "attach":
        await draw.choice([source, target]).attach()
    elif event in ("kill", "stall"):
        victim = draw.choice([source, target])
        left.remove(victim)
        victim.process.kill() if event == "kill" else victim.process.stall()
        if event == "kill":
            network.close(victim.process)
    elif event == "cut":
        network.cut("source", "target")
    await asyncio.gather(*(party.poll() for party in left))
    if target in left:
        for number, how in target.ends.items():
            if how == "arrived":
                found = target.executor.worker.read_blocks(np.array(blocks[number][::-1], np.int32))
                assert found == content[blocks[number]].tobytes(), f"transfer {number} brought other blocks"
    if event == "nothing":
        assert set(source.ends.values()) == {"sent"}
        assert set(target.ends.values()) == {"arrived"}
    return event


@pytest.mark.timeout(120)
def test_each_transfer_ends_once_and_brings_its_blocks_or_none() -> None:
    met = set()
    for seed in range(NUM_SEEDS):
        loop = SimulationLoop(str(seed))  # type: ignore[abstract]
        try:
            met.add(loop.run_until_complete(play(loop, str(seed))))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            loop.close()
    assert met == set(EVENTS)
