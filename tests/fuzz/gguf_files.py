"""GGUF files: their headers, and all that is read of them before a weight is loaded."""

import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as FileType
from safetensors.numpy import save_file

from executor_svc.checkpoint.gguf.model import GGUFModel
from executor_svc.config import ExecutorConfig
from executor_svc.models.file_formats import FileFormats
from executor_svc.models.memory_needs import summarize_model
from executor_svc.models.selection import read_model_config
from octavo_shared.errors import ModelLoadError
from tests.fuzz.target import Case, Target, flipped
from tests.support.gguf_files import of_type, write_gguf_of
from tests.support.tokenizers import byte_level_alphabet

NUMBERS = (
    0,
    1,
    2,
    7,
    8,
    9,
    12,
    13,
    31,
    33,
    255,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)

_SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
_WORDS = ["he", "\u0120he", "<s>", "</s>"]
_TOKENIZERS: Sequence[dict[str, Any]] = (
    {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": byte_level_alphabet() + _WORDS,
        "tokenizer.ggml.merges": ["h e", "\u0120 he"],
        "tokenizer.ggml.token_type": [1] * 258 + [3] * 2,
        "tokenizer.ggml.bos_token_id": 258,
        "tokenizer.ggml.eos_token_id": 259,
        "tokenizer.chat_template": "{{ messages }}",
        "general.sampling.temp": 0.5,
    },
    {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"],
        "tokenizer.ggml.scores": [0.0] * 260,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1],
        "tokenizer.ggml.bos_token_id": 1,
    },
)


class GGUFFiles(Target):
    """The executor's reading of a GGUF file. A case is the file."""

    name = "gguf-files"
    allowed = (ModelLoadError,)

    def corpus(self) -> Sequence[Case]:
        """Return files of several architectures, with two tensors and a tokenizer."""
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name)
        weights = {
            "model.embed_tokens.weight": np.ones((260, 32), np.float32),
            "model.norm.weight": np.ones(32, np.float32),
        }
        save_file(weights, self._path / "model.safetensors")
        families: dict[str, dict[str, Any]] = {
            "Llama": {},
            "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
            "Gemma3": {"sliding_window": 8},
            "Phi3": {"sliding_window": 8},
        }
        cases = []
        for index, (name, own) in enumerate(families.items()):
            config = {**_SIZES, **own, "architectures": [f"{name}ForCausalLM"]}
            (self._path / "config.json").write_text(json.dumps(config), encoding="utf-8")
            kind = (FileType.Q8_0, FileType.Q4_0, FileType.F16)[index % 3]
            file = self._path / "made.gguf"
            write_gguf_of(self._path, file, of_type(kind), changes=_TOKENIZERS[index % 2])
            cases.append((file.read_bytes(),))
        return cases

    def change(self, case: Case, chance: random.Random) -> Case:
        """Return a file with another number or byte in its header, or that is cut off."""
        (content,) = case
        header = content.index(b"output_norm.weight") + 60
        action = chance.random()
        if action < 0.1:
            return (content[: chance.randrange(len(content))],)
        if action < 0.5:
            size = chance.choice([1, 4, 8])
            place = chance.randrange(header - size)
            number = (chance.choice(NUMBERS) % 2 ** (8 * size)).to_bytes(size, "little")
            return (content[:place] + number + content[place + size :],)
        return (flipped(content[:header], chance) + content[header:],)

    def one(self, case: Case) -> None:
        """Read all that is read before the weights are loaded, and hash the weights."""
        path = self._path / "case.gguf"
        path.write_bytes(case[0])
        model = GGUFModel(path)
        model.sampling_defaults()
        model.eos_token_ids()
        model.tokenizer_files()
        read_model_config(model, ExecutorConfig(model=str(path)))
        checkpoint = model.checkpoint()
        FileFormats(checkpoint)
        summarize_model(path)
        checkpoint.model_hash()
        with checkpoint.digest() as digest:
            digest.result()

    def close(self) -> None:
        """Remove the files."""
        self._folder.cleanup()
