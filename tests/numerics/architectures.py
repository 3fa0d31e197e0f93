"""Architectures that the executor runs, as tiny random models; one line each. Read by tests and by
`benchmarks/architectures.py`.

The sizes that all lines share are `SIZES`, of which a model takes those that its configuration has. A line holds what
is special: settings without which the architecture would do less than its real models do.
"""

import ctypes
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from executor_svc.attention.interface import (
    AttentionBackend,
    AttentionMetadata,
    LayerCache,
    first_caches,
    join_plans,
)
from executor_svc.attention.native_backend import NativeAttentionBackend
from executor_svc.checkpoint.model_directory import ModelDirectory
from executor_svc.checkpoint.weights import Checkpoint
from executor_svc.models.language_model import LanguageModel
from executor_svc.models.native_forward import NativeForward, native_forward
from executor_svc.models.selection import choose_model
from executor_svc.native.structs import BatchStruct, BlockTablesStruct
from executor_svc.states.interface import StateRows
from executor_svc.states.live_states import AcceptedDrafts, LiveStates, StepStates
from octavo_shared.step_wire.step import Int32Array
from tests.numerics.family_architectures import FAMILY_ARCHITECTURES, GRANITE

VOCAB_SIZE = 97
BLOCK_SIZE_TOKENS = 4
NUM_BLOCKS = 128
PROMPT_LENGTHS = (1, 15, 16, 17, 40)
NUM_NEW_TOKENS = 12

SIZES: Mapping[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Mixtures of experts have many names for the same numbers.
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
}

# A window, shorter than the prompts, in the first of two layers.
ONE_WINDOW = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
ALL_WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention"] * 2}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}

# By the name in config.json. Families that have nothing of their own, such as SmolLM3, stand here alone.
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    **FAMILY_ARCHITECTURES,
    "AfmoeForCausalLM": ONE_WINDOW,
    "ApertusForCausalLM": {},
    "ArceeForCausalLM": {"rope_parameters": YARN},
    "AriaTextForCausalLM": {},
    "BioGptForCausalLM": {},
    "BitNetForCausalLM": {},
    "CohereForCausalLM": {"logit_scale": 0.3, "use_qk_norm": True},
    "Cohere2ForCausalLM": {**ONE_WINDOW, "logit_scale": 0.3},
    "Cohere2MoeForCausalLM": ONE_WINDOW,
    "CTRLLMHeadModel": {"dff": 48},
    "CwmForCausalLM": {**ONE_WINDOW, "rope_parameters": LINEAR_ROPE},
    "DbrxForCausalLM": {
        "d_model": 32,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 10_000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_top_k": 2},
    },
    "Dots1ForCausalLM": {**ONE_WINDOW, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "Emu3ForCausalLM": {},
    "Ernie4_5ForCausalLM": {},
    "Ernie4_5_MoeForCausalLM": {"moe_layer_start_index": 1},
    "Exaone4ForCausalLM": ONE_WINDOW,
    "ExaoneMoeForCausalLM": ONE_WINDOW,
    "FlexOlmoForCausalLM": {},
    "Gemma4UnifiedForCausalLM": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 9,
        "global_head_dim": 16,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "GPT2LMHeadModel": {"scale_attn_by_inverse_layer_idx": True},
    "GPTBigCodeForCausalLM": {},
    "GPTNeoXForCausalLM": {"rope_parameters": PARTIAL_ROPE},
    "GlmForCausalLM": {},
    "Glm4ForCausalLM": {},
    "Glm4MoeForCausalLM": {"first_k_dense_replace": 1, "use_qk_norm": True},
    "GraniteForCausalLM": GRANITE,
    "GraniteMoeForCausalLM": GRANITE,
    "GraniteMoeSharedForCausalLM": {**GRANITE, "shared_intermediate_size": 16},
    "HeliumForCausalLM": {},
    "HunYuanDenseV1ForCausalLM": {"rope_parameters": {**DYNAMIC_ROPE, "alpha": 50.0}},
    "HunYuanMoEV1ForCausalLM": {},
    "HYV3ForCausalLM": {},
    "HyperCLOVAXForCausalLM": {},
    "Jais2ForCausalLM": {},
    "JetMoeForCausalLM": {"kv_channels": 8},
    "Kolibri1ForCausalLM": ALL_WINDOWS,
    "LagunaForCausalLM": ONE_WINDOW,
    "MellumForCausalLM": ONE_WINDOW,
    "MiniMaxM2ForCausalLM": {},
    "MinistralForCausalLM": ONE_WINDOW,
    "ModernBertDecoderForCausalLM": {"local_attention": 18, "layer_types": ["full_attention", "sliding_attention"]},
    "NanoChatForCausalLM": {"final_logit_softcapping": 3.0},
    "NemotronForCausalLM": {},
    "OlmoForCausalLM": {"clip_qkv": 1.5},
    "Olmo2ForCausalLM": {"rope_parameters": DYNAMIC_ROPE},
    "Olmo3ForCausalLM": ONE_WINDOW,
    "OlmoeForCausalLM": {},
    "PersimmonForCausalLM": {},
    "PhiForCausalLM": {"qk_layernorm": True},
    "PhimoeForCausalLM": {"sliding_window": 9},
    "Qwen2MoeForCausalLM": {"mlp_only_layers": [1]},
    "SeedOssForCausalLM": {"attention_out_bias": True, "mlp_bias": True},
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0]},
    "SolarOpenForCausalLM": {},
    "StableLmForCausalLM": {"use_qkv_bias": True},
    "Starcoder2ForCausalLM": {"sliding_window": 9},
    "VaultGemmaForCausalLM": {**ONE_WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0},
}


