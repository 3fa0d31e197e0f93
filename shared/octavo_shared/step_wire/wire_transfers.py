"""Transfers of blocks between values and messages; `step_wire/wire.py` has the steps that begin them."""

import numpy as np

from octavo.execution.v1 import step_pb2
from octavo_shared.step_wire.step import BlockReceive, BlockSend


def encode_send(send: BlockSend) -> step_pb2.BlockSend:
    """Turn blocks to be sent into their message."""
    return step_pb2.BlockSend(
        transfer_id=send.transfer_id,
        address=send.address,
        instance_id=send.instance_id,
        block_ids=send.block_ids.tolist(),
        secret=send.secret,
    )


def decode_send(message: step_pb2.BlockSend) -> BlockSend:
    """Turn a message into blocks to be sent."""
    block_ids = np.array(message.block_ids[:], np.int32)
    return BlockSend(message.transfer_id, message.address, message.instance_id, block_ids, message.secret)


def encode_receive(receive: BlockReceive) -> step_pb2.BlockReceive:
    """Turn blocks that wait for their content into their message."""
    return step_pb2.BlockReceive(
        transfer_id=receive.transfer_id, block_ids=receive.block_ids.tolist(), secret=receive.secret
    )


def decode_receive(message: step_pb2.BlockReceive) -> BlockReceive:
    """Turn a message into blocks that wait for their content."""
    return BlockReceive(message.transfer_id, np.array(message.block_ids[:], np.int32), message.secret)
