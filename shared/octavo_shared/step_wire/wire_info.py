"""What an executor says about itself, and the parameters of its capabilities, between values and protobuf messages."""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from octavo.execution.v1 import capability_pb2, execution_service_pb2, sampling_params_pb2
from octavo.values.sampling_params_table import BY_NAME
from octavo_shared.step_wire.cache_group import CacheGroup, CacheKind
from octavo_shared.step_wire.executor_info import Capability, ExecutorInfo
from octavo_shared.step_wire.step import PoolingTask
from octavo_shared.step_wire.wire import MAX_WIRE_VERSION, MIN_WIRE_VERSION

# The parameters of capabilities that `ExecutorInfo` has.
_DRAFT_PARAMETERS = ("max_allowance", "max_sample_rows")
_GRAMMAR_PARAMETERS = ("num_grammar_slots", "matcher_id", "max_grammar_bytes")
_ADAPTER_PARAMETERS = ("num_adapter_slots", "max_adapter_rank")
_POOLING_PARAMETERS = ("pooling_tasks", "embedding_size", "num_scores", "num_token_types", "is_generative")
_TRANSFER_PARAMETERS = ("transfer_address", "max_transfers")
_ENCODER_PARAMETERS = ("max_encoder_tokens", "decoder_start_token_ids", "banned_token_ids")
_OF_THINGS = (*_GRAMMAR_PARAMETERS, *_ADAPTER_PARAMETERS)
_PARAMETERS = {*("cache_groups", *_DRAFT_PARAMETERS, *_OF_THINGS, *_POOLING_PARAMETERS, *_TRANSFER_PARAMETERS)}
_PARAMETERS |= {*_ENCODER_PARAMETERS}
_PLAIN_INFO = tuple(
    name
    for name in ExecutorInfo.__dataclass_fields__
    if name not in {"sampling_defaults", "updates_weights", "bans_ngrams", *_PARAMETERS}
)
_LISTS = ("eos_token_ids", "adapter_names")
_CACHE_KINDS = frozenset(kind.value for kind in CacheKind)
_GROUP_FIELDS = tuple(CacheGroup.__dataclass_fields__)


def encode_info(info: ExecutorInfo) -> execution_service_pb2.GetExecutorInfoResponse:
    """Turn an executor's description into its message, with the wire versions of this release."""
    return execution_service_pb2.GetExecutorInfoResponse(
        min_wire_version=MIN_WIRE_VERSION,
        max_wire_version=MAX_WIRE_VERSION,
        sampling_defaults=encode_sampling_defaults(info.sampling_defaults),
        capabilities=encode_capabilities(info.capabilities),
        capability_parameters=encode_parameters(info, info.capabilities),
        **{name: getattr(info, name) for name in _PLAIN_INFO},
    )


def decode_info(message: execution_service_pb2.GetExecutorInfoResponse) -> ExecutorInfo:
    """Turn a message into an executor's description."""
    values = {name: getattr(message, name) for name in _PLAIN_INFO}
    values["sampling_defaults"] = decode_sampling_defaults(message.sampling_defaults)
    values.update(decode_parameters(message.capability_parameters))
    values["updates_weights"] = capability_pb2.CAPABILITY_WEIGHT_VERSIONS in message.capabilities
    values["bans_ngrams"] = capability_pb2.CAPABILITY_NO_REPEAT_NGRAM in message.capabilities
    lists = {name: tuple(getattr(message, name)) for name in _LISTS}
    return ExecutorInfo(**{**values, **lists})


def encode_capabilities(capabilities: Iterable[Capability]) -> list[capability_pb2.Capability.ValueType]:
    """Turn capabilities into numbers of the wire, ascending."""
    return [capability_pb2.Capability.ValueType(number) for number in sorted(capabilities)]


