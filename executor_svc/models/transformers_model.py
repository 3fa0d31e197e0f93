"""Decoder-only models that run through transformers' code, with our paged attention in its attention interface.

No model has code of its own here. What a model is like is found out at load time: from its configuration, from a run
that records how its layers attend (`transformers_probe.py`), and from comparing its logits on the paged cache with its
own attention's. That finds what no configuration tells: positions that are counted instead of given, state that a layer
keeps beside keys and values, arithmetic hidden in a model's own attention.
"""

import copy
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from executor_svc.attention.interface import AttentionMetadata, AttentionPlan, CachedLayer, LayerCache
from executor_svc.attention.torch_backend import TorchAttentionBackend
from executor_svc.models.language_model import LanguageModel, ModelShape
from executor_svc.models.transformers_attention import PAGED_ATTENTION, AttentionHook, PagedStep, attach_hook
from executor_svc.models.transformers_probe import (
    NUM_PROBE_TOKENS,
    AttentionFacts,
    find_architecture,
    from_pretrained,
    probe_attention,
    probe_tokens,
    refusal,
)
from executor_svc.states.live_states import StepStates
from octavo_shared.errors import ModelLoadError
from octavo_shared.process.events import Event

logger = logging.getLogger(__name__)


class TransformersModel:
    """A model of transformers on the paged cache. `forward` is not reentrant."""

    def __init__(self, model: Any, base: Any, hook: AttentionHook, attention: AttentionFacts) -> None:
        self.shape = _shape(model.config, attention)
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self._base = base
        self._head = _without_base(model, base)
        self._hook = hook
        self.attention = attention
        self.hidden_size: int = model.config.hidden_size

    @property
    def why_not_capturable(self) -> str:
        """It is not known what the code of a model does on the host."""
        return "the code of transformers may read its batch on the host"

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[LayerCache],
        attention: AttentionPlan,
        wanted: torch.Tensor,
        states: StepStates | None = None,
    ) -> torch.Tensor:
        """Run the decoder; see `LanguageModel.forward`. Models with states are refused."""
        with self._hook.handled_by(PagedStep(attention, caches, self.attention.layers)):
            output = self._base(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        hidden: torch.Tensor = output.last_hidden_state[0, wanted]
        return hidden

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states as they are: the part before the head has normed them."""
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states [num_rows, hidden_size] to raw logits [num_rows, vocab_size], float32."""
        logits: torch.Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float()


def load_transformers_model(directory: Path, dtype: torch.dtype, device: torch.device) -> TransformersModel:
    """Load a model from a Hugging Face directory; nothing is downloaded, and no code of the directory is run.

    Raises:
        ModelLoadError: files are missing or damaged, or the model cannot run on paged attention; one sentence.
    """
    model_class, config = find_architecture(directory)
    with _quiet_transformers():
        model = _load_weights(model_class, config, directory, dtype, device)
        return _on_paged_attention(model)


@torch.inference_mode()
def _on_paged_attention(model: Any) -> TransformersModel:
    """Exchange the attention of a loaded model, after it was seen to be exchangeable."""
    architecture = type(model).__name__
    base = getattr(model, model.base_model_prefix, None)
    if base is None or base is model:
        raise refusal(architecture, "its code has no separable part before the head")
    hook = attach_hook(model)
    paged = TransformersModel(model, base, hook, probe_attention(model, base, hook))
    check_logits(model, paged)
    return paged


def _shape(config: Any, attention: AttentionFacts) -> ModelShape:
    return ModelShape(
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        caches=tuple(
            CachedLayer(attention.num_kv_heads, attention.head_dim, layer.window_tokens) for layer in attention.layers
        ),
    )


def _load_weights(model_class: Any, config: Any, directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the model with all of its weights, in memory of its own."""
    begin_s = time.perf_counter()
    # Mismatched sizes are refused below, by name.
    model, info = from_pretrained(model_class, directory, dtype, config=config, ignore_mismatched_sizes=True)
    wrong = [f"{name} is missing" for name in info["missing_keys"]]
    wrong += [f"{name} does not belong to this model" for name in info["unexpected_keys"]]
    wrong += [f"{name} has shape {list(is_)}, not {list(due)}" for name, is_, due in info["mismatched_keys"]]
    if wrong:
        raise ModelLoadError(f"{directory} does not contain a {model_class.__name__}: the tensor {min(wrong)}")
    model.requires_grad_(False)
    for parameter in model.parameters():
        # transformers may leave it mapped to the file: a write to the file would change the model.
        parameter.data = parameter.data.to(device, copy=True)
    model.to(device)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    duration_s = time.perf_counter() - begin_s
    logger.info(Event("weights_loaded", directory=str(directory), bytes=num_bytes, duration_s=round(duration_s, 2)))
    return model


def _without_base(model: Any, base: Any) -> Any:
    """Return a model that shares everything with `model`, but takes hidden states in place of running `base`.

    What an architecture does between hidden states and logits (scales, caps, biases) stays in its own code.
    """
    head = copy.copy(model)
    head._modules = {name: _GivenHidden() if module is base else module for name, module in model._modules.items()}
    return head


class _GivenHidden(nn.Module):
    """Stands for the part of a model before its head; the hidden states come as its input embeddings."""

    def forward(self, *_: object, inputs_embeds: torch.Tensor, **__: object) -> "_GivenOutput":
        """Return the hidden states [1, num_rows, hidden_size] as they are."""
        return _GivenOutput(last_hidden_state=inputs_embeds)

    @property
    def decoder(self) -> "_GivenHidden":
        """Decoders of encoder-decoder models are wrapped: the head calls what is inside."""
        return self


class _GivenOutput(BaseModelOutputWithPast):  # type: ignore[misc]  # transformers is not followed
    """Hidden states, and None for whatever else the output of an architecture may have."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Let transformers report nothing but errors, and show progress only to a person."""
    library = transformers.utils.logging
    verbosity, had_progress_bar = library.get_verbosity(), library.is_progress_bar_enabled()
    library.set_verbosity_error()
    if not sys.stderr.isatty():
        library.disable_progress_bar()
    try:
        yield
    finally:
        library.set_verbosity(verbosity)
        if had_progress_bar:
            library.enable_progress_bar()


BLOCK_SIZE_TOKENS = 4
# Of two sequences, the tokens that are computed in each of two steps: (first, one behind the last) of each sequence.
STEPS = (((0, 5), (0, 8)), ((5, 9), (8, NUM_PROBE_TOKENS)))


def check_logits(model: Any, paged: LanguageModel) -> None:
    """Compare `paged` with `model` on its own attention, which shares its weights.

    Two sequences go through together, in two steps: a model that counts positions over a batch, or keeps something
    of a sequence outside the cache, is wrong in the second one. `model` is left with paged attention.

    Raises: ModelLoadError: the logits disagree, or the code of the model fails; one sentence.
    """
    architecture = type(model).__name__
    tokens = probe_tokens(model)
    sequences = [tokens.flip(0), tokens]
    try:
        model.set_attn_implementation("eager")
        expected = [model(input_ids=sequence[None], use_cache=False).logits[0].float() for sequence in sequences]
        model.set_attn_implementation(PAGED_ATTENTION)
        difference = _largest_difference(paged, model.dtype, sequences, expected)
    except Exception as error:  # foreign code, which fails with many types
        raise refusal(architecture, f"its code fails with paged attention ({type(error).__name__}: {error})") from error
    limit = torch.finfo(model.dtype).eps ** 0.5
    if not difference <= limit:  # NaN included
        sentence = f"its logits differ from those of its own attention by {difference:.1e} of their length"
        cause = "" if _takes_positions(model) else "; its code computes positions itself instead of using those given"
        raise refusal(architecture, f"{sentence}, above {limit:.1e}{cause}")


def _takes_positions(model: Any) -> bool:
    """Whether other positions make other logits, on the attention of the model itself."""
    model.set_attn_implementation("eager")
    token_ids = probe_tokens(model)[None]
    positions = torch.arange(NUM_PROBE_TOKENS, device=model.device)[None]
    one, two = (model(input_ids=token_ids, position_ids=by * positions, use_cache=False).logits for by in (1, 2))
    return not torch.equal(one, two)


def _largest_difference(
    paged: LanguageModel, dtype: torch.dtype, sequences: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> float:
    """Run both sequences on a cache of their own; return the relative difference of the worst chunk's logits.

    A chunk's difference is the median over its tokens: where rounding sends a token to another expert, that token
    differs, and its model is right.
    """
    blocks_each = -(-NUM_PROBE_TOKENS // BLOCK_SIZE_TOKENS)
    # No two blocks of a sequence lie side by side; NaN, so that nothing unwritten is read unseen.
    block_tables = np.arange(blocks_each * len(sequences), dtype=np.int32).reshape(blocks_each, -1).T.copy()
    shape = (block_tables.size, BLOCK_SIZE_TOKENS, paged.shape.caches[0].num_kv_heads, paged.shape.caches[0].head_dim)
    caches = [
        LayerCache(*(torch.full(shape, torch.nan, dtype=dtype, device=paged.device) for _ in range(2)))
        for _ in range(paged.shape.num_layers)
    ]
    differences = []
    for spans in STEPS:
        logits = paged.logits(_run_step(paged, sequences, spans, block_tables, caches))
        assert logits is not None, "such a model has one rank"
        chunks = torch.split(logits, [end - start for start, end in spans])
        for chunk, (start, end), sequence_logits in zip(chunks, spans, expected, strict=True):
            due = sequence_logits[start:end]
            differences.append(((chunk - due).norm(dim=-1) / due.norm(dim=-1)).median())
    return float(torch.stack(differences).max())  # NaN if any is


def _run_step(
    paged: LanguageModel,
    sequences: Sequence[torch.Tensor],
    spans: Sequence[tuple[int, int]],
    block_tables: np.ndarray[Any, np.dtype[np.int32]],
    caches: Sequence[LayerCache],
) -> torch.Tensor:
    """Run a span of each sequence; return their hidden states, [num_tokens, hidden_size]."""
    positions = [np.arange(start, end) for start, end in spans]
    slots = [
        table[part // BLOCK_SIZE_TOKENS].astype(np.int64) * BLOCK_SIZE_TOKENS + part % BLOCK_SIZE_TOKENS
        for table, part in zip(block_tables, positions, strict=True)
    ]
    metadata = AttentionMetadata(
        starts=np.array([start for start, _ in spans], np.int32),
        lengths=np.array([len(part) for part in positions], np.int32),
        block_tables=block_tables,
        slot_mapping=torch.from_numpy(np.concatenate(slots)).to(paged.device),
    )
    token_ids = torch.cat([tokens[start:end] for tokens, (start, end) in zip(sequences, spans, strict=True)])
    flat_positions = torch.from_numpy(np.concatenate(positions)).to(paged.device)
    wanted = torch.arange(len(token_ids), device=paged.device)
    plan = TorchAttentionBackend().plan(metadata, caches[0])
    return paged.forward(token_ids, flat_positions, caches, plan, wanted)
