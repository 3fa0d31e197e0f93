"""`LLM` with a tiny BERT: vectors and scores are those that transformers computes, prompts and pairs included."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from octavo import LLM
from octavo.errors import InvalidRequestError

LETTERS = "abcdefghijklmnopqrstuvwxyz:"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
MODULES = ("Transformer", "Pooling", "Normalize")


def wordpiece() -> tokenizers.Tokenizer:
    model = tokenizers.models.WordPiece({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


def save(directory: Path, architecture: str, **settings: object) -> Any:
    """Write a model with its tokenizer and the files of sentence-transformers, and return it."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=64,
        **settings,
    )
    model = getattr(transformers, architecture)(config).eval()
    model.save_pretrained(directory)
    wordpiece().save(str(directory / "tokenizer.json"))
    (directory / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "query: "}}))
    return model


def test_a_decoder_without_a_head_embeds_and_generates_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=80,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen3Model(config).eval()
    model.save_pretrained(tmp_path)
    wordpiece().save(str(tmp_path / "tokenizer.json"))
    with LLM(tmp_path, pooling="last", progress=False) as llm:
        vector = np.array(llm.embed(["hello there"], progress=False).embeddings[0])
        with pytest.raises(InvalidRequestError, match="one that can generate; this one answers Embed"):
            llm.generate("a", progress=False)
    with torch.no_grad():
        states = model(torch.tensor([wordpiece().encode("hello there").ids])).last_hidden_state
    np.testing.assert_allclose(vector, torch.nn.functional.normalize(states[0, -1], dim=0), atol=1e-5)


def test_vectors_and_scores_are_those_of_transformers(tmp_path: Path) -> None:
    texts = ["hello there", "abcd " * 3]
    embedder = save(tmp_path / "embedder", "BertModel", matryoshka_dimensions=[16])
    modules = [
        {"idx": index, "path": f"{index}_{kind}" if index else "", "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(MODULES)
    ]
    (tmp_path / "embedder" / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "embedder" / "1_Pooling").mkdir()
    (tmp_path / "embedder" / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    with LLM(tmp_path / "embedder", progress=False) as llm:
        found = np.array(llm.embed(texts, prompt_name="query", progress=False).embeddings)
        short = np.array(llm.embed(texts, prompt_name="query", dimensions=16, progress=False).embeddings)
        with pytest.raises(InvalidRequestError, match="maximum context length is 64 tokens"):
            llm.embed("a " * 100, progress=False)
        with pytest.raises(InvalidRequestError, match="one that can generate; this one answers Embed"):
            llm.generate("a", progress=False)
    for text, vector, cut in zip(texts, found, short, strict=True):
        with torch.no_grad():
            states = embedder(torch.tensor([wordpiece().encode(f"query: {text}").ids])).last_hidden_state
        wanted = torch.nn.functional.normalize(states.mean(1))[0]
        np.testing.assert_allclose(vector, wanted, atol=1e-5)
        np.testing.assert_allclose(cut, torch.nn.functional.normalize(wanted[None, :16])[0], atol=1e-5)

    ranker = save(tmp_path / "ranker", "BertForSequenceClassification", num_labels=1)
    with LLM(tmp_path / "ranker", progress=False) as llm:
        scores = llm.score("query", texts, progress=False).scores
    for text, score in zip(texts, scores, strict=True):
        pair = wordpiece().encode("query", text)
        with torch.no_grad():
            logits = ranker(torch.tensor([pair.ids]), token_type_ids=torch.tensor([pair.type_ids])).logits
        assert score == pytest.approx(torch.sigmoid(logits).item(), abs=1e-5)
