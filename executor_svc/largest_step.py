"""The step that needs the most memory: what it takes is known before the rest is given to the KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from executor_svc.attention import AttentionBackend, AttentionMetadata
from executor_svc.cache_engine import CacheEngine, CacheShape
from executor_svc.models.language_model import LanguageModel

if TYPE_CHECKING:  # its rules need pydantic, which a machine that only measures may lack
    from executor_svc.config import ExecutorConfig


def largest_step(
    model: LanguageModel, backend: AttentionBackend, config: ExecutorConfig, shape: CacheShape
) -> torch.Tensor | None:
    """Run as many tokens as a step may have, in prompts as long as they can be, on a cache of their own.

    Returns:
        Logits of as many rows as a step may sample, [num_rows, vocab_size] float32, on rank 0; else None.
    """
    num_tokens = config.max_num_batched_tokens
    longest = min(num_tokens, model.shape.max_position_embeddings)
    lengths = np.array([longest] * (num_tokens // longest) + [num_tokens % longest], np.int32)
    lengths = lengths[lengths > 0]
    table_width = -(-longest // shape.block_size)
    engine = CacheEngine(shape, len(lengths) * table_width, 0, model.device)
    positions = np.concatenate([np.arange(length) for length in lengths])
    first_slots = np.repeat(np.arange(len(lengths)) * table_width * shape.block_size, lengths)
    metadata = AttentionMetadata(
        starts=np.zeros(len(lengths), np.int32),
        lengths=lengths,
        block_tables=np.arange(len(lengths) * table_width, dtype=np.int32).reshape(-1, table_width),
        slot_mapping=torch.from_numpy(first_slots + positions).to(model.device),
    )
    plan = backend.plan(metadata, engine.layers[0])
    token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=model.device)
    wanted = torch.arange(min(num_tokens, config.max_num_seqs), device=model.device)
    with torch.inference_mode():
        at = torch.from_numpy(positions).to(model.device)
        return model.logits(model.forward(token_ids, at, engine.layers, plan, wanted))