def encode_parameters(
    info: ExecutorInfo, capabilities: AbstractSet[Capability]
) -> capability_pb2.CapabilityParameters | None:
    """Return an executor's parameters of some capabilities; None: there are none."""
    parameters: dict[str, Any] = {}
    if Capability.VARIABLE_TOKENS in capabilities:
        parameters.update({name: getattr(info, name) for name in _DRAFT_PARAMETERS})
    if Capability.GRAMMARS in capabilities:
        parameters.update({name: getattr(info, name) for name in _GRAMMAR_PARAMETERS})
    if Capability.ADAPTERS in capabilities:
        parameters.update({name: getattr(info, name) for name in _ADAPTER_PARAMETERS})
    if Capability.POOLING in capabilities:
        parameters.update(
            pooling_tasks=sorted(info.pooling_tasks),
            embedding_size=info.embedding_size,
            num_scores=info.num_scores,
            num_token_types=info.num_token_types,
            pooling_only=not info.is_generative,
        )
    if Capability.CACHE_GROUPS in capabilities:
        parameters["cache_groups"] = [
            capability_pb2.CacheGroup(**{name: getattr(group, name) for name in _GROUP_FIELDS})
            for group in info.cache_groups
        ]
    if Capability.BLOCK_TRANSFER in capabilities:
        parameters.update({name: getattr(info, name) for name in _TRANSFER_PARAMETERS})
    if Capability.ENCODER in capabilities:
        parameters.update({name: getattr(info, name) for name in _ENCODER_PARAMETERS})
    return capability_pb2.CapabilityParameters(**parameters) if parameters else None


def decode_parameters(
    message: capability_pb2.CapabilityParameters, agreed: AbstractSet[Capability] = frozenset(Capability)
) -> dict[str, Any]:
    """Return `ExecutorInfo`'s parameters of capabilities; those of capabilities that are not agreed on are neutral.

    Pooling tasks of later releases are left out. If a cache group has a kind of a later release, there are none: the
    executor goes on with one block table.
    """
    drafts, grammars, adapters, pooling, groups, transfers, encoder = (
        message if capability in agreed else capability_pb2.CapabilityParameters()
        for capability in (
            Capability.VARIABLE_TOKENS,
            Capability.GRAMMARS,
            Capability.ADAPTERS,
            Capability.POOLING,
            Capability.CACHE_GROUPS,
            Capability.BLOCK_TRANSFER,
            Capability.ENCODER,
        )
    )
    is_known = all(group.kind in _CACHE_KINDS for group in groups.cache_groups)
    return {
        "max_allowance": max(1, drafts.max_allowance),
        "max_sample_rows": drafts.max_sample_rows,
        **{name: getattr(grammars, name) for name in _GRAMMAR_PARAMETERS},
        **{name: getattr(adapters, name) for name in _ADAPTER_PARAMETERS},
        "pooling_tasks": frozenset(task for task in PoolingTask if task.value in pooling.pooling_tasks),
        "embedding_size": pooling.embedding_size,
        "num_scores": pooling.num_scores,
        "num_token_types": max(1, pooling.num_token_types),
        "is_generative": not pooling.pooling_only,
        "cache_groups": tuple(map(_decode_group, groups.cache_groups)) if is_known else (),
        **{name: getattr(transfers, name) for name in _TRANSFER_PARAMETERS},
        "max_encoder_tokens": encoder.max_encoder_tokens,
        "decoder_start_token_ids": tuple(encoder.decoder_start_token_ids),
        "banned_token_ids": tuple(encoder.banned_token_ids),
    }


def _decode_group(message: capability_pb2.CacheGroup) -> CacheGroup:
    values = {name: getattr(message, name) for name in _GROUP_FIELDS}
    return CacheGroup(**{**values, "kind": CacheKind(message.kind), "layers": tuple(message.layers)})


def encode_sampling_defaults(defaults: Mapping[str, float]) -> sampling_params_pb2.SamplingDefaults | None:
    """Turn a model's defaults into their message; None: the model sets none."""
    return sampling_params_pb2.SamplingDefaults(**defaults) if defaults else None  # type: ignore[arg-type]


def decode_sampling_defaults(message: sampling_params_pb2.SamplingDefaults) -> dict[str, float]:
    """Turn a message into a model's defaults; a peer's value that no request could have is left out."""
    return {field.name: value for field, value in message.ListFields() if BY_NAME[field.name].allows(value)}