# Of Gemma 4 and T5, which no signature has.
KEYWORDS = ("global_head_dim", "num_global_key_value_heads", "tie_word_embeddings")


@torch.no_grad()
def save_tiny_architecture(directory: Path, name: str, settings: Mapping[str, object]) -> Any:
    """Save a random model of an architecture, float32; return transformers' form of it, with eager attention."""
    model_class = getattr(transformers, name)
    config_class = model_class.config_class
    known = {*inspect.signature(config_class.__init__).parameters, *config_class.attribute_map, *KEYWORDS}
    assert known.issuperset(settings), f"{name} has no {set(settings) - known}"
    # An alias of transformers (hidden_size for d_model) would win over the name of the configuration.
    sizes = {k: v for k, v in SIZES.items() if k in known and config_class.attribute_map.get(k) not in settings}
    config = config_class.from_dict({**sizes, **settings})
    config._attn_implementation = "eager"
    model = model_class(config)
    generator = torch.Generator().manual_seed(7)
    for parameter_name, parameter in model.named_parameters():
        # transformers starts biases at 0, norms at 1 and the rest near 0: too tame to show a mistake.
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        if parameter.ndim == 1 and parameter_name.endswith("weight"):  # of a norm
            parameter.add_(1.0)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("bias"):  # a correction of experts' scores
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
        elif buffer_name.endswith("layer_scalar"):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    model.eval()
    model.save_pretrained(directory)
    return model


