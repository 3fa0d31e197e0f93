"""A head that drafts, as a model of one layer of transformers, beside the model that it drafts for.

Source: what Qwen3-Next's and Qwen3.5's `mtp` modules compute: hidden states are normed by the model first.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.numerics.architectures import save_tiny_architecture


@dataclass(frozen=True)
class MtpReference:
    model: Any
    head: Any  # a model of the same family, with one layer that attends
    weights: Mapping[str, torch.Tensor]  # of what joins embeddings and hidden states

    @classmethod
    def save(cls, directory: Path, name: str, settings: Mapping[str, object]) -> "MtpReference":
        """Save a random model of an architecture with a head."""
        model = save_tiny_architecture(directory, name, settings)
        own = {**settings, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
        with tempfile.TemporaryDirectory() as folder:
            head = save_tiny_architecture(Path(folder), name, own)
            stored = load_file(Path(folder) / "model.safetensors")
        size, generator = model.config.hidden_size, torch.Generator().manual_seed(8)
        weights = {
            "mtp.fc.weight": torch.randn(size, 2 * size, generator=generator) * 0.2,
            "mtp.pre_fc_norm_embedding.weight": torch.randn(size, generator=generator) * 0.2,
            "mtp.pre_fc_norm_hidden.weight": torch.randn(size, generator=generator) * 0.2,
        }
        kept = {name: each for name, each in stored.items() if name.startswith(("model.layers.", "model.norm."))}
        path = directory / "model.safetensors"
        of_head = {f"mtp.{name.removeprefix('model.')}": each for name, each in kept.items()}
        save_file(load_file(path) | of_head | weights, path, metadata={"format": "pt"})
        return cls(model, head, weights)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], drafts: Sequence[int]) -> torch.Tensor:
        """Return the logits of the draft behind a sequence, 2 tokens or more, and behind its drafts, [vocab_size]."""
        hidden = self.model.model(torch.tensor([token_ids[:-1]])).last_hidden_state[0]
        tokens = [*token_ids[1:]]
        for draft in (*drafts, None):
            embedded = self.model.get_input_embeddings()(torch.tensor(tokens))
            joined = torch.cat((self._normed("embedding", embedded), self._normed("hidden", hidden)), -1)
            joined = joined @ self.weights["mtp.fc.weight"].T
            behind = self.head.model(inputs_embeds=joined[None]).last_hidden_state[0, -1]
            if draft is not None:
                tokens.append(draft)
                hidden = torch.cat((hidden, behind[None]))
        logits: torch.Tensor = self.model.lm_head(behind)
        return logits

    def _normed(self, part: str, rows: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps)
        return rows * scale * (1 + self.weights[f"mtp.pre_fc_norm_{part}.weight"])
