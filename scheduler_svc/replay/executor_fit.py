"""Whether an executor can run the steps of an attachment of a log again, and what differs if it can."""

from collections.abc import Iterable

from octavo.steplog.v1 import step_log_pb2 as pb
from octavo_shared.step_wire.executor_info import ExecutorInfo
from scheduler_svc.step_log.decoding import decode_info, decode_limits

_DIGITS_SHOWN = 12
# Of an executor and of a planner: what is said of it, and the flag that sets it.
_SIZES = (
    ("blocks", "num_device_blocks", "num_blocks", "--num-device-blocks"),
    ("host blocks", "num_host_blocks", "num_host_blocks", "--num-host-blocks"),
    ("slots", "max_num_seqs", "max_num_seqs", "--max-num-seqs"),
    ("tokens in a sequence", "max_model_len", "max_model_len", "--max-model-len"),
    ("tokens in a step", "max_num_batched_tokens", "max_num_batched_tokens", "--max-num-batched-tokens"),
)


def misfits(info: ExecutorInfo, attachments: Iterable[pb.CoreJoined]) -> dict[int, str]:
    """Return why an executor cannot run an attachment, by number; those that it can run are left out.

    Sizes are those that suffice for all of them, so that one start of the executor is enough.
    """
    joined = list(attachments)
    sizes = _size_trouble(info, joined)
    troubles = {planner.core: _model_trouble(info, planner) or sizes.get(planner.core, "") for planner in joined}
    return {number: trouble for number, trouble in troubles.items() if trouble}


def other_kind(info: ExecutorInfo, joined: pb.CoreJoined) -> str:
    """Return what may make the outputs of the same model differ; empty: nothing."""
    recorded = decode_info(joined)
    if recorded is None:
        return ""
    kinds = (
        ("numerics_id", recorded.numerics_id, info.numerics_id),
        ("weights digest", recorded.weights_digest, info.weights_digest),
    )
    others = _named_differences(kinds)
    return f"this executor is of a different kind, so outputs may differ: {others}" if others else ""


def _model_trouble(info: ExecutorInfo, joined: pb.CoreJoined) -> str:
    recorded = decode_info(joined)
    if recorded is None or (recorded.model_hash, recorded.dtype) == (info.model_hash, info.dtype):
        return ""
    others = _named_differences(
        (
            ("model hash", recorded.model_hash, info.model_hash),
            ("weights digest", recorded.weights_digest, info.weights_digest),
            ("numerics_id", recorded.numerics_id, info.numerics_id),
        )
    )
    ours, theirs = f"{info.model_id} {info.dtype}", f"{recorded.model_id} {recorded.dtype}"
    if ours == theirs:
        return f"the log and the executor have {ours} with different weights or settings, such as int8: {others}"
    return f"the log is of model {theirs}, and the executor has {ours}: {others}"


def _named_differences(kinds: Iterable[tuple[str, str, str]]) -> str:
    return "; ".join(
        f"{name} {recorded[:_DIGITS_SHOWN] or 'none'} in the log, {here[:_DIGITS_SHOWN] or 'none'} here"
        for name, recorded, here in kinds
        if recorded != here
    )


def _size_trouble(info: ExecutorInfo, joined: list[pb.CoreJoined]) -> dict[int, str]:
    limits = {planner.core: decode_limits(planner) for planner in joined}
    troubles = {}
    for number, of_core in limits.items():
        if info.block_size_tokens != of_core.block_size:
            troubles[number] = (
                f"its blocks have {info.block_size_tokens} tokens, the log's have {of_core.block_size}: start it with "
                f"--block-size-tokens {of_core.block_size}"
            )
        elif info.vocab_size != of_core.vocab_size:
            troubles[number] = (
                f"its vocabulary has {info.vocab_size} tokens, the log's has {of_core.vocab_size}: start it with the "
                "log's model"
            )
    fitting = [number for number in limits if number not in troubles]
    needs = [
        (what, getattr(info, there), max((getattr(limits[number], needed) for number in fitting), default=0), flag)
        for what, there, needed, flag in _SIZES
    ]
    lacks = [need for need in needs if need[1] < need[2]]
    flags = " ".join(f"{flag} {needed}" for _, _, needed, flag in lacks)
    sizes = " and ".join(f"{there} of {needed} {what}" for what, there, needed, _ in lacks)
    for number in fitting:
        if any(getattr(info, there) < getattr(limits[number], needed) for _, there, needed, _ in _SIZES):
            troubles[number] = f"it has {sizes} that the log needs: start it with {flags}"
    return troubles
