"""The ids and secrets of transfers: the core numbers transfers, executors know them by what nobody can guess.

So the core needs no randomness, and no secret is in a step log. An id and a secret are hashes of the number with a key
that lives as long as this process.
"""

from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b

from octavo_shared.errors import ExecutorFaultError
from octavo_shared.step_wire.step import TRANSFER_SECRET_BYTES, Step, StepResult

_ID_BYTES = 8


class TransferKeys:
    """Ids and secrets by number; `key` has at most 64 bytes."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def of(self, number: int) -> tuple[int, bytes]:
        """Return the id and the secret of a transfer, at both ends the same."""
        digest = blake2b(
            number.to_bytes(8, "little"), key=self._key, digest_size=_ID_BYTES + TRANSFER_SECRET_BYTES
        ).digest()
        return int.from_bytes(digest[:_ID_BYTES], "little"), digest[_ID_BYTES:]


class SessionTransfers:
    """The transfers of one attachment, between the core's numbers and the wire.

    Args:
        keys: Of all attachments.
        place_of: Returns where the executor of a planner's name takes blocks, host:port, and its instance id.
    """

    def __init__(self, keys: TransferKeys, place_of: Callable[[str], tuple[str, str]]) -> None:
        self._keys, self._place_of = keys, place_of
        self._number_of: dict[int, int] = {}

    def sealed(self, step: Step) -> Step:
        """Return a step of the core as an executor gets it."""
        if not (step.blocks_to_send or step.blocks_to_receive or step.transfers_to_cancel):
            return step
        sends, receives = list(step.blocks_to_send), list(step.blocks_to_receive)
        for index, send in enumerate(sends):
            transfer_id, secret = self._new(send.transfer_id)
            address, instance_id = self._place_of(send.address)
            sends[index] = replace(
                send, transfer_id=transfer_id, secret=secret, address=address, instance_id=instance_id
            )
        for index, receive in enumerate(receives):
            transfer_id, secret = self._new(receive.transfer_id)
            receives[index] = replace(receive, transfer_id=transfer_id, secret=secret)
        cancelled = tuple(self._keys.of(number)[0] for number in step.transfers_to_cancel)
        return replace(
            step, blocks_to_send=tuple(sends), blocks_to_receive=tuple(receives), transfers_to_cancel=cancelled
        )

    def opened(self, result: StepResult) -> StepResult:
        """Return a result with the core's numbers, in place. Raises ExecutorFaultError: it has a strange id."""
        if not (result.arrived_transfers or result.sent_transfers or result.cancelled_transfers):
            return result
        result.arrived_transfers = self._ended(result.arrived_transfers)
        result.sent_transfers = self._ended(result.sent_transfers)
        result.cancelled_transfers = self._ended(result.cancelled_transfers)
        return result

    def _new(self, number: int) -> tuple[int, bytes]:
        transfer_id, secret = self._keys.of(number)
        self._number_of[transfer_id] = number
        return transfer_id, secret

    def _ended(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        try:
            return tuple(self._number_of.pop(transfer_id) for transfer_id in ids)
        except KeyError as error:
            raise ExecutorFaultError("an answer tells of a transfer that is not pending") from error


def reachable(transfer_address: str, address: str) -> str:
    """Return where an executor takes blocks.

    Args:
        transfer_address: As it says; ":port": at the host by which it is reached.
        address: By which it is reached, host:port.
    """
    if transfer_address.startswith(":"):
        return address.rpartition(":")[0] + transfer_address
    return transfer_address or address
