"""Gemma 3 as Ollama's own converter wrote it, in the terms of llama.cpp's converter, which all else here reads.

Such a file has the vision tower beside the text model, leaves out what all models of the family have in common and the
chat template, calls the rotary bases otherwise, and has more tokens than the embedding has rows. Source: how Ollama
brings these files up to date, https://github.com/ollama/ollama/tree/main/llama/compat.
"""

import hashlib
from collections.abc import Mapping

import numpy as np

from executor_svc.checkpoint.gguf.header import GGUFTensor
from executor_svc.checkpoint.gguf.metadata import Metadata

_ARCHITECTURE = "gemma3"
_OF_VISION = ("v.", "mm.")
_NORM, _GLOBAL, _LOCAL = "attention.layer_norm_rms_epsilon", "rope.global.freq_base", "rope.local.freq_base"
_OF_TOKENS = tuple(f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type"))
# From this length on models were trained on shorter texts, and stretch their positions.
_STRETCHED_FROM, _STRETCH = 131_072, 8.0
# The words of the system come before the first ones of the user.
_TEMPLATE = (
    "{{ bos_token }}"
    "{% set system = messages[0]['content'] | trim + '\n\n' if messages[0]['role'] == 'system' else '' %}"
    "{% for message in (messages[1:] if system else messages) %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    "{{ (system if loop.first else '') + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


def in_common_terms(metadata: Metadata, tensors: Mapping[str, GGUFTensor]) -> tuple[Metadata, Mapping[str, GGUFTensor]]:
    """Return a file's values and tensors as llama.cpp's converter would have written them; without vision."""
    text = {name: tensor for name, tensor in tensors.items() if not name.startswith(_OF_VISION)}
    is_ollamas = len(text) < len(tensors) or not metadata.has(_NORM) or metadata.has(_GLOBAL) or metadata.has(_LOCAL)
    if metadata.architecture != _ARCHITECTURE or not is_ollamas:
        return metadata, tensors
    found: dict[str, object] = {
        _NORM: 1e-6,
        "rope.freq_base": metadata.number(_GLOBAL, 1e6),
        "rope.freq_base_swa": metadata.number(_LOCAL, 1e4),
    }
    if metadata.integer("context_length", 0) >= _STRETCHED_FROM:
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": _STRETCH}
    values = {metadata.key(key): value for key, value in found.items()}
    values |= {"tokenizer.chat_template": _TEMPLATE, **metadata.values}
    elsewhere = tuple(metadata.key(key) for key in ("vision.", "mm.", _GLOBAL, _LOCAL))
    values = {key: value for key, value in values.items() if not key.startswith(elsewhere)}
    digest = metadata.tokenizer_digest
    if (embedding := text.get("token_embd.weight")) is not None:
        num_rows = embedding.shape[0]
        lists = {key: value for key in _OF_TOKENS if isinstance(value := values.get(key), list | np.ndarray)}
        values |= {key: value[:num_rows] for key, value in lists.items()}
        digest = hashlib.sha256(b"%d rows of " % num_rows + digest).digest()
    return Metadata(metadata.path, values, digest), text
