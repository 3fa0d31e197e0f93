"""Small models of several families, trained here: trained weights have outliers, which random ones have not.

Each has about 5 million parameters and learns from the texts of `quality_texts.py`, with a tokenizer made of them. It
takes about ten minutes on two cores, once: a model is kept in the user's cache. Delete its directory to train it anew.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.quality_texts import library_text, training_text
from octavo.models.store import default_cache_dir

_VOCAB_SIZE = 4096
_TOKENIZER_CHARACTERS = 2_000_000
_BATCH_SIZE, _WINDOW_TOKENS, _NUM_STEPS = 8, 256, 400
_LEARNING_RATE = 2e-3
_NUM_REPORTS = 10

_SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": _VOCAB_SIZE,
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
)
# By family: what it has that the demo model has not is behind it.
SMALL_MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen3": {"num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 768},  # norms of heads
        "opt": {"ffn_dim": 1024, "word_embed_proj_dim": 256, "dropout": 0.0},  # LayerNorm, biases, ReLU
    }
)


def trained_model(family: str) -> Path:
    """Return the directory of a model; train it first if the cache does not have it."""
    directory = default_cache_dir() / "benchmarks" / f"small-{family}"
    if not directory.is_dir():
        partial = directory.with_name(f".{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _train(family, partial)
        partial.rename(directory)
    return directory


def _train(family: str, directory: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM  # seconds, which a trained model need not wait

    texts = (training_text(), library_text())
    tokenizer = _make_tokenizer([texts[0], texts[1][:_TOKENIZER_CHARACTERS]])
    tokenizer.save(str(directory / "tokenizer.json"))
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**_SIZES, **SMALL_MODELS[family]}))
    _learn(model, [np.array(tokenizer.encode(text).ids, np.int64) for text in texts], family)
    model.save_pretrained(directory)


def _make_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Return a tokenizer of bytes and pairs of them, as GPT-2 has one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _learn(model: Any, texts: Sequence[np.ndarray[Any, np.dtype[np.int64]]], family: str) -> None:
    """Train on windows at random places, half of them of each text."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, total_steps=_NUM_STEPS, pct_start=0.1)
    places = np.random.default_rng(1)
    for step in range(_NUM_STEPS):
        windows = []
        for row in range(_BATCH_SIZE):
            text = texts[row % len(texts)]
            begin = places.integers(len(text) - _WINDOW_TOKENS)
            windows.append(text[begin : begin + _WINDOW_TOKENS])
        token_ids = torch.from_numpy(np.stack(windows))
        loss = model(input_ids=token_ids, labels=token_ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % (_NUM_STEPS // _NUM_REPORTS) == 0:
            print(f"small-{family}: step {step + 1} of {_NUM_STEPS}, loss {loss.item():.3f}", flush=True)
