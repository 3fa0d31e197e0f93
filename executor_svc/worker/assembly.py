"""From a model with its weights to a worker: its cache, its graphs, its sampler."""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from executor_svc.adapters.step_rows import NO_ADAPTER
from executor_svc.attention.cache_format import FORMAT_NAMES
from executor_svc.attention.interface import LayerCache
from executor_svc.attention.native_backend import NativeAttentionBackend
from executor_svc.cache.block_count import (
    BlockCounts,
    count_blocks,
    count_host_blocks,
    cpu_cache_bytes,
    gpu_cache_bytes,
    why_short,
)
from executor_svc.cache.cache_engine import MAX_STAGED_BLOCKS, BlockPools, CacheEngine, CacheShape
from executor_svc.cache.cache_groups import GroupedCacheEngine, JoinedCacheEngine, size_groups
from executor_svc.cache.saved_states import SavedStates, num_staged_states
from executor_svc.checkpoint.pooling_modules import PoolingModules
from executor_svc.device.host_memory import available_memory_bytes, states_that_fit
from executor_svc.device.memory import GpuMemory, gpu_memory
from executor_svc.device.probe import device_probe
from executor_svc.drafts.drafting import Drafting
from executor_svc.drafts.mtp import Mtp
from executor_svc.drafts.proposer import PromptLookup
from executor_svc.models.decoder import Decoder
from executor_svc.models.encoder_decoder import EncoderDecoder
from executor_svc.models.kernels import ChosenModel
from executor_svc.models.native_forward import native_forward
from executor_svc.models.pooling import DecoderTexts, EmbeddingHead, NormedHead, Pooler
from executor_svc.native.sampling import load_sampling
from executor_svc.parallel.group import SINGLE_RANK, TensorParallelGroup
from executor_svc.sampler.device_sampler import DeviceSampler
from executor_svc.sampler.interface import DrawOnDevice
from executor_svc.sampler.sampler import Sampler
from executor_svc.states.live_states import LiveStates
from executor_svc.worker.adapter_sources import AdapterSources
from executor_svc.worker.encoder_inputs import encode_inputs
from executor_svc.worker.grammar_masks import GrammarMasks, GrammarSupport, grammar_support
from executor_svc.worker.graph_capture import graph_capture
from executor_svc.worker.largest_step import NUM_DEVICE_BLOCKS, run_largest_steps
from executor_svc.worker.last_tokens import LastTokens
from executor_svc.worker.model_runner import FollowedRunner, ModelRunner, Runner, adapters_of
from executor_svc.worker.native_runner import NativeRunner
from executor_svc.worker.replaceable_weights import ReplaceableWeights
from executor_svc.worker.step_graphs import GraphPlan, StepGraphs
from executor_svc.worker.torch_worker import MovesBlocks, TorchWorker
from executor_svc.worker.warm_up import warm_up
from executor_svc.worker.worker_adapters import WorkerAdapters
from octavo_shared.process.events import Event
from octavo_shared.step_wire.cache_group import CacheGroup, CacheKind, firsts_of
from octavo_shared.step_wire.executor_info import ExecutorInfo, TokenizerFile
from octavo_shared.step_wire.step import PoolingTask

if TYPE_CHECKING:  # its rules need pydantic, which a machine that only measures may lack
    from executor_svc.config import ExecutorConfig

_logger = logging.getLogger(__name__)

# Drafts of all rows of a step together: each has a row of logits.
MOST_DRAFTS_OF_STEP = 128


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What an executor says of its model beside its sizes."""

    model_id: str
    model_hash: str
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    decoder_start_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    tokenizer_files: tuple[TokenizerFile, ...] = ()
    numerics_id: str = ""
    is_invariant: bool = False
    weights_digest: str = ""
    why_not_invariant: str = ""
    pooling: PoolingModules | None = None  # None: it computes no vectors
    warning: str = ""  # as in `ExecutorInfo`
    is_generative: bool = True  # as in `ExecutorInfo`


def cache_shape_of(chosen: ChosenModel) -> CacheShape:
    """Return what a block of this model's cache is."""
    shape = chosen.model.shape
    counts = Counter((cache.num_kv_heads, cache.head_dim) for cache in shape.caches)
    (sizes, num_layers), *others = counts.items()
    return CacheShape(
        num_layers,
        chosen.block_size,
        *sizes,
        dtype=chosen.cache_dtype,
        is_one_piece=isinstance(chosen.attention, NativeAttentionBackend),
        state_bytes=shape.state_bytes,
        others=tuple((count, *of_others) for of_others, count in others),
        value_begin=shape.caches[0].value_begin,
    )