def load_architecture(directory: Path, **settings: Any) -> tuple[LanguageModel, AttentionBackend]:
    """Load a model as the executor does, float32 on the CPU."""
    from executor_svc.config import ExecutorConfig  # needs what a machine that only runs kernels may lack

    config, device = ExecutorConfig(model=str(directory), dtype="float32", **settings), torch.device("cpu")
    chosen = choose_model(ModelDirectory(directory), config, device)
    chosen.load(Checkpoint(directory))
    return chosen.model, chosen.attention


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a model on the paged cache compares with plain transformers."""

    # Largest difference of a logit at any position of a prompt, as a part of the largest logit.
    logit_difference: float
    # Largest distance of a greedy token from the best logit of the reference after the same history; 0: all equal.
    greedy_distance: float


@torch.inference_mode()
def compare_with_transformers(model: LanguageModel, backend: AttentionBackend, reference: Any) -> Comparison:
    """Compare logits of a prompt of 45 tokens, and greedy outputs of five prompts that are decoded together."""
    prompt = _random_tokens(45)
    actual = PagedRun(model, backend).prompt_logits(prompt, chunk_size=16)
    expected = reference(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
    assert actual.shape == expected.shape
    prompts = [_random_tokens(length) for length in PROMPT_LENGTHS]
    outputs = PagedRun(model, backend).generate(prompts, NUM_NEW_TOKENS, chunk_size=7)
    distances = []
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = reference(input_ids=torch.tensor([prompt + output]), use_cache=False).logits[0]
        scores = logits[len(prompt) - 1 : -1]
        chosen = scores.gather(1, torch.tensor(output)[:, None])[:, 0]
        distances.append(float((scores.amax(-1) - chosen).max()))
    return Comparison(float((actual - expected).abs().max() / expected.abs().max()), max(distances))


class PagedRun:
    """Runs sequences on a cache of its own that is NaN where nobody has written; block tables are scrambled.

    A model that the C library can run in one call runs so, unless `is_composed`. States lie at the slot of a sequence's
    first block, and are NaN too before.
    """

    def __init__(
        self,
        model: LanguageModel,
        backend: AttentionBackend,
        block_size: int = BLOCK_SIZE_TOKENS,
        num_blocks: int = NUM_BLOCKS,
        *,
        is_composed: bool = False,
    ) -> None:
        self.block_size = block_size
        self._model = model
        self._backend = backend
        self._free_blocks = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
        shapes = [(num_blocks, block_size, each.num_kv_heads, each.head_dim) for each in model.shape.caches]
        groups = {shape: index for index, shape in enumerate(dict.fromkeys(shapes))}
        self._caches: list[LayerCache] = []
        for shape, each in zip(shapes, model.shape.caches, strict=True):
            keys = torch.full(shape, torch.nan)
            values = keys if each.value_begin else torch.full(shape, torch.nan)
            self._caches.append(LayerCache(keys, values, value_begin=each.value_begin, group=groups[shape]))
        states = LiveStates(model.shape.states.values(), num_blocks, torch.device("cpu"))
        self._states = states.layers
        for state in states.layers:
            state.conv.fill_(torch.nan)
            state.recurrent.fill_(torch.nan)
        library = backend._library if isinstance(backend, NativeAttentionBackend) else None
        self._forward = None if is_composed else native_forward(model, backend, library, self._caches, self._states)

    def prompt_logits(self, prompt: Sequence[int], chunk_size: int) -> torch.Tensor:
        """Return the logits at every position, [num_tokens, vocab_size]."""
        table = self._block_tables(1, len(prompt))
        starts = range(0, len(prompt), chunk_size)
        return torch.cat([self.step([prompt[start : start + chunk_size]], [start], table)[0] for start in starts])

    def generate(self, prompts: Sequence[list[int]], num_new_tokens: int, chunk_size: int) -> list[list[int]]:
        """Return greedy outputs. Short prompts decode while longer ones are still computed."""
        sequences = [list(prompt) for prompt in prompts]
        ends = [len(prompt) + num_new_tokens for prompt in prompts]
        computed = [0] * len(prompts)
        tables = self._block_tables(len(prompts), max(ends))
        while live := [row for row, end in enumerate(ends) if len(sequences[row]) < end]:
            live.sort(key=lambda row: len(sequences[row]) - computed[row] > 1)  # decodes lead
            chunks = [sequences[row][computed[row] : computed[row] + chunk_size] for row in live]
            logits = self.step(chunks, [computed[row] for row in live], tables[live])
            for row, chunk, chunk_logits in zip(live, chunks, logits, strict=True):
                computed[row] += len(chunk)
                if computed[row] == len(sequences[row]):
                    sequences[row].append(int(chunk_logits[-1].argmax()))
        return [sequence[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]

    def take_blocks(self, num_blocks: int) -> Int32Array:
        """Return blocks that nobody has written to."""
        taken, self._free_blocks = np.split(self._free_blocks, [num_blocks])
        assert len(taken) == num_blocks, "there are no more blocks"
        return taken

    def cached(self, table: Int32Array) -> Iterator[torch.Tensor]:
        """Yield what the cache has of a sequence, [num_tokens, num_kv_heads, head_dim]: keys and values by layer."""
        for layer in self._caches:
            for pool in (layer.keys, layer.values):
                yield pool[torch.from_numpy(table).long()].flatten(0, 1)

    def _block_tables(self, num_rows: int, num_tokens: int) -> Int32Array:
        num_blocks = -(-num_tokens // self.block_size)
        return self.take_blocks(num_rows * num_blocks).reshape(num_rows, num_blocks)

    def states_of(self, table: Int32Array) -> Iterator[torch.Tensor]:
        """Yield the states of a sequence, flat: convolution and recurrence by layer."""
        for layer in self._states:
            yield layer.conv[table[0]].flatten()
            yield layer.recurrent[table[0]].flatten()

    def accept_drafts(self, num_accepted: Sequence[int]) -> None:
        """Let the states take so many drafts of each row of the last step."""
        if self._states and any(num_accepted):
            assert self._forward is not None
            accepted = AcceptedDrafts.of(self._rows, np.array(num_accepted, np.int32))
            self._forward.accept_drafts(accepted, self._draft_inputs)

    @torch.inference_mode()
    def step(
        self,
        chunks: Sequence[Sequence[int]],
        starts: Sequence[int],
        tables: Int32Array,
        *,
        only_last: bool = False,
        commits: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Run a chunk of each row; return the logits of their tokens, each [chunk_len, vocab_size].

        With `only_last` those of the last token of each row, each [1, vocab_size]. With `commits` the states take so
        many tokens of each row.
        """
        lengths = [len(chunk) for chunk in chunks]
        ends = np.cumsum(lengths)
        if self._forward is not None:
            # Sequences that share their first block have no states.
            own = np.ascontiguousarray(tables[:, 0]) if self._states else np.arange(len(chunks), dtype=np.int32)
            indices = (ends - 1 if only_last else np.arange(ends[-1])).astype(np.int32)
            columns = [np.array(column, np.int32) for column in (starts, lengths, commits or lengths)]
            self._rows = StateRows(own, *columns)
            num_drafts = int((columns[1] - columns[2]).sum())
            self._draft_inputs = torch.full((num_drafts * self._forward.draft_width,), torch.nan)
            sizes = (tables, self.block_size, len(first_caches(self._caches)))
            in_one_call = _run_in_one_call(self._forward, chunks, self._rows, self._draft_inputs, sizes, indices)
            return torch.split(in_one_call, 1 if only_last else lengths)
        positions = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        slots = [
            table[part // self.block_size].astype(np.int64) * self.block_size + part % self.block_size
            for table, part in zip(tables, positions, strict=True)
        ]
        metadata = AttentionMetadata(
            np.array(starts, np.int32), np.array(lengths, np.int32), tables, torch.from_numpy(np.concatenate(slots))
        )
        token_ids = torch.tensor([token_id for chunk in chunks for token_id in chunk])
        plan = join_plans([self._backend.plan(metadata, cache) for cache in first_caches(self._caches)])
        wanted = torch.tensor(lengths).cumsum(0) - 1 if only_last else torch.arange(len(token_ids))
        rows = StateRows(np.ascontiguousarray(tables[:, 0]), metadata.starts, metadata.lengths)
        hidden = self._model.forward(
            token_ids,
            torch.from_numpy(np.concatenate(positions)),
            self._caches,
            plan,
            wanted,
            StepStates(rows, self._states) if self._states else None,
        )
        logits = self._model.logits(hidden)
        assert logits is not None, "there is one rank"
        return torch.split(logits, 1 if only_last else lengths)


def _run_in_one_call(
    forward: NativeForward,
    chunks: Sequence[Sequence[int]],
    rows: StateRows,
    draft_inputs: torch.Tensor,
    tables_of_groups: tuple[Int32Array, int, int],
    wanted: Int32Array,
) -> torch.Tensor:
    """Return the logits of the wanted tokens of a step, [num_wanted, vocab_size]."""
    assert rows.commits is not None
    (tables, block_size, num_groups), slots, starts = tables_of_groups, rows.slots, rows.starts
    longest = int((starts + rows.lengths).max())
    token_ids = np.zeros((slots.max() + 1, longest), np.int32)
    block_tables = np.zeros((slots.max() + 1, tables.shape[1]), np.int32)
    block_tables[slots] = tables
    for slot, start, chunk in zip(slots, starts, chunks, strict=True):
        token_ids[slot, start : start + len(chunk)] = chunk
    hidden, logits = (torch.empty(len(wanted), size) for size in (forward.hidden_size, forward.vocab_size))
    of_group = BlockTablesStruct(block_tables.ctypes.data, block_tables.shape[1], block_size)
    of_groups = (BlockTablesStruct * num_groups)(*[of_group] * num_groups)
    batch = BatchStruct(
        token_ids=token_ids.ctypes.data,
        tables=ctypes.addressof(of_groups),
        max_model_len=token_ids.shape[1],
        num_groups=num_groups,
        num_rows=len(chunks),
        slots=slots.ctypes.data,
        starts=starts.ctypes.data,
        lengths=rows.lengths.ctypes.data,
        commits=rows.commits.ctypes.data,
        wanted=wanted.ctypes.data,
        num_wanted=len(wanted),
        num_logit_rows=len(wanted),
        hidden=hidden.data_ptr(),
        logits=logits.data_ptr(),
        draft_inputs=draft_inputs.data_ptr() if len(draft_inputs) else None,
    )
    forward(batch)
    return logits


def _random_tokens(num_tokens: int) -> list[int]:
    token_ids: list[int] = np.random.default_rng(num_tokens).integers(3, VOCAB_SIZE, num_tokens).tolist()
    return token_ids
