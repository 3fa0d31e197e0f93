"""Whether a token's logits depend on what else is computed, with `--numerics invariant` and without, and what it costs.

One sequence is computed again and again: at once, in chunks, token by token, among others that decode or compute
chunks. Every logit of every position is compared with the first time's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from benchmarks.gpu.engine import InProcessEngine
from benchmarks.gpu.measurements import prompt_of, worker_of
from benchmarks.gpu.models import RandomWeights
from benchmarks.gpu.part import Figure
from benchmarks.gpu.sizes import Sizes, free_memory
from executor_svc.attention.interface import AttentionBackend, AttentionMetadata, LayerCache
from executor_svc.checkpoint.weights import Checkpoint
from executor_svc.models.decoder import Decoder
from executor_svc.models.families import parse_config

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the tokens of our sequence come to be computed."""

    name: str
    chunks: Sequence[int]  # tokens of each step
    num_others: int = 0  # sequences that share each step: every fifth with a chunk, the others with one token


def schedules_of(num_tokens: int, batch_sizes: Sequence[int]) -> Sequence[Schedule]:
    """Return the ways to compute a sequence, the one to compare with first."""
    decodes = min(40, num_tokens // 2)
    in_chunks = _chunks(num_tokens - decodes, 64) + [1] * decodes
    return [
        Schedule("at once", [num_tokens]),
        Schedule("chunks of 7", _chunks(num_tokens, 7)),
        Schedule("chunks of 64, then decodes", in_chunks),
        *(Schedule(f"the same in batches of {size}", in_chunks, size - 1) for size in batch_sizes if size > 1),
    ]


def _chunks(num_tokens: int, size: int) -> list[int]:
    rest = num_tokens % size
    return [size] * (num_tokens // size) + ([rest] if rest else [])


def invariance_figures(sizes: Sizes, device: torch.device) -> Iterator[Figure]:
    """Compare bits. Raises: AssertionError: bits differ that must not, on a device."""
    schedules = schedules_of(sizes.invariant_tokens, sizes.invariant_batch_sizes)
    num_wrong = 0
    for numerics in ("invariant", "fast"):
        reference: torch.Tensor | None = None
        for schedule in schedules:
            logits = logits_of(sizes.small_model, sizes, device, schedule, is_invariant=numerics == "invariant")
            if reference is None:
                reference = logits
                continue
            num_other = int((logits != reference).any(-1).sum())
            num_wrong += num_other if numerics == "invariant" else 0
            yield Figure(
                f"positions with other logits, {numerics}, {schedule.name}",
                100 * num_other / len(logits),
                "%",
                target=0.0 if numerics == "invariant" else None,
                at_most=True,
                detail=f"{num_other} of {len(logits)}, of {sizes.small_model['vocab_size']:,} logits each",
            )
            free_memory(device)
    # The interpreter multiplies by BLAS, with sums that depend on where in a tile a row lies.
    assert device.type != "cuda" or not num_wrong, f"{num_wrong} positions have other logits with numerics invariant"


def invariance_cost_figures(sizes: Sizes, device: torch.device) -> Iterator[Figure]:
    """Time steps of the large model with both numerics: decodes of several batches, and one chunk."""
    num_new_tokens = min(32, sizes.num_new_tokens)
    longest = min(sizes.max_num_batched_tokens, sizes.large_model["max_position_embeddings"] - 2)
    work = {
        f"decode step, {size} sequences": [prompt_of(sizes.prompt_tokens, num_new_tokens)] * size
        for size in sizes.invariant_batch_sizes
    }
    work[f"step of {longest:,} prompt tokens"] = [prompt_of(longest, 1)]
    step_ms: dict[str, dict[str, float]] = {name: {} for name in work}
    for numerics in ("fast", "invariant"):
        # On a CPU there is nothing to compare: a rehearsal runs the same twice.
        wanted = numerics if device.type == "cuda" else "fast"
        worker = worker_of(sizes.large_model, sizes, device, max(sizes.invariant_batch_sizes), numerics=wanted)
        for name, prompts in work.items():
            run = InProcessEngine(worker).generate(prompts)
            worker.reset()
            # The last steps have decodes only. The chunk is alone, but for a last step that has nothing to compute.
            step_s = run.step_s[-num_new_tokens // 2 :] if len(prompts[0].token_ids) < longest else run.device_s
            step_ms[name][numerics] = 1e3 * float(np.median(step_s))
        del worker
        free_memory(device)
    for name, ms in step_ms.items():
        detail = ", ".join(f"{numerics} {value:.3g} ms" for numerics, value in ms.items())
        target = 1.3 if "prompt" in name else None
        share = ms["invariant"] / ms["fast"]
        yield Figure(f"{name}, invariant beside fast", share, "×", target, at_most=True, detail=detail)


@torch.inference_mode()
def logits_of(
    model: Mapping[str, Any], sizes: Sizes, device: torch.device, schedule: Schedule, *, is_invariant: bool
) -> torch.Tensor:
    """Return the logits of all positions of our sequence, [num_tokens, vocab_size]."""
    from executor_svc.models.triton_dense import TritonDense

    config = parse_config(dict(model), Path("config.json"))
    decoder = Decoder(config, TritonDense(sizes.dtype, device, is_invariant=is_invariant))
    decoder.load(cast("Checkpoint", RandomWeights(device)))
    backend = _attention(device, is_invariant=is_invariant)
    num_rows, num_tokens = 1 + schedule.num_others, sum(schedule.chunks)
    num_blocks = -(-(num_tokens + 16) // BLOCK_SIZE)
    tables = np.arange(num_rows * num_blocks, dtype=np.int32).reshape(num_blocks, num_rows).T.copy()
    shape = (num_rows * num_blocks, BLOCK_SIZE, config.layers[0].num_kv_heads, config.layers[0].head_dim)
    caches = [LayerCache(*(torch.zeros(shape, dtype=sizes.dtype, device=device) for _ in "kv")) for _ in config.layers]
    ours, found, start = num_rows // 2, [], 0
    for step, count in enumerate(schedule.chunks):
        others = np.arange(num_rows)
        starts = ((others * 37 + step) % num_tokens).astype(np.int32)
        lengths = np.where(others % 5 == 0, 11, 1).astype(np.int32)
        starts[ours], lengths[ours] = start, count
        rows = np.repeat(others, lengths)
        positions = np.concatenate([np.arange(length) for length in lengths]) + starts[rows]
        slots = tables[rows, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        plan = backend.plan(AttentionMetadata(starts, lengths, tables, torch.from_numpy(slots).to(device)), caches[0])
        token_ids = torch.from_numpy((positions * 31 + rows * (rows != ours) * 7) % config.vocab_size).to(device)
        wanted = torch.from_numpy(np.flatnonzero(rows == ours)).to(device)
        hidden = decoder.forward(token_ids, torch.from_numpy(positions).to(device), caches, plan, wanted)
        logits = decoder.logits(hidden)
        assert logits is not None, "one rank has them all"
        found.append(logits)
        start += count
    return torch.cat(found)


def _attention(device: torch.device, *, is_invariant: bool) -> AttentionBackend:
    """Return our attention in Triton; the interpreter has no multiprocessors to count."""
    from executor_svc.attention.invariant_triton_backend import InvariantAttentionBackend
    from executor_svc.attention.triton_backend import TritonAttentionBackend

    make = InvariantAttentionBackend if is_invariant else TritonAttentionBackend
    return make(None if device.type == "cuda" else 4)
