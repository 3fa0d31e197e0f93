"""Executors that send each other blocks, over real gRPC."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import grpc
import numpy as np

from executor_svc.config import FakeConfig
from executor_svc.service.servicer import ExecutionServicer
from executor_svc.transfers.dial import Dialler
from executor_svc.worker.interface import Worker
from octavo.execution.v1 import block_transfer_service_pb2_grpc, execution_service_pb2_grpc, step_pb2
from octavo.execution.v1 import execution_service_pb2 as pb
from octavo_shared.grpc.grpc_server import GrpcServer
from octavo_shared.grpc.tls import server_tls
from octavo_shared.step_wire.cache_group import CacheKind, firsts_of
from octavo_shared.step_wire.step import Int32Array
from octavo_shared.step_wire.wire_info import decode_info, decode_parameters

SECRET = bytes(range(16))


class AttachedExecutor:
    """An executor with an attached scheduler; an async context manager. `info` says what it is.

    Args:
        address: Where it listens.
        dial: Opens channels to it.
    """

    def __init__(self, address: str, dial: Dialler | None = None) -> None:
        self.address = address
        self._dial = dial or Dialler(FakeConfig())
        self._ended: dict[int, str] = {}  # how transfers ended, by their id

    async def __aenter__(self) -> Self:
        self.channel = self._dial(self.address)
        self.stub = execution_service_pb2_grpc.ExecutionServiceStub(self.channel)
        self.transfers = block_transfer_service_pb2_grpc.BlockTransferServiceStub(self.channel)
        await self.attach()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()

    async def attach(self) -> None:
        """Attach with all that the executor has."""
        request = pb.AttachRequest(scheduler_id="one", lease_ms=60_000, min_wire_version=1, max_wire_version=2)
        request.capabilities.extend([2, 8, 9, 11, 12])  # type: ignore[list-item]
        answer = await self.stub.Attach(request)
        self._epoch, self._step_id = answer.epoch, 0
        info = decode_info(answer.info)
        self.info = replace(info, **decode_parameters(answer.capability_parameters, info.capabilities))

    async def run(self, **fields: Any) -> step_pb2.ExecuteModelResponse:
        """Run a step."""
        self._step_id += 1
        has_transfers = any("transfer" in name or "blocks_to_" in name for name in fields)
        has_states = "states_to_save" in fields or any(
            each.HasField("state_block") for each in fields.get("admissions", ())
        )
        bits = has_transfers << 8 | ("registered_blocks" in fields) << 2 | has_states << 12
        step = step_pb2.ExecuteModelRequest(epoch=self._epoch, step_id=self._step_id, feature_bits=bits, **fields)
        try:
            answer = await self.stub.ExecuteModel(step)
        except grpc.aio.AioRpcError:
            self._step_id -= 1
            raise
        for how in ("arrived", "sent", "cancelled"):  # the step that begins a transfer may tell its end
            self._ended |= dict.fromkeys(getattr(answer, f"{how}_transfers"), how)
        return answer

    async def send(self, receiver: "AttachedExecutor", block_ids: Sequence[int], transfer_id: int = 7) -> None:
        """Begin to send blocks."""
        send = step_pb2.BlockSend(
            transfer_id=transfer_id,
            address=receiver.address,
            instance_id=receiver.info.instance_id,
            block_ids=block_ids,
            secret=SECRET,
        )
        await self.run(blocks_to_send=[send])

    async def receive(self, block_ids: Sequence[int], transfer_id: int = 7) -> None:
        """Begin to receive blocks."""
        await self.run(
            blocks_to_receive=[step_pb2.BlockReceive(transfer_id=transfer_id, block_ids=block_ids, secret=SECRET)]
        )

    async def end(self, transfer_id: int = 7) -> str:
        """Return how a transfer ends: poll with empty steps, as a scheduler does."""
        while transfer_id not in self._ended:
            await self.run()
            await asyncio.sleep(0.005)
        return self._ended.pop(transfer_id)


class CachedPrompt:
    """A prompt of four blocks and a token, and its place in the blocks of an executor of a real model.

    Attributes:
        tables: Its block table in each cache group, in a scrambled order.
        state_block: Where the state behind the cached tokens is saved; None: the model has none.
        moved: The blocks that another executor needs: what the next token sees of them, and the state.
    """

    BLOCK_SIZE = 8
    TOKENS = np.arange(3, 36, dtype="<i4")
    NUM_CACHED = 32

    def __init__(self, executor: AttachedExecutor, seed: int) -> None:
        self._executor = executor
        pools, draw = executor.info.pools(agreed=True), np.random.default_rng(seed)
        firsts = firsts_of(pools).tolist()
        self.state_block: int | None = None
        self.tables: list[Int32Array] = []
        self.moved: list[int] = []
        for pool, first in zip(pools, firsts, strict=False):
            if pool.kind is CacheKind.STATE:
                self.state_block = first + int(draw.integers(pool.num_device_blocks))
                self.moved.append(self.state_block)
                continue
            table = (first + draw.permutation(pool.num_device_blocks)[:5]).astype(np.int32)
            first_seen = max(0, self.NUM_CACHED - pool.window_tokens + 1) if pool.window_tokens else 0
            self.tables.append(table)
            self.moved += table[first_seen // self.BLOCK_SIZE : self.NUM_CACHED // self.BLOCK_SIZE].tolist()

    async def compute(self) -> list[int]:
        """Compute the whole prompt, and release its slot; return the tokens behind it."""
        await self._executor.run(admissions=[self._admission(0)], prefill_chunks=[0, self.NUM_CACHED])
        states = {} if self.state_block is None else {"states_to_save": [0, self.NUM_CACHED, self.state_block]}
        tokens = await self._tokens(prefill_chunks=[0, len(self.TOKENS) - self.NUM_CACHED], **states)
        await self._executor.run(released_slots=[0])
        return tokens

    async def go_on(self) -> list[int]:
        """Compute what is behind the cached tokens; return the tokens behind the prompt."""
        admission = self._admission(self.NUM_CACHED)
        if self.state_block is not None:
            admission.state_block = self.state_block
        return await self._tokens(admissions=[admission], prefill_chunks=[0, len(self.TOKENS) - self.NUM_CACHED])

    def _admission(self, num_computed: int) -> step_pb2.Admission:
        return step_pb2.Admission(
            generation=1,
            token_ids=self.TOKENS.tobytes(),
            num_prompt_tokens=len(self.TOKENS),
            num_computed_tokens=num_computed,
            block_ids=np.concatenate(self.tables).tolist(),
        )

    async def _tokens(self, **first_step: object) -> list[int]:
        answers = [await self._executor.run(**first_step)]
        answers += [await self._executor.run() for _ in range(5)]
        return [int(token) for answer in answers for token in np.frombuffer(answer.sampled_token_ids, "<i4")]


class TransferExecutor(AttachedExecutor):
    """One of this process, with the TLS of a config."""

    def __init__(self, worker: Worker, config: FakeConfig | None = None) -> None:
        self.worker = worker
        config = config or FakeConfig()
        super().__init__("", Dialler(config))
        self.servicer = ExecutionServicer(dial=self._dial)
        tls = server_tls(config)
        self._server = GrpcServer(
            listen="127.0.0.1:0",
            max_message_bytes=2**24,
            service_names=(),
            credentials=None if tls is None else tls.credentials(),
        )
        execution_service_pb2_grpc.add_ExecutionServiceServicer_to_server(self.servicer, self._server.server)
        block_transfer_service_pb2_grpc.add_BlockTransferServiceServicer_to_server(
            self.servicer.block_transfers, self._server.server
        )

    async def __aenter__(self) -> Self:
        self.address = self.servicer.transfer_address = await self._server.start()
        await self.servicer.load(lambda: self.worker)
        return await super().__aenter__()

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        await self._server.stop(0)
        self.servicer.close()

    def content(self, block_ids: Sequence[int]) -> bytes:
        """Return what blocks hold."""
        return np.frombuffer(self.worker.read_blocks(np.array(block_ids, np.int32)), np.uint8).tobytes()
