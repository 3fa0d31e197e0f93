"""BART, mBART and Marian equal transformers on the paged cache; inputs of an encoder have blocks of their own."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_svc.config import ExecutorConfig
from executor_svc.models.encoder_decoder import EncoderDecoder
from executor_svc.worker.interface import Worker, execute
from executor_svc.worker.loading import load_worker
from octavo_shared.errors import ModelLoadError
from octavo_shared.step_wire.cache_group import CacheKind
from octavo_shared.step_wire.step import (
    Admission,
    EncoderInput,
    SamplingRow,
    Step,
    TableDelta,
    pairs,
)
from tests.numerics.architectures import load_architecture, save_tiny_architecture
from tests.numerics.encoder_decoders import (
    FAMILIES,
    MAX_LOGIT_DIFFERENCE,
    Run,
    compare_on_the_cache,
    load,
    random_texts,
    reference_logits,
)
from tests.numerics.threaded_group import ThreadedRanks


@pytest.mark.parametrize(("name", "kernels"), [*product(FAMILIES, ("native", "torch"))])
@torch.inference_mode()
def test_logits_equal_transformers(name: str, kernels: str, tmp_path: Path) -> None:
    model, backend, reference = load(tmp_path, name, cpu_kernels=kernels)

    for block_size, lengths in product((8, 16), ((1, 33), (16, 7), (8, 64))):
        texts, outputs = random_texts(lengths), random_texts((11, 5))
        actual = Run(model, backend, block_size).logits(texts, outputs, chunk=4)

        for text, output, logits in zip(texts, outputs, actual, strict=True):
            expected = reference_logits(reference, text, output)
            assert float((logits - expected).abs().max() / expected.abs().max()) < MAX_LOGIT_DIFFERENCE


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sequence_has_the_same_bits_alone_and_among_others(name: str, tmp_path: Path) -> None:
    model, backend, _ = load(tmp_path, name)
    texts, outputs = random_texts((33, 8, 21)), random_texts((11, 5, 17))

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
    assert worker.info.max_encoder_tokens == FAMILIES[name].get("max_position_embeddings", 2048)
    texts, prompt, most = random_texts((19, 33)), np.array([2, 7, 11], np.int32), 12
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

    for settings, words in (
        ({"device": "cuda"}, "device is cuda"),
        ({"pooling": "last"}, "pooling is last, but .* has an encoder and a decoder: it generates on a CPU, without"),
        ({"max_model_len": 65}, "max_model_len is 65; .* allows 1 to 64"),
    ):
        with pytest.raises(ModelLoadError, match=words):
            load_worker(ExecutorConfig.model_validate({"model": str(tmp_path), "num_device_blocks": 9, **settings}))


@torch.inference_mode()
def test_a_checkpoint_may_lack_the_bias_of_the_logits(tmp_path: Path) -> None:
    _, _, reference = load(tmp_path, "BartForConditionalGeneration")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["final_logits_bias"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    reference.final_logits_bias.zero_()
    model, backend = load_architecture(tmp_path)
    assert isinstance(model, EncoderDecoder)

    assert compare_on_the_cache(model, backend, reference).logit_difference < MAX_LOGIT_DIFFERENCE


@torch.inference_mode()
def test_without_positions_texts_may_be_longer_than_those_it_was_trained_on(tmp_path: Path) -> None:
    model, backend, reference = load(tmp_path, "T5ForConditionalGeneration")
    settings = {"model": str(tmp_path), "num_device_blocks": 99, "max_model_len": 600, "max_num_batched_tokens": 700}
    info = load_worker(ExecutorConfig.model_validate(settings)).info
    assert (info.max_model_len, info.max_encoder_tokens) == (600, 700)
    text, output = random_texts((560, 520))

    (logits,) = Run(model, backend, 32).logits([text], [output], chunk=600)

    expected = reference_logits(reference, text, output)
    assert float((logits - expected).abs().max() / expected.abs().max()) < MAX_LOGIT_DIFFERENCE


@pytest.mark.parametrize("name", ["MBartForConditionalGeneration", "T5ForConditionalGeneration"])
def test_what_its_files_say_wrongly_is_refused_by_name(name: str, tmp_path: Path, capsys: Any) -> None:
    load(tmp_path, name)
    config = ExecutorConfig.model_validate({"model": str(tmp_path), "num_device_blocks": 9})
    given = tmp_path / "generation_config.json"
    for asked, words in (
        (
            {"decoder_start_token_id": 99},
            "has the token 99 in decoder_start_token_id or forced_bos_token_id; its tokens",
        ),
        ({"forced_bos_token_id": -1}, "has the token -1 in decoder_start_token_id or forced_bos_token_id; its tokens"),
        ({"bad_words_ids": [[3], [1, 2], [100]]}, "has the token 100 in bad_words_ids; its tokens are 0 to 98"),
        ({"bad_words_ids": [[token_id] for token_id in range(1030)]}, "bans 10[0-9]+ tokens in bad_words_ids, at most"),
        ({"bad_words_ids": [3]}, r"has bad_words_ids \[3\]; there must be lists of ids in a list"),
    ):
        given.write_text(json.dumps({"decoder_start_token_id": 0, **asked}))
        with pytest.raises(ModelLoadError, match=words):
            load_worker(config)
    given.write_text(json.dumps({"decoder_start_token_id": 0, "bad_words_ids": [[3, 4]], "num_beams": 1}))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    prefix = "" if name.startswith("T5") else "model."
    for factor in (1, 2):
        tensors[f"{prefix}encoder.embed_tokens.weight"] = factor * tensors[f"{prefix}shared.weight"]
        save_file(tensors, file, {"format": "pt"})
        if factor == 1:
            replaced = load_worker(config.model_copy(update={"weights_dir": (str(tmp_path),)}))
            told = "generation_config.json sets bad_words_ids of several tokens, which"
            assert told in capsys.readouterr().out
            ThreadedRanks(config.model_copy(update={"tp": 2}), 2).close()
            assert capsys.readouterr().out.count(told) == 1, "the first rank says it for all"
            continue
        with pytest.raises(ModelLoadError, match=r"has other values in (model\.)?encoder.embed_tokens.weight than in"):
            load_worker(config)
        with pytest.raises(ModelLoadError, match=r"has other values in (model\.)?encoder.embed_tokens.weight than in"):
            replaced.update_weights(tmp_path, "")
