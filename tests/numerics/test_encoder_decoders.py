"""BART, mBART and Marian equal transformers on the paged cache; inputs of an encoder have blocks of their own."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor_svc.attention.interface import AttentionBackend, AttentionMetadata, LayerCache
from executor_svc.config import ExecutorConfig
from executor_svc.models.encoder_decoder import EncodedInputs, EncoderDecoder
from executor_svc.worker.interface import Worker, execute
from executor_svc.worker.loading import load_worker
from octavo_shared.errors import ModelLoadError
from octavo_shared.step_wire.cache_group import CacheKind
from octavo_shared.step_wire.step import (
    Admission,
    EncoderInput,
    Int32Array,
    SamplingRow,
    Step,
    TableDelta,
    pairs,
)
from tests.numerics.architectures import load_architecture, save_tiny_architecture
from tests.numerics.threaded_group import ThreadedRanks

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
    "T5ForConditionalGeneration": T5_SIZES,
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


def _texts(lengths: Sequence[int]) -> list[Int32Array]:
    draw = np.random.default_rng(3)
    return [draw.integers(3, 98, length).astype(np.int32) for length in lengths]


def load(tmp_path: Path, name: str, **settings: Any) -> tuple[EncoderDecoder, AttentionBackend, Any]:
    architecture = "T5ForConditionalGeneration" if name == "Flan-T5" else name
    reference = save_tiny_architecture(tmp_path, architecture, FAMILIES[name])
    if name == "Flan-T5":
        reference.lm_head.weight = torch.nn.Parameter(torch.randn(99, 32))
    if architecture != "T5ForConditionalGeneration":
        reference.final_logits_bias.normal_(std=0.1)
    for module in reference.modules():
        if hasattr(module, "create_weight"):  # of Marian's positions, which are computed
            module.weight.copy_(module.create_weight())
    reference.save_pretrained(tmp_path)
    model, backend = load_architecture(tmp_path, **settings)
    assert isinstance(model, EncoderDecoder)
    return model, backend, reference


@pytest.mark.parametrize(("name", "kernels"), [*product(FAMILIES, ("native", "torch"))])
@torch.inference_mode()
def test_logits_equal_transformers(name: str, kernels: str, tmp_path: Path) -> None:
    model, backend, reference = load(tmp_path, name, cpu_kernels=kernels)

    for block_size, lengths in product((8, 16), ((1, 33), (16, 7), (8, 64))):
        texts, outputs = _texts(lengths), _texts((11, 5))
        actual = Run(model, backend, block_size).logits(texts, outputs, chunk=4)

        for text, output, logits in zip(texts, outputs, actual, strict=True):
            ids = (torch.from_numpy(each.astype(np.int64))[None] for each in (text, output))
            expected = reference(**dict(zip(("input_ids", "decoder_input_ids"), ids, strict=True))).logits[0]
            assert float((logits - expected).abs().max() / expected.abs().max()) < 2e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sequence_has_the_same_bits_alone_and_among_others(name: str, tmp_path: Path) -> None:
    model, backend, _ = load(tmp_path, name)
    texts, outputs = _texts((33, 8, 21)), _texts((11, 5, 17))

    together = Run(model, backend, 16).logits(texts, outputs, chunk=4)

    for text, output, logits in zip(texts, outputs, together, strict=True):
        (alone,) = Run(model, backend, 8).logits([text], [output], chunk=1)
        assert torch.equal(alone, logits)


@pytest.mark.parametrize(("name", "kernels"), [*product(FAMILIES, ("native", "torch", "two ranks"))])
@torch.inference_mode()
def test_steps_answer_with_the_greedy_tokens_of_transformers(
    name: str, kernels: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Two inputs, each computed once: the third sequence begins later, on the blocks of the first, with its bits."""
    _, _, reference = load(tmp_path, name)
    sizes = {"num_device_blocks": 20, "block_size_tokens": 8, "max_num_seqs": 5}
    if kernels == "two ranks":
        ranks = ThreadedRanks(ExecutorConfig.model_validate({"model": str(tmp_path), **sizes, "tp": 2}), 2)
        request.addfinalizer(ranks.close)
        worker: Worker = ranks
    else:
        worker = load_worker(ExecutorConfig.model_validate({"model": str(tmp_path), **sizes, "cpu_kernels": kernels}))
    own, encoders = worker.table.groups[0], worker.table.encoder
    assert encoders is not None
    assert [group.kind for group in worker.info.cache_groups] == [CacheKind.FULL, CacheKind.ENCODER]
    assert worker.info.max_encoder_tokens == FAMILIES[name].get("max_position_embeddings", 512)
    texts, prompt, most = _texts((19, 33)), np.array([2, 7, 11], np.int32), 12
    blocks = np.split(encoders.first_id + np.arange(8, dtype=np.int32), [3])
    num_own = -(-most // own.block_size)

    def admit(slot: int, text: int, *, is_computed: bool) -> Admission:
        given = EncoderInput(len(texts[text]), blocks[text], texts[text] if is_computed else None)
        sampling = SamplingRow(num_logprobs=0)
        own_blocks = np.arange(slot * num_own, (slot + 1) * num_own, dtype=np.int32)
        return Admission(slot, 1, prompt, len(prompt), 0, own_blocks, sampling, encoder_input=given)

    both = (admit(0, 0, is_computed=True), admit(1, 1, is_computed=True))
    later = (admit(2, 0, is_computed=False),)
    deltas = [
        TableDelta(admissions=both, prefill_chunks=pairs((0, 2), (1, 3))),
        TableDelta(prefill_chunks=pairs((0, 1))),
        TableDelta(admissions=later, prefill_chunks=pairs((2, 3))),
        *[TableDelta()] * 6,
    ]
    logprobs: list[float] = []
    for step_id, delta in enumerate(deltas, 1):
        answer = execute(worker, Step(1, step_id, delta))
        logprobs += [] if answer.logprobs is None else answer.logprobs.tolist()

    for slot, text in enumerate((0, 1, 0)):
        tokens = worker.table.token_ids[slot, : worker.table.num_tokens[slot]].astype(np.int64)
        assert len(tokens) >= len(prompt) + 6
        ids = torch.from_numpy(texts[text].astype(np.int64))[None]
        logits = reference(input_ids=ids, decoder_input_ids=torch.from_numpy(tokens)[None, :-1]).logits[0]
        assert tokens[len(prompt) :].tolist() == logits.argmax(-1)[len(prompt) - 1 :].tolist()
    # All 7 of the third sequence are those of the first; torch's products depend on the number of rows.
    assert (len(logprobs), len(set(logprobs))) == (24, 17) or kernels == "torch"


def test_what_an_encoder_decoder_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    save_tiny_architecture(tmp_path, "MarianMTModel", FAMILIES["MarianMTModel"])

    with pytest.raises(ModelLoadError, match="device is cuda"):
        load_worker(ExecutorConfig.model_validate({"model": str(tmp_path), "num_device_blocks": 9, "device": "cuda"}))
