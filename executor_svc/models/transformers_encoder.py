"""An encoder that runs through transformers' code, text by text: no text is padded, and none touches another.

For the architectures without code of ours, and for the others where the C library cannot run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from executor_svc.checkpoint.model_directory import read_json_object
from executor_svc.models.encoder import EncoderKind
from executor_svc.models.pooling import ScoreFunction, apply
from executor_svc.models.transformers_probe import from_pretrained
from octavo_shared.errors import ModelLoadError
from octavo_shared.step_wire.step import Float32Array, PoolingInput


class TransformersEncoder:
    """Runs a model of transformers; see `executor_svc.models.pooling.TextModel`.

    With a classification head, each row of its "hidden states" is the raw scores of the text.
    """

    def __init__(self, model: Any, *, has_types: bool, has_scores: bool) -> None:
        config = model.config
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.num_scores: int = config.num_labels if has_scores else 0
        self.num_token_types: int = (getattr(config, "type_vocab_size", 0) or 1) if has_types else 1
        self._model = model
        self._has_types = has_types

    @torch.inference_mode()
    def encode(self, texts: Sequence[PoolingInput]) -> Float32Array:
        """Return the hidden states of the tokens of some texts, one text after the other, [num_tokens, hidden_size]."""
        return np.concatenate([self._encode(text) for text in texts])

    def _encode(self, text: PoolingInput) -> Float32Array:
        token_ids = torch.from_numpy(text.token_ids.astype(np.int64))[None].to(self._model.device)
        inputs = {"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids)}
        if self._has_types and text.token_type_ids:
            types = np.frombuffer(text.token_type_ids, np.uint8).astype(np.int64)
            inputs["token_type_ids"] = torch.from_numpy(types)[None].to(self._model.device)
        output = self._model(**inputs)
        states = output.logits.expand(token_ids.shape[1], -1) if self.num_scores else output.last_hidden_state[0]
        hidden: Float32Array = states.float().cpu().numpy()
        return hidden


class GivenScores:
    """The head of a model that has made the scores itself."""

    def __init__(self, size: int, function: ScoreFunction) -> None:
        self.size = size
        self.function = function

    def __str__(self) -> str:
        return self.function

    def __call__(self, hidden: Float32Array) -> Float32Array:
        """Return the scores of a text."""
        return apply(self.function, hidden[0])


def max_positions(values: dict[str, object], kind: EncoderKind, source: Path) -> int:
    """Return the longest text of a config.json. Raises: ModelLoadError: it says none."""
    value = values.get("max_position_embeddings")
    if not isinstance(value, int) or value < 3:
        raise ModelLoadError(f"{source} has max_position_embeddings {value!r}; it must be a whole number of at least 3")
    padding_id = values.get("pad_token_id", 1)
    counts_padding = kind.family in ("Roberta", "XLMRoberta", "MPNet") and isinstance(padding_id, int)
    return value - int(padding_id) - 1 if counts_padding and isinstance(padding_id, int) else value


def load_transformers_encoder(
    directory: Path, kind: EncoderKind, dtype: torch.dtype, device: torch.device
) -> TransformersEncoder:
    """Load an encoder from a Hugging Face directory; nothing is downloaded, and no code of the directory is run.

    Raises: ModelLoadError: files are missing or damaged.
    """
    has_scores = kind.purpose == "scores"
    suffix = "ForSequenceClassification" if has_scores else "Model"
    model_class = getattr(transformers, kind.family + suffix)
    read_json_object(directory / "config.json")
    model, info = from_pretrained(model_class, directory, dtype)
    missing = sorted(name for name in info["missing_keys"] if "pooler." not in name or has_scores)
    if missing:
        raise ModelLoadError(
            f"{directory} does not contain a {model_class.__name__}: the tensor {missing[0]} is missing"
        )
    model.requires_grad_(False)
    model.eval().to(device)
    has_types = "token_type_ids" in model_class.forward.__code__.co_varnames
    return TransformersEncoder(model, has_types=has_types, has_scores=has_scores)
