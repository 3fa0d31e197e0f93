"""A logit depends on the tokens before it and on nothing else: bit for bit, in all our own families.

Each example draws sequences and a way to compute them: chunks, neighbours that come and go, blocks that are shared,
blocks that are lost and computed again, the size of a block, one thread or two. Each logit has the bits that it has
when the sequence is computed alone, in one chunk, in one thread.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_svc.attention.interface import AttentionBackend
from executor_svc.models.decoder import Decoder
from executor_svc.models.language_model import LanguageModel
from executor_svc.native.library import NativeLibrary
from tests.numerics.architectures import VOCAB_SIZE, PagedRun, load_architecture, save_tiny_architecture
from tests.numerics.bits import assert_same_bits
from tests.numerics.family_architectures import FAMILY_ARCHITECTURES
from tests.numerics.mxfp4 import write_mxfp4
from tests.numerics.native import LANES, SETTINGS, library_path
from tests.numerics.random_schedules import BLOCK_SIZES, Plan, plans, play
from tests.numerics.scaled_codes import write_codes

FORMATS = (*SETTINGS, "blocks", "w8a16")  # and layouts of codes with scales
NUM_THREADS = (1, 2)
ATTENTION_PART, MAX_ROW = 384, 8  # keys that attention plans as one; the last token of a row and its drafts
MAX_TOKENS = 900  # three parts of the keys; contexts of 2,000 tokens are in tests/e2e/test_invariance.py

LONGROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "factor": 4.0}
LONGROPE |= {name: [1.0, 2.0, 3.0] for name in ("short_factor", "long_factor")}
# What the families do to attention, with sizes of heads and of groups that are no power of two.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bloom: ALiBi, 12 heads of 20, no groups": ("BloomForCausalLM", {"hidden_size": 240}),
    "DeepSeek-V2: 16 heads on latents of 64 and 16, experts in groups": (
        "DeepseekV2ForCausalLM",
        {"num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 64, "qk_rope_head_dim": 16},
    ),
    "DeepSeek-V3: 6 heads on latents, queries of a vector, yarn": (
        "DeepseekV3ForCausalLM",
        {"num_attention_heads": 6, "num_key_value_heads": 6},
    ),
    "Gemma: heads of 256 in groups of 8": (
        "GemmaForCausalLM",
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256},
    ),
    "Gemma 2: windows, soft caps, heads of 48": ("Gemma2ForCausalLM", {"head_dim": 48}),
    "Gemma 3: windows, norms of heads, heads of 96": ("Gemma3ForCausalLM", {"head_dim": 96}),
    "Gemma 4: heads of 24 and of 40, caches that layers share, embeddings for each layer, experts with norms": (
        "Gemma4ForCausalLM",
        {"head_dim": 24, "global_head_dim": 40},
    ),
    "Gemma 4: keys that are values, a KV head where there is no window": (
        "Gemma4ForCausalLM",
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
        | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "enable_moe_block": False},
    ),
    "GLM-4.7-Flash: 12 heads on latents of 96": ("Glm4MoeLiteForCausalLM", {"kv_lora_rank": 96}),
    "gpt-oss: sinks, windows, experts with biases, heads of 64": (
        "GptOssForCausalLM",
        {"head_dim": 64, "sliding_window": 128, "intermediate_size": 64},
    ),
    "Granite 4.0: 4 heads of 24 in Mamba-2 layers, states of 36, experts": (
        "GraniteMoeHybridForCausalLM",
        {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_state": 36, "hidden_size": 48},
    ),
    "LFM2: short convolutions of 48 channels, 5 taps, biases": (
        "Lfm2ForCausalLM",
        {"hidden_size": 48, "num_attention_heads": 6, "conv_L_cache": 5, "conv_bias": True},
    ),
    "LFM2 MoE: experts of which a bias chooses 3 of 7": (
        "Lfm2MoeForCausalLM",
        {"num_experts": 7, "num_experts_per_tok": 3},
    ),
    "Llama: heads of 80 in a group of 9": (
        "LlamaForCausalLM",
        {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 1, "head_dim": 80},
    ),
    "Llama: heads of 64 in groups of 3": (
        "LlamaForCausalLM",
        {"hidden_size": 45, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
    ),
    "Ministral 3: queries that grow": ("Ministral3ForCausalLM", {}),
    "Mistral: a window of 300": ("MistralForCausalLM", {"sliding_window": 300}),
    "Mixtral: experts": ("MixtralForCausalLM", {}),
    "MPT: ALiBi, 12 heads of 4": ("MptForCausalLM", {"max_seq_len": MAX_TOKENS}),
    "Nemotron-H: a layer without an MLP comes last, 3 of 7 experts": (
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["linear_attention", "moe", "linear_attention", "mlp", "full_attention"],
            "n_groups": 2,
            "mamba_head_dim": 24,
            "n_routed_experts": 7,
            "num_experts_per_tok": 3,
        },
    ),
    "OPT: learned positions, no gate": ("OPTForCausalLM", {}),
    "Phi 3: merged weights, 6 of the 12 dimensions of a head turn and grow": (
        "Phi3ForCausalLM",
        {"hidden_size": 48, "original_max_position_embeddings": MAX_TOKENS, "rope_parameters": LONGROPE},
    ),
    "Qwen 2: biases, a window in one layer": ("Qwen2ForCausalLM", {}),
    "Qwen 3: heads of 128 in a group of 8": (
        "Qwen3ForCausalLM",
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128},
    ),
    "Qwen 3 MoE: experts, heads of 20": ("Qwen3MoeForCausalLM", {"hidden_size": 80}),
    "Qwen 3 Next: delta nets by key head, shared experts": ("Qwen3NextForCausalLM", {}),
    "Qwen 3.5: 3 value heads of 24 for a key head of 20, gates": (
        "Qwen3_5ForCausalLM",
        {"linear_key_head_dim": 20, "linear_value_head_dim": 24},
    ),
    "Qwen 3.5 MoE: delta nets of 128, shared experts": (
        "Qwen3_5MoeForCausalLM",
        {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
        | {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "shared_expert_intermediate_size": 41},
    ),
}
# Windows, short with soft caps and long; ALiBi; states, which must not take a wrong draft.
WITH_EDGES = (
    "Gemma 2: windows, soft caps, heads of 48",
    "Mistral: a window of 300",
    "gpt-oss: sinks, windows, experts with biases, heads of 64",
    "MPT: ALiBi, 12 heads of 4",
    "DeepSeek-V3: 6 heads on latents, queries of a vector, yarn",
    "LFM2: short convolutions of 48 channels, 5 taps, biases",
    "LFM2 MoE: experts of which a bias chooses 3 of 7",
    "Qwen 3 Next: delta nets by key head, shared experts",
    "Qwen 3.5: 3 value heads of 24 for a key head of 20, gates",
)
assert {name for name, _ in VARIANTS.values()} == set(FAMILY_ARCHITECTURES)


def formats_of(name: str) -> Sequence[str]:
    """Return the formats of a variant: nobody stores gpt-oss in codes of 8 bits."""
    return (*SETTINGS, "mxfp4") if VARIANTS[name][0] == "GptOssForCausalLM" else FORMATS


@dataclass(frozen=True)
class Loaded:
    """A model in one number format, for the vectors of one of LANES; once for each number of threads."""

    number_format: str
    by_threads: dict[int, tuple[LanguageModel, AttentionBackend]] = field(repr=False)

    def alone(self, token_ids: list[int]) -> torch.Tensor:
        """Return the logits of a sequence in one chunk, in one thread, its segments and attentions called in turn."""
        num_blocks = -(-len(token_ids) // 16)
        run = PagedRun(*self.by_threads[1], block_size=16, num_blocks=num_blocks, is_composed=True)
        return run.prompt_logits(token_ids, len(token_ids))

    def check(self, plan: Plan, num_threads: int) -> None:
        expected = [self.alone(token_ids) for token_ids in plan.token_ids()]
        play(plan, *self.by_threads[num_threads], expected)


Load = Callable[..., Loaded]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    directory = tmp_path_factory.mktemp("same_bits")
    num_threads_before = torch.get_num_threads()

    @cache
    def saved(name: str) -> Path:
        family, settings = VARIANTS[name]
        sizes = {} if family in ("BloomForCausalLM", "MptForCausalLM") else {"max_position_embeddings": MAX_TOKENS}
        save_tiny_architecture(directory / name, family, {**FAMILY_ARCHITECTURES[family], **sizes, **settings})
        return directory / name

    @cache
    def saved_in_codes(name: str, layout: str) -> Path:
        target = directory / f"{name}, {layout}"
        if layout == "mxfp4":
            write_mxfp4(saved(name), target)
        else:
            write_codes(saved(name), target, layout)
        return target

    @cache
    def loaded(name: str, number_format: str, lanes: str = "widest") -> Loaded:
        by_threads = {}
        path = saved(name) if number_format in SETTINGS else saved_in_codes(name, number_format)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("executor_svc.models.kernels.load_library", partial(NativeLibrary, library_path(lanes)))
            for num_threads in NUM_THREADS:
                torch.set_num_threads(num_threads)
                by_threads[num_threads] = load_architecture(path, **SETTINGS.get(number_format, {}))
                assert isinstance(by_threads[num_threads][0], Decoder)
        torch.set_num_threads(1)
        return Loaded(number_format, by_threads)

    yield loaded
    torch.set_num_threads(num_threads_before)


@dataclass(frozen=True)
class Drafted:
    """A sequence whose tokens are computed as drafts: of `spans`, so many drafts of which so many are right."""

    begin: int  # where the first span is: the tokens before are computed
    spans: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        return self.begin + sum(num_right + 1 for _, num_right in self.spans)


@st.composite
def drafted_sequences(draw: st.DrawFn, edges: Sequence[int]) -> Drafted:
    """Draw a sequence whose first span is about an edge."""
    edge = draw(st.sampled_from(edges)) * draw(st.sampled_from([1, 1, 2]))
    most = st.sampled_from([0, 1, 3, 7])
    spans = draw(
        st.lists(most.flatmap(lambda num: st.tuples(st.just(num), st.integers(0, num))), min_size=2, max_size=4)
    )
    return Drafted(max(1, edge - draw(st.integers(0, 9))), tuple(spans))


def check_drafted(model: Loaded, block_size: int, sequences: Sequence[Drafted], num_threads: int) -> None:
    """Compare rows with drafts, all sequences in each step, with a token a step of each alone: all that is left.

    A prompt is computed in each of these steps too.
    """
    random = np.random.default_rng(5)
    texts = [random.integers(3, VOCAB_SIZE, sequence.num_tokens).tolist() for sequence in sequences]
    num_blocks = (MAX_TOKENS + 2 * MAX_ROW) // block_size + 1
    drafted = PagedRun(*model.by_threads[num_threads], block_size, (len(texts) + 1) * num_blocks)
    tables = drafted.take_blocks((len(texts) + 1) * num_blocks).reshape(len(texts) + 1, num_blocks)
    logits: list[list[torch.Tensor]] = [[] for _ in texts]
    places = [sequence.begin for sequence in sequences]
    drafted.step([text[:place] for text, place in zip(texts, places, strict=True)], [0] * len(texts), tables[:-1])
    for number in range(max(len(sequence.spans) for sequence in sequences)):
        rows = [row for row, sequence in enumerate(sequences) if number < len(sequence.spans)]
        spans = [sequences[row].spans[number] for row in rows]
        chunks = [
            [*texts[row][places[row] :][: num_right + 1], *random.integers(3, VOCAB_SIZE, num_drafts - num_right)]
            for row, (num_drafts, num_right) in zip(rows, spans, strict=True)
        ]
        starts, commits = [*(places[row] for row in rows), 0], [*([1] * len(rows)), 5]
        found = drafted.step([*chunks, texts[0][:5]], starts, tables[[*rows, -1]], commits=commits)
        drafted.accept_drafts([*(num_right for _, num_right in spans), 0])
        for row, (_, num_right), of_row in zip(rows, spans, found[:-1], strict=True):
            logits[row].append(of_row[: num_right + 1])
            places[row] += num_right + 1

    for text, table, sequence, found_of in zip(texts, tables[:-1], sequences, logits, strict=True):
        alone = PagedRun(*model.by_threads[1], block_size, num_blocks)
        own = alone.take_blocks(num_blocks)[None]
        alone.step([text[: sequence.begin]], [0], own)
        expected = [alone.step([[text[at]]], [at], own)[0] for at in range(sequence.begin, len(text))]
        assert_same_bits(torch.cat(found_of), torch.cat(expected), f"{sequence}")
        for layer, (ours, theirs) in enumerate(zip(drafted.cached(table), alone.cached(own[0]), strict=True)):
            assert_same_bits(ours[: len(text)], theirs[: len(text)], f"{sequence}, cache {layer}")
        for layer, (ours, theirs) in enumerate(zip(drafted.states_of(table), alone.states_of(own[0]), strict=True)):
            assert_same_bits(ours, theirs, f"{sequence}, state {layer}")


def check_random_plans(models: Sequence[Loaded], profile: settings, max_tokens: int) -> None:
    """Draw plans, and for each one of the models and a number of threads."""

    has_states = bool(models[0].by_threads[1][0].shape.states)

    @profile
    @given(plans(max_tokens, has_states=has_states), st.sampled_from(models), st.sampled_from(NUM_THREADS))
    def check(plan: Plan, model: Loaded, num_threads: int) -> None:
        model.check(plan, num_threads)

    check()


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_the_sequence_alone(name: str, load: Load) -> None:
    models = [load(name, number_format) for number_format in formats_of(name)]

    check_random_plans(models, settings(max_examples=10), max_tokens=600)


def test_logits_of_narrow_vectors_are_those_of_the_sequence_alone(load: Load) -> None:
    models = [load("Llama: heads of 80 in a group of 9", number_format, "avx2") for number_format in FORMATS]

    check_random_plans(models, settings(max_examples=10), max_tokens=600)


# Groups of 128, 32 and 16 inputs; attention gives the output projection 1,024 of them.
@pytest.mark.parametrize("layout", ["w4a16", "w4a16, zeros", "nvfp4"])
def test_logits_of_codes_of_4_bits_are_those_of_the_sequence_alone(layout: str, load: Load) -> None:
    models = [load("Qwen 3: heads of 128 in a group of 8", layout, lanes) for lanes in LANES]

    check_random_plans(models, settings(max_examples=3), max_tokens=300)


@pytest.mark.parametrize("name", WITH_EDGES)
def test_a_row_with_drafts_has_the_bits_of_its_tokens_one_by_one(name: str, load: Load) -> None:
    models = [load(name, number_format) for number_format in ("none", "int8", "compute bfloat16")]
    decoder = models[0].by_threads[1][0]
    assert isinstance(decoder, Decoder)
    windows = {layer.attention.window_tokens or ATTENTION_PART for layer in decoder.config.layers}
    edges = (ATTENTION_PART, *BLOCK_SIZES, *windows)

    @settings(max_examples=10)
    @given(
        st.sampled_from(models),
        st.sampled_from(BLOCK_SIZES),
        st.lists(drafted_sequences(edges), min_size=1, max_size=3),
        st.sampled_from(NUM_THREADS),
    )
    def check(model: Loaded, block_size: int, sequences: list[Drafted], num_threads: int) -> None:
        check_drafted(model, block_size, sequences, num_threads)

    check()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(("name", "number_format"), [(name, each) for name in VARIANTS for each in formats_of(name)])
def test_logits_are_those_of_the_sequence_alone_in_200_workloads(
    name: str, number_format: str, lanes: str, load: Load
) -> None:
    profile = settings(max_examples=200, derandomize=False)

    check_random_plans([load(name, number_format, lanes)], profile, MAX_TOKENS)
