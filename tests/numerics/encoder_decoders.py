"""Models with an encoder as tiny random models, run on the paged cache: for tests and `benchmarks/architectures.py`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from executor_svc.attention.interface import AttentionBackend, AttentionMetadata, LayerCache
from executor_svc.models.encoder_decoder import EncodedInputs, EncoderDecoder
from octavo_shared.step_wire.step import Int32Array
from tests.numerics.architectures import Comparison, load_architecture, save_tiny_architecture

SIZES = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
}
T5_SIZES = {
    "vocab_size": 99,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_max_distance": 40,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "BartForConditionalGeneration": {**SIZES, "activation_function": "gelu"},
    "MBartForConditionalGeneration": {**SIZES, "activation_function": "relu", "scale_embedding": True},
    "MarianMTModel": {
        **SIZES,
        "decoder_vocab_size": 99,
        "activation_function": "swish",
        "scale_embedding": True,
        "pad_token_id": 98,
        "decoder_start_token_id": 98,
    },
    "PegasusForConditionalGeneration": {**SIZES, "scale_embedding": True, "activation_function": "relu"},
    "T5ForConditionalGeneration": T5_SIZES,
    "MT5ForConditionalGeneration": {**T5_SIZES, "feed_forward_proj": "gated-gelu"},
    "Flan-T5": {
        **T5_SIZES,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "num_decoder_layers": 3,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 20,
    },
}
NUM_BLOCKS = 40
NUM_GREEDY_TOKENS = 6

# Of a logit, as a part of the largest one: T5 does not scale its scores, and of Flan-T5 as it is here transformers' own
# float32 is 8e-6 away from its float64.
MAX_LOGIT_DIFFERENCE = 2e-5


class Run:
    """Sequences of an encoder–decoder on caches that are NaN where nobody has written, in scrambled blocks."""

    def __init__(self, model: EncoderDecoder, backend: AttentionBackend, block_size: int) -> None:
        self._model, self._backend, self._block_size = model, backend, block_size
        self._free = np.random.default_rng(0).permutation(NUM_BLOCKS).astype(np.int32).tolist()
        shapes = [(NUM_BLOCKS, block_size, each.num_kv_heads, each.head_dim) for each in model.shape.caches]
        self._caches = [LayerCache(torch.full(each, torch.nan), torch.full(each, torch.nan)) for each in shapes]

    def logits(self, texts: Sequence[Int32Array], outputs: Sequence[Int32Array], chunk: int) -> list[torch.Tensor]:
        """Encode texts together, then run outputs in chunks; return their logits, each [num_tokens, vocab_size]."""
        lengths = np.array([len(text) for text in texts], np.int32)
        encoded = EncodedInputs(lengths, self._tables(lengths), self._block_size)
        self._model.encode(texts, encoded, self._caches, self._backend)
        tables = self._tables(np.array([len(output) for output in outputs]))
        found: list[list[torch.Tensor]] = [[] for _ in texts]
        for start in range(0, max(map(len, outputs)), chunk):
            rows = np.array([row for row, output in enumerate(outputs) if len(output) > start])
            parts = [outputs[row][start : start + chunk] for row in rows]
            for row, logits in zip(rows, self._step(parts, start, tables[rows], _of(encoded, rows)), strict=True):
                found[row].append(logits)
        return [torch.cat(each) for each in found]

    def _tables(self, lengths: Int32Array) -> Int32Array:
        num_blocks = -(-lengths // self._block_size)
        tables = np.full((len(lengths), num_blocks.max()), -1, np.int32)
        for table, count in zip(tables, num_blocks, strict=True):
            table[:count] = [self._free.pop() for _ in range(count)]
        return tables

    @torch.inference_mode()
    def _step(
        self, parts: Sequence[Int32Array], start: int, tables: Int32Array, encoded: EncodedInputs
    ) -> Sequence[torch.Tensor]:
        lengths = np.array([len(part) for part in parts], np.int32)
        rows = np.repeat(np.arange(len(parts), dtype=np.int32), lengths)
        positions = np.concatenate([np.arange(start, start + len(part)) for part in parts])
        slots = EncodedInputs(lengths, tables, self._block_size).slots_of(rows, positions)
        starts = np.full(len(parts), start, np.int32)
        metadata = AttentionMetadata(starts, lengths, np.maximum(tables, 0), torch.from_numpy(slots))
        hidden = self._model.forward(
            torch.from_numpy(np.concatenate(parts).astype(np.int64)),
            torch.from_numpy(positions),
            self._caches,
            self._backend.plan(metadata, self._caches[0]),
            torch.arange(len(positions)),
            encoded=self._backend.plan(encoded.seen_by(lengths, self._model.device), self._caches[1]),
        )
        logits = self._model.logits(hidden)
        assert logits is not None
        return torch.split(logits, lengths.tolist())


def _of(encoded: EncodedInputs, rows: Int32Array) -> EncodedInputs:
    return EncodedInputs(encoded.lengths[rows], np.maximum(encoded.block_tables[rows], 0), encoded.block_size)


def random_texts(lengths: Sequence[int]) -> list[Int32Array]:
    draw = np.random.default_rng(3)
    return [draw.integers(3, 98, length).astype(np.int32) for length in lengths]


def load(tmp_path: Path, name: str, **settings: Any) -> tuple[EncoderDecoder, AttentionBackend, Any]:
    architecture = "T5ForConditionalGeneration" if name == "Flan-T5" else name
    reference = save_tiny_architecture(tmp_path, architecture, FAMILIES[name])
    generator = torch.Generator().manual_seed(7)
    if name == "Flan-T5":
        reference.lm_head.weight = torch.nn.Parameter(torch.randn(99, 32, generator=generator))
    if hasattr(reference, "final_logits_bias"):
        reference.final_logits_bias.normal_(std=0.1, generator=generator)
    for module in reference.modules():
        if hasattr(module, "create_weight"):  # of Marian's positions, which are computed
            module.weight.copy_(module.create_weight())
    reference.save_pretrained(tmp_path)
    model, backend = load_architecture(tmp_path, **settings)
    assert isinstance(model, EncoderDecoder)
    return model, backend, reference


@torch.inference_mode()
def compare_on_the_cache(model: EncoderDecoder, backend: AttentionBackend, reference: Any) -> Comparison:
    """Compare logits behind inputs that are encoded together, and greedy outputs."""
    texts, outputs = random_texts((33, 8, 21)), random_texts((11, 5, 17))
    actual = Run(model, backend, 8).logits(texts, outputs, chunk=4)
    differences, distances = [], []
    for text, output, logits in zip(texts, outputs, actual, strict=True):
        expected = reference_logits(reference, text, output)
        differences.append(float((logits - expected).abs().max() / expected.abs().max()))
    for _ in range(NUM_GREEDY_TOKENS):
        chosen = [each[-1].argmax() for each in Run(model, backend, 8).logits(texts, outputs, chunk=99)]
        for text, output, token in zip(texts, outputs, chosen, strict=True):
            scores = reference_logits(reference, text, output)[-1]
            distances.append(float(scores.max() - scores[token]))
        outputs = [np.append(output, np.int32(token)) for output, token in zip(outputs, chosen, strict=True)]
    return Comparison(max(differences), max(distances))


def reference_logits(reference: Any, text: Int32Array, output: Int32Array) -> torch.Tensor:
    ids, given = (torch.from_numpy(each.astype(np.int64))[None] for each in (text, output))
    logits: torch.Tensor = reference(input_ids=ids, decoder_input_ids=given).logits[0]
    return logits
