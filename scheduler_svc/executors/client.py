"""Dials one executor, with TLS or without, and attaches to it.

`ExecutorClient.attach` gives an `ExecutorSession` (`session.py`), which lives as long as the attachment.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import replace
from typing import Any, Literal

import grpc
import grpc.aio

from octavo.calls.tls import TlsOptions, handshake_trouble
from octavo.execution.v1 import capability_pb2
from octavo.execution.v1 import execution_service_pb2 as pb
from octavo.execution.v1 import execution_service_pb2_grpc as pb_grpc
from octavo_shared.errors import ExecutorFaultError, FencedError, InvalidFieldError, OctavoServiceError
from octavo_shared.grpc.certificates import TlsFileError
from octavo_shared.grpc.grpc_status import failure_text
from octavo_shared.process.events import Event
from octavo_shared.step_wire.cache_group import why_unusable
from octavo_shared.step_wire.executor_info import (
    MAX_MODEL_LEN,
    Capability,
    ExecutorInfo,
    common,
    is_digest,
    names_of,
)
from octavo_shared.step_wire.message_bytes import CheckedAnswers
from octavo_shared.step_wire.wire import MAX_WIRE_VERSION, MIN_WIRE_VERSION
from octavo_shared.step_wire.wire_agreement import WireAgreement
from octavo_shared.step_wire.wire_info import decode_info, decode_parameters, encode_capabilities
from scheduler_svc.config.dial_tls import EXECUTOR_FLAGS, read_credentials
from scheduler_svc.executors.session import ExecutorLostError, ExecutorSession, SessionTimings
from scheduler_svc.processes.incarnation import Incarnation

log = logging.getLogger(__name__)

# Far above any machine. The scheduler allocates memory for as much as an executor reports.
MAX_SIZES = {
    "max_num_seqs": 2**16,
    "num_device_blocks": 2**24,
    "num_host_blocks": 2**24,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": 2**27,
    "block_size_tokens": 2**27,
}

MAX_GROUPS = 64
MAX_ID_CHARS = 256
MAX_REASON_CHARS = 512
# The formats that are passed on: clients print them.
_CACHE_FORMATS = frozenset({"float32", "bfloat16", "float16", "int8", "fp8_e4m3", "fp8_e5m2"})

# The capabilities that this scheduler uses beyond wire version 1.
WANTED = frozenset(
    {
        Capability.NUMERICS,
        Capability.NAMED_BLOCKS,
        Capability.GRAMMARS,
        Capability.GRAMMARS_READY,
        Capability.ADAPTERS,
        Capability.ROW_FLAGS,
        Capability.POOLING,
        Capability.CACHE_GROUPS,
        Capability.STATES,
        Capability.ENCODER,
        Capability.VARIABLE_TOKENS,
        Capability.BLOCK_TRANSFER,
        Capability.WEIGHT_VERSIONS,
        Capability.NO_REPEAT_NGRAM,
    }
)

Speculate = Literal["auto", "on", "off"]

_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class ExecutorRefusedError(OctavoServiceError):
    """The executor answers but refuses to be attached now (it loads, or another scheduler holds it)."""


class ExecutorClient:
    """Dials one executor.

    Args:
        address: host:port.
        scheduler_id: The id of this scheduler, stable over restarts; another one with it may take over at once.
        timings: Timeouts and intervals.
        max_message_bytes: Limit of messages in both directions.
        tls: How to speak TLS with it; None: plaintext.
        open_channel: Opens a channel to an address in place of gRPC; a simulation has its own.
        key_fingerprint: Of the prefix key: an executor that we had attached with the same one keeps its block names.
        incarnation: Orders this scheduler among those with its id; None: they are not ordered.
        speculate: Whether sequences may get several tokens a step: never, where outputs stay the same, or always.
    """

    def __init__(
        self,
        address: str,
        scheduler_id: str,
        timings: SessionTimings,
        max_message_bytes: int,
        tls: TlsOptions | None = None,
        open_channel: Callable[[str], grpc.aio.Channel] | None = None,
        key_fingerprint: bytes = b"",
        incarnation: Incarnation | None = None,
        speculate: Speculate = "off",
    ) -> None:
        self._incarnation = incarnation
        self._speculate = speculate
        self.address = address
        self._scheduler_id = scheduler_id
        self._timings = timings
        self._tls = tls
        self._key_fingerprint = key_fingerprint
        self._dial = open_channel or self._dial_by_grpc
        self._logged = ("", WireAgreement())  # the executor process of the last logged agreement, and the agreement
        self._options: list[tuple[str, int | str]] = [
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            # Executors are in the same network: ignore a web proxy of the environment.
            ("grpc.enable_http_proxy", 0),
            # A local subchannel pool: a new client never inherits another one's backoff.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]

    @contextlib.asynccontextmanager
    async def attach(
        self, claim: Callable[[str], None], *, keeps_blocks: bool = True
    ) -> AsyncIterator["ExecutorSession"]:
        """Attach, open the stream and keep the lease until the block ends; then detach, if the executor answers.

        Args:
            claim: Called with the executor's instance_id before it is attached; what it raises is raised.
            keeps_blocks: Whether blocks that it has cached before may be used.

        Raises:
            ExecutorRefusedError: it answers, but refuses.
            ExecutorLostError: it does not answer.
            ExecutorFaultError: its answer is invalid.
        """
        async with self._dial(self.address) as channel:
            checked: Any = CheckedAnswers(channel, "it", ExecutorFaultError)
            stub = pb_grpc.ExecutionServiceStub(checked)
            attached = await self._attach(stub, claim, keeps_blocks=keeps_blocks)
            agreement = WireAgreement(attached.wire_version, common(attached.capabilities, WANTED))
            info = info_of(attached, agreement)
            session = ExecutorSession(stub, attached.epoch, info, self._timings, self.address, agreement)
            if attached.num_kept_names:
                await session.list_kept_blocks()
            self._log_agreement(info.instance_id, agreement)
            heartbeat = asyncio.create_task(session.keep_lease(), name="heartbeat")
            is_lost = False
            try:
                await session.open()
                yield session
            except ExecutorLostError:
                is_lost = True
                raise
            finally:
                heartbeat.cancel()
                session.close()
                if not is_lost:
                    await session.detach(0 if self._incarnation is None else self._incarnation.largest_told)

    def _wanted(self, info: pb.GetExecutorInfoResponse) -> frozenset[Capability]:
        """Return the capabilities that are used with an executor."""
        speculates = self._speculate == "on" or (self._speculate == "auto" and info.is_invariant)
        return WANTED if speculates else WANTED - {Capability.VARIABLE_TOKENS}

    def _log_agreement(self, instance_id: str, agreement: WireAgreement) -> None:
        """Log an agreement once: an executor that is refused afterwards is dialled again and again."""
        if self._logged != (instance_id, agreement):
            self._logged = (instance_id, agreement)
            version, names = agreement.version, names_of(agreement.capabilities)
            log.info(Event("wire_version_agreed", executor=self.address, wire_version=version, capabilities=names))

    def _dial_by_grpc(self, address: str) -> grpc.aio.Channel:
        """Return a new channel; read the TLS files anew. Raises ExecutorLostError: they cannot be read."""
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=self._options)
        try:
            credentials = read_credentials(self._tls, EXECUTOR_FLAGS)
        except TlsFileError as error:
            raise ExecutorLostError(str(error)) from error
        return grpc.aio.secure_channel(address, credentials, options=[*self._options, *self._tls.channel_options])

    async def _attach(
        self, stub: "pb_grpc.ExecutionServiceAsyncStub", claim: Callable[[str], None], *, keeps_blocks: bool
    ) -> pb.AttachResponse:
        try:
            info = await stub.GetExecutorInfo(pb.GetExecutorInfoRequest(), timeout=self._timings.connect_timeout_s)
            check_sizes(info)
            incarnation = self._number_for(info)
            claim(info.instance_id)
            request = pb.AttachRequest(
                scheduler_id=self._scheduler_id,
                lease_ms=round(self._timings.lease_s * 1000),
                min_wire_version=MIN_WIRE_VERSION,
                max_wire_version=MAX_WIRE_VERSION,
                capabilities=encode_capabilities(common(info.capabilities, self._wanted(info))),
                keep=keeps_blocks and capability_pb2.CAPABILITY_NAMED_BLOCKS in info.capabilities,
                key_fingerprint=self._key_fingerprint,
                incarnation=incarnation,
            )
            attached = await stub.Attach(request, timeout=self._timings.connect_timeout_s)
        except grpc.aio.AioRpcError as error:
            kind = ExecutorLostError if error.code() in _NO_ANSWER else ExecutorRefusedError
            trouble = handshake_trouble(error.details() or "", self._tls, EXECUTOR_FLAGS)
            raise kind(trouble or failure_text(error)) from error
        if not MIN_WIRE_VERSION <= attached.wire_version <= MAX_WIRE_VERSION:
            raise ExecutorRefusedError(
                f"it supports wire versions {attached.info.min_wire_version} to {attached.info.max_wire_version} and "
                f"chose {attached.wire_version}; this scheduler supports {MIN_WIRE_VERSION} to {MAX_WIRE_VERSION}"
            )
        check_sizes(attached.info)
        check_capabilities(attached, request.capabilities)
        if self._incarnation is not None:
            if attached.incarnation not in (0, incarnation):
                raise ExecutorRefusedError(
                    f"it was attached by incarnation {incarnation} but reports {attached.incarnation}"
                )
            self._incarnation.grant()
        return attached

    def _number_for(self, info: pb.GetExecutorInfoResponse) -> int:
        """Return the incarnation to attach by; 0: none.

        Raises: ExecutorRefusedError: this scheduler stands by or was superseded, or the executor's numbers are invalid.
        """
        own = self._incarnation
        if own is None:
            return 0
        try:
            is_other = self._follow(own, info)
            own.require_current()
            own.note_holder(self.address, is_other=is_other)
        except InvalidFieldError as error:
            raise ExecutorRefusedError(f"it sent an invalid incarnation: {error}") from error
        except FencedError as error:
            raise ExecutorRefusedError(str(error)) from error
        return own.number

    def _follow(self, own: Incarnation, info: pb.GetExecutorInfoResponse) -> bool:
        """Follow the incarnations of our id that an executor knows; return whether another one of them is attached."""
        is_other = False
        for known in info.incarnations:
            if known.scheduler_id == self._scheduler_id:
                is_other = known.is_attached and known.incarnation != own.number
                own.follow(known.incarnation, f"executor {self.address}")
        return is_other

    async def ask_incarnation(self, own: Incarnation) -> bool:
        """Follow what the executor knows now; return whether it answers. Raises SupersededError: ours is over."""
        try:
            async with self._dial(self.address) as channel:
                checked: Any = CheckedAnswers(channel, "it", ExecutorFaultError)
                stub = pb_grpc.ExecutionServiceStub(checked)
                self._follow(
                    own,
                    await stub.GetExecutorInfo(pb.GetExecutorInfoRequest(), timeout=self._timings.connect_timeout_s),
                )
        except (grpc.aio.AioRpcError, ExecutorLostError, ExecutorFaultError, InvalidFieldError):
            return False
        return True


def check_capabilities(attached: pb.AttachResponse, wanted: Collection[int]) -> None:
    """Raise ExecutorRefusedError if an executor accepts capabilities that were not offered, or breaks one."""
    allowed = wanted if attached.wire_version >= 2 else ()
    if unwanted := {*attached.capabilities}.difference(allowed):
        raise ExecutorRefusedError(f"it accepted capabilities that this scheduler did not offer: {names_of(unwanted)}")
    if capability_pb2.CAPABILITY_NUMERICS in attached.capabilities and not attached.info.numerics_id:
        raise ExecutorRefusedError("it accepted the capability NUMERICS but sent no numerics_id")
    versions = capability_pb2.CAPABILITY_WEIGHT_VERSIONS in attached.capabilities
    if versions and not is_digest(attached.info.weights_digest):
        raise ExecutorRefusedError("it accepted the capability WEIGHT_VERSIONS but sent no digest of its weights")


def info_of(attached: pb.AttachResponse, agreement: WireAgreement) -> ExecutorInfo:
    """Return the description of an attached executor, without values of capabilities that were not agreed on."""
    info = decode_info(attached.info)
    cache_format = info.kv_cache_dtype if info.kv_cache_dtype in _CACHE_FORMATS else ""
    info = replace(info, kv_cache_dtype=cache_format, warning=_one_line(info.warning))
    info = replace(info, **decode_parameters(attached.capability_parameters, agreement.capabilities))
    if why := why_unusable(info.cache_groups):
        raise ExecutorRefusedError(why)
    if Capability.NUMERICS in agreement.capabilities:
        return replace(info, why_not_invariant=_one_line(info.why_not_invariant))
    return replace(info, numerics_id="", is_invariant=False, weights_digest="", why_not_invariant="")


def _one_line(words: str) -> str:
    """Return an executor's text for people as one short line, to be printed."""
    return " ".join(words[:MAX_REASON_CHARS].split())


def check_sizes(info: pb.GetExecutorInfoResponse) -> None:
    """Raise ExecutorRefusedError if an executor reports more than any machine has."""
    for name, most in MAX_SIZES.items():
        size = getattr(info, name)
        if size > most:
            raise ExecutorRefusedError(f"it reports {name} {size}; this scheduler accepts at most {most}")
    groups = info.capability_parameters.cache_groups
    if len(groups) > MAX_GROUPS or any(group.num_device_blocks > MAX_SIZES["num_device_blocks"] for group in groups):
        raise ExecutorRefusedError(f"it reports {len(groups)} cache groups, or one of more than 2^24 blocks")
    for name in ("numerics_id", "weights_digest"):
        length = len(getattr(info, name))
        if length > MAX_ID_CHARS:
            raise ExecutorRefusedError(
                f"its {name} has {length} characters; this scheduler accepts at most {MAX_ID_CHARS}"
            )
