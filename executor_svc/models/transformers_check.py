"""A loaded model on the paged cache must give the logits of its own attention; else it is refused.

This finds what no configuration tells: positions that are counted instead of given, state that a layer keeps
beside keys and values, arithmetic hidden in a model's own attention.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from executor_svc.attention.interface import AttentionMetadata, LayerCache
from executor_svc.attention.torch_backend import TorchAttentionBackend
from executor_svc.models.language_model import LanguageModel
from executor_svc.models.transformers_attention import PAGED_ATTENTION
from executor_svc.models.transformers_config import refusal
from executor_svc.models.transformers_probe import NUM_PROBE_TOKENS, probe_tokens

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
    shape = (block_tables.size, BLOCK_SIZE_TOKENS, paged.shape.num_kv_heads, paged.shape.head_dim)
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