def assemble_worker(
    chosen: ChosenModel,
    identity: ModelIdentity,
    config: ExecutorConfig,
    device: torch.device,
    group: TensorParallelGroup = SINGLE_RANK,
    local_size: int = 1,
    weights: ReplaceableWeights | None = None,
) -> TorchWorker:
    """Make the cache of a model, as large as configured or as there is room, and all that runs on it.

    Args:
        chosen: The model, with its weights.
        identity: What to say of it.
        config: The settings of the executor.
        device: Of this rank.
        group: The ranks that share the model.
        local_size: How many ranks share the memory of this machine.
        weights: Those of the model, if others may take their place.

    Raises: ModelLoadError: there is no room for a cache.
    """
    if not identity.is_generative:
        return _Parts(chosen, identity, config, device, group, None, weights).make_worker(
            BlockCounts(0, 0), has_graphs=False
        )
    if chosen.model.shape.states and "max_num_seqs" not in config.model_fields_set:
        config = _with_states_that_fit(config, chosen.model.shape.state_bytes, device, group, local_size)
    capture = graph_capture(device) if config.cuda_graphs == "auto" else None
    graphs = None
    if capture is not None:
        graphs = GraphPlan.of(
            chosen.model,
            chosen.attention,
            capture,
            group,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_blocks=-(-identity.max_model_len // chosen.block_size),
        )
    parts = _Parts(chosen, identity, config, device, group, graphs, weights)
    shape = chosen.model.shape
    state_bytes = shape.state_bytes * config.max_num_seqs
    if shape.states:
        gib = round(state_bytes / 2**30, 2)
        _logger.info(Event("states", layers=len(shape.states), bytes_per_sequence=shape.state_bytes, gib=gib))

    adapters = adapters_of(chosen.model)
    if adapters is not None:
        adapters.of_sequences = np.full(config.max_num_seqs, NO_ADAPTER, np.int32)
        gib = round(adapters.num_bytes / 2**30, 2)
        _logger.info(Event("adapters", slots=adapters.num_slots, max_rank=adapters.max_rank, gib=gib))

    def free_cache_bytes() -> int:
        memory = gpu_memory(device)
        if memory is None:
            return cpu_cache_bytes(local_size, state_bytes + (0 if adapters is None else adapters.num_bytes))
        return gpu_cache_bytes(
            memory, config.gpu_memory_utilization, parts.run_largest_steps, parts.measure_graph_bytes
        )

    blocks = count_blocks(config, cache_shape_of(chosen), free_cache_bytes, local_size)
    counts = BlockCounts(*map(group.least, (blocks.device, blocks.host, blocks.states, blocks.host_states)))
    _logger.info(
        Event(
            "kv_cache",
            num_blocks=counts.device,
            num_host_blocks=counts.host,
            dtype=FORMAT_NAMES[chosen.cache_dtype],
            tokens=counts.device * chosen.block_size,
            gib=round(counts.device * cache_shape_of(chosen).bytes_per_block / 2**30, 2),
        )
    )
    if shape.states:
        gib = round(counts.states * shape.state_bytes / 2**30, 2)
        sizes = {"num_states": counts.states, "num_host_states": counts.host_states}
        _logger.info(Event("saved_states", **sizes, gib=gib))
    short = why_short(
        cache_shape_of(chosen), counts.device, identity.max_model_len, counts.states, config.state_cache_gib
    )
    if short is not None and not chosen.model.shape.sliding_window_tokens and group.rank == 0:
        _logger.warning(Event("kv_cache_is_short", reason=short))
    worker = parts.make_worker(counts, has_graphs=True)
    if compiles_kernels(device):
        warm_up(worker)
    return worker


def _with_states_that_fit(
    config: ExecutorConfig, state_bytes: int, device: torch.device, group: TensorParallelGroup, local_size: int
) -> ExecutorConfig:
    """Return the settings with as many sequences as there is room for their states; some are said with a sentence."""
    memory = gpu_memory(device)
    available = available_memory_bytes() if memory is None else memory.free() * local_size
    if available is None:
        return config
    fitting = group.least(states_that_fit(state_bytes, available // local_size, config.max_num_seqs))
    if fitting < config.max_num_seqs and group.rank == 0:
        gib = round(state_bytes * config.max_num_seqs / 2**30, 1)
        reason = f"the states of {config.max_num_seqs} sequences would take {gib} GiB; set --max-num-seqs for another"
        _logger.warning(Event("max_num_seqs_lowered", max_num_seqs=fitting, reason=reason))
    return config.model_copy(update={"max_num_seqs": fitting})


@dataclass(frozen=True, slots=True)
class _Parts:
    """Makes workers: one to measure what steps take, then the one that serves."""

    chosen: ChosenModel
    identity: ModelIdentity
    config: ExecutorConfig
    device: torch.device
    group: TensorParallelGroup
    graphs: GraphPlan | None
    weights: ReplaceableWeights | None

    def run_largest_steps(self) -> None:
        shape = cache_shape_of(self.chosen)
        num_host_blocks = min(MAX_STAGED_BLOCKS, count_host_blocks(self.config, shape))
        swaps_states = num_host_blocks and shape.state_bytes and self.config.state_cache_gib != 0
        num_host_states = num_staged_states(shape.state_bytes) if swaps_states else 0
        counts = BlockCounts(NUM_DEVICE_BLOCKS, num_host_blocks, host_states=num_host_states)
        run_largest_steps(self.make_worker(counts, has_graphs=False))

    def measure_graph_bytes(self, memory: GpuMemory) -> int:
        capture = graph_capture(self.device)
        if capture is None or self.graphs is None:
            return 0
        caches = CacheEngine(cache_shape_of(self.chosen), NUM_DEVICE_BLOCKS, 0, self.device).layers
        return self.graphs.measure_bytes(memory, capture, caches, self._last_tokens())

    def make_worker(self, blocks: BlockCounts, *, has_graphs: bool) -> TorchWorker:
        chosen, config, identity = self.chosen, self.config, self.identity
        model, backend = chosen.model, chosen.attention
        shape = cache_shape_of(chosen)
        groups = size_groups(
            shape,
            model.shape.caches,
            blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            state_bytes={layer: state.state_bytes for layer, state in model.shape.states.items()},
        )
        states = None
        if model.shape.states and blocks.device:
            states = LiveStates(model.shape.states.values(), config.max_num_seqs, self.device)
        grammars, pooler = self._grammar_support(), self._pooler()
        last_tokens = self._last_tokens()
        native = load_sampling(torch.get_num_threads()) if isinstance(backend, NativeAttentionBackend) else None
        draw = device_sampling(self.device)
        sampler = Sampler(native) if draw is None else DeviceSampler(draw)
        has_masks = grammars.num_slots and self.group.rank == 0
        masks = GrammarMasks(grammars.load_tokenizer, has_threads=True) if has_masks else None
        drafting = None if draw is not None else self._drafting(masks, states)
        most_drafts = 0 if drafting is None else config.max_draft_tokens
        adapters, slots = None, adapters_of(model)
        sources = AdapterSources.of(config.lora_dir, config.lora)
        if slots is not None:
            adapters = WorkerAdapters(slots, sources, self.group)
        info = ExecutorInfo(
            instance_id=uuid.uuid4().hex,
            model_id=identity.model_id,
            model_hash=identity.model_hash,
            dtype=config.dtype,
            block_size_tokens=chosen.block_size,
            num_device_blocks=blocks.device,
            num_host_blocks=blocks.host,
            max_model_len=identity.max_model_len,
            vocab_size=model.shape.vocab_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_message_bytes=config.max_message_bytes,
            eos_token_ids=identity.eos_token_ids,
            tp_size=self.group.size,
            sliding_window_tokens=model.shape.sliding_window_tokens,
            sampling_defaults=identity.sampling_defaults,
            numerics_id=identity.numerics_id,
            is_invariant=identity.is_invariant,
            weights_digest=identity.weights_digest,
            why_not_invariant=identity.why_not_invariant,
            kv_cache_dtype=FORMAT_NAMES[chosen.cache_dtype],
            warning=identity.warning,
            num_grammar_slots=grammars.num_slots,
            matcher_id=grammars.matcher_id,
            max_grammar_bytes=grammars.max_body_bytes,
            pooling_tasks=frozenset() if pooler is None else frozenset(pooler.heads),
            embedding_size=0 if pooler is None else pooler.size_of(PoolingTask.EMBED),
            is_generative=identity.is_generative,
            cache_groups=groups,
            max_allowance=most_drafts + 1,
            max_sample_rows=config.max_num_seqs + MOST_DRAFTS_OF_STEP if most_drafts else 0,
            max_transfers=config.max_transfers if identity.is_generative else 0,
            num_adapter_slots=0 if slots is None else slots.num_slots,
            max_adapter_rank=0 if slots is None else slots.max_rank,
            adapter_names=sources.names if slots is not None else (),
            updates_weights=self.weights is not None,
            max_encoder_tokens=self._max_encoder_tokens,
            decoder_start_token_ids=identity.decoder_start_token_ids,
            banned_token_ids=identity.banned_token_ids,
        )

        head = None if drafting is None else drafting.mtp

        def lay_out(uses_groups: bool) -> tuple[Runner, MovesBlocks]:
            runner, caches = lay_out_model(uses_groups)
            return runner if head is None else FollowedRunner(runner, head), caches

        def lay_out_model(uses_groups: bool) -> tuple[Runner, MovesBlocks]:
            caches = self._make_caches(shape, blocks, groups if uses_groups else (), states)
            for group in groups if uses_groups else ():
                sizes = {"num_blocks": group.num_device_blocks, "num_host_blocks": group.num_host_blocks}
                _logger.info(Event("cache_group", kind=group.kind.name, layers=len(group.layers), **sizes))
            forward = native_forward(model, backend, chosen.library, caches.layers, states.layers if states else ())
            if forward is not None and draw is None:  # it reads all tokens from the batch table
                own = caches.layers[-1:]
                mtp = None if self._mtp is None else native_forward(self._mtp, backend, chosen.library, own)
                encode = partial(encode_inputs, model, caches.layers, backend)
                return NativeRunner(model, forward, config.max_num_seqs, mtp, encode), caches
            graphs = self._capture_graphs(caches.layers, last_tokens) if has_graphs else None
            return ModelRunner(model, caches.layers, backend, last_tokens, graphs, states), caches

        probe = device_probe(self.device)
        return TorchWorker(
            info,
            lay_out,
            last_tokens,
            sampler,
            identity.tokenizer_files,
            self.group,
            probe,
            masks,
            pooler,
            drafting,
            states,
            adapters,
            self.weights,
        )

    def _make_caches(
        self, shape: CacheShape, blocks: BlockCounts, groups: Sequence[CacheGroup], states: LiveStates | None
    ) -> MovesBlocks:
        """Return pools for each group, or for all layers together if there are none."""
        model = self.chosen.model.shape
        if not groups:
            places_of: dict[tuple[int, int], list[int]] = {}
            for place, each in enumerate(model.caches):
                places_of.setdefault((each.num_kv_heads, each.head_dim), []).append(place)
            pools = [(self._pools(shape, own, blocks.device, blocks.host), own) for own in places_of.values()]
            return JoinedCacheEngine(pools) if len(pools) > 1 else pools[0][0]
        place_of = {layer: place for place, layer in enumerate(model.cached_layers)}
        engines: list[BlockPools] = []
        for group, first_block in zip(groups, firsts_of(groups).tolist(), strict=False):
            counts = group.num_device_blocks, group.num_host_blocks
            if group.kind is CacheKind.STATE:
                assert states is not None, "a group of them is of a model that has them"
                engines.append(SavedStates(states, *counts, first_block, self.device))
            else:
                engines.append(self._pools(shape, [place_of[layer] for layer in group.layers], *counts))
        return GroupedCacheEngine(groups, engines)

    def _pools(self, shape: CacheShape, places: Sequence[int], num_blocks: int, num_host_blocks: int) -> CacheEngine:
        """Return pools of layers that are alike, by their places among those with a cache."""
        like, scales = self.chosen.model.shape.caches[places[0]], self.chosen.cache_scales
        own = shape.of(len(places), like.num_kv_heads, like.head_dim)
        own_scales = [scales[place] for place in places] if scales else ()
        return CacheEngine(own, num_blocks, num_host_blocks, self.device, own_scales)

    def _capture_graphs(self, caches: Sequence[LayerCache], last_tokens: LastTokens) -> StepGraphs | None:
        capture = graph_capture(self.device)
        if capture is None or self.graphs is None:
            return None
        return self.graphs.make(capture, caches, last_tokens, self.group)

    def _drafting(self, masks: GrammarMasks | None, states: LiveStates | None) -> Drafting | None:
        """Return what drafts on a CPU; None: no row gets more than one token in a step."""
        library, config = self.chosen.library, self.config
        if library is None or not config.max_draft_tokens or not self.identity.is_generative:
            return None
        proposer = PromptLookup(library.path)
        mtp = None
        if self._mtp is not None and states is not None:
            mtp = Mtp(states.layers[-1].conv[:, 0], self.group)  # the last one is the last hidden state
        return Drafting(proposer, config.max_num_seqs, config.max_draft_tokens, self.group, masks, mtp)

    @property
    def _mtp(self) -> Decoder | None:
        model = self.chosen.model
        return model.mtp if isinstance(model, Decoder) else None

    @property
    def _max_encoder_tokens(self) -> int:
        """Tokens of the longest input of an encoder, which runs in one step; 0: the model has none."""
        model = self.chosen.model
        if not isinstance(model, EncoderDecoder):
            return 0
        most = self.config.max_num_batched_tokens
        return min(model.max_encoder_tokens, most) if model.shape.has_position_limit else most

    def _pooler(self) -> Pooler | None:
        """Return what makes vectors of texts; None: the model makes none."""
        chosen, modules = self.chosen, self.identity.pooling
        if modules is None:
            return None
        dtype = torch.bfloat16 if chosen.compute_dtype == "bfloat16" else chosen.dtype
        texts = DecoderTexts(chosen.model, chosen.attention, chosen.block_size, dtype)
        head = NormedHead(chosen.model, EmbeddingHead(modules, chosen.model.hidden_size))
        return Pooler(texts, {PoolingTask.EMBED: head})

    def _grammar_support(self) -> GrammarSupport:
        """Return what rank 0 can do with grammars: other ranks only keep the same batch table."""
        identity, config = self.identity, self.config
        vocab_size = self.chosen.model.shape.vocab_size
        num_slots = config.max_grammar_slots if identity.is_generative else 0
        return grammar_support(num_slots, identity.tokenizer_files, identity.eos_token_ids, vocab_size)

    def _last_tokens(self) -> LastTokens:
        return LastTokens(self.config.max_num_seqs, self.device)


def compiles_kernels(device: torch.device) -> bool:
    """Return whether the first steps on a device wait for kernels to be compiled and libraries to be loaded."""
    return device.type == "cuda"


def device_sampling(device: torch.device) -> DrawOnDevice | None:
    """Return what samples on a GPU without the host."""
    if device.type != "cuda":
        return None
    from executor_svc.sampler.device_sampling import sample_on_device  # Triton takes seconds to import

    return sample_on_device
