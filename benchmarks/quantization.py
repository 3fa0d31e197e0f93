"""What a number format of weights costs in quality: perplexity, likeliest tokens and distributions beside float32.

    python -m benchmarks.quantization [--model DIRECTORY ...] [--formats int8,int4] [--tokens 8192]

The models are the demo model and small ones of other families, which are trained here once (`small_models.py`), or
those of some directories. The text is a part of Python's language reference (`quality_texts.py`) in windows of 512
tokens, each of them begun as a prompt is. Every model computes it as an executor does, with the kernels in C.

- perplexity: exp of the mean negative log-probability of the next token.
- change: of the perplexity, with the standard error of the mean over tokens: below two of them nothing is shown.
- same token: how often the likeliest token is that of float32.
- KL divergence: of float32's distribution from this one, in nats: the mean over tokens, and what 1 % of them exceed.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.machine import describe_machine
from benchmarks.quality_texts import held_out_text
from benchmarks.small_models import SMALL_MODELS, trained_model
from executor_svc.attention.interface import AttentionMetadata, LayerCache
from executor_svc.checkpoint.model_directory import ModelDirectory
from executor_svc.checkpoint.weights import Checkpoint
from executor_svc.models.config import ModelConfig
from executor_svc.models.families import parse_config
from executor_svc.models.kernels import make_model
from executor_svc.models.weight_format import Quantization
from octavo.models.store import prepare_model

WINDOW_TOKENS = 512
LOGIT_ROWS = 64  # at a time: a vocabulary of 262,144 tokens makes 1 MiB of logits each
FORMATS: tuple[Quantization, ...] = get_args(Quantization)[1:]


class WindowModel:
    """A model that computes one window at a time."""

    def __init__(self, directory: Path, config: ModelConfig, quantization: Quantization) -> None:
        self._made = make_model(
            config, torch.float32, torch.device("cpu"), cpu_kernels="native", quantization=quantization
        )
        self._made.model.load(Checkpoint(directory))
        shape = (1, WINDOW_TOKENS, config.num_key_value_heads, config.head_dim)
        self._caches = [LayerCache(torch.empty(shape), torch.empty(shape)) for _ in range(config.num_hidden_layers)]

    def logits(self, window: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the logits that foretell the tokens of a window but the first, some rows at a time."""
        positions = torch.arange(len(window))
        metadata = AttentionMetadata(
            np.zeros(1, np.int32), np.array([len(window)], np.int32), np.zeros((1, 1), np.int32), positions
        )
        model = self._made.model
        plan = self._made.attention.plan(metadata, self._caches[0])
        for hidden in torch.split(model.forward(window, positions, self._caches, plan, positions[:-1]), LOGIT_ROWS):
            logits = model.logits(hidden.clone())
            assert logits is not None, "there is one rank"
            yield logits


@dataclass
class Scores:
    """What one format says about each token of the text; beside float32 but for the losses."""

    losses: list[torch.Tensor] = field(default_factory=list)
    is_same: list[torch.Tensor] = field(default_factory=list)
    divergences: list[torch.Tensor] = field(default_factory=list)

    def add(self, logits: torch.Tensor, exact: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add some tokens; `exact` has the log-probabilities of float32."""
        log_probabilities = logits.log_softmax(-1)
        self.losses.append(-log_probabilities.gather(1, tokens[:, None])[:, 0].double())
        self.is_same.append((logits.argmax(-1) == exact.argmax(-1)).double())
        self.divergences.append((exact.exp() * (exact - log_probabilities)).sum(-1).double())

    def row(self, exact: "Scores") -> list[str]:
        """Return what the table says of it."""
        losses, divergences = torch.cat(self.losses), torch.cat(self.divergences)
        changes = losses - torch.cat(exact.losses)
        error = float(changes.std()) / len(changes) ** 0.5
        return [
            f"{float(losses.mean().exp()):.3f}",
            "" if self is exact else f"{100 * float(changes.mean().expm1()):+.2f} ± {100 * error:.2f} %",
            "" if self is exact else f"{100 * float(torch.cat(self.is_same).mean()):.1f} %",
            "" if self is exact else f"{float(divergences.mean()):.1e}",
            "" if self is exact else f"{float(divergences.quantile(0.99)):.1e}",
        ]


@torch.inference_mode()
def score(directory: Path, formats: Sequence[Quantization], num_tokens: int) -> dict[Quantization, Scores]:
    """Run a model in float32 ("none") and in some formats over the text."""
    config = parse_config(ModelDirectory(directory).config(), directory / "config.json")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    begin = tokenizer.encode("").ids  # what prompts of this model begin with
    token_ids = tokenizer.encode(held_out_text(), add_special_tokens=False).ids[:num_tokens]
    models = {name: WindowModel(directory, config, name) for name in ("none", *formats)}
    scores = {name: Scores() for name in models}
    size = WINDOW_TOKENS - len(begin)
    for place in range(0, len(token_ids), size):
        window = torch.tensor(begin + token_ids[place : place + size])
        parts = zip(
            torch.split(window[1:], LOGIT_ROWS), *(model.logits(window) for model in models.values()), strict=True
        )
        for tokens, *logits in parts:
            exact = logits[0].log_softmax(-1)
            for name, of_format in zip(models, logits, strict=True):
                scores[name].add(of_format, exact, tokens)
    return scores


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What number formats of weights cost in quality.")
    parser.add_argument("--model", type=Path, nargs="+", help="Hugging Face directories (default: see above)")
    parser.add_argument("--formats", default=",".join(FORMATS), help="which formats, with commas between")
    parser.add_argument("--tokens", type=int, default=8192, help="how many tokens of the text")
    arguments = parser.parse_args()
    formats: list[Quantization] = [name for name in FORMATS if name in arguments.formats.split(",")]
    directories = arguments.model or [prepare_model("smollm2"), *map(trained_model, SMALL_MODELS)]
    table = Table(title="Number formats of weights beside float32")
    for heading in ("model", "format", "perplexity", "change", "same token", "KL divergence", "of 1 %"):
        table.add_column(heading, justify="right")
    for directory in directories:
        scores = score(directory, formats, arguments.tokens)
        for name, of_format in scores.items():
            label = "float32" if name == "none" else name
            table.add_row(directory.resolve().name, label, *of_format.row(scores["none"]))
    console = Console(width=120)
    console.print(table)
    console.print(describe_machine())


if __name__ == "__main__":
    main()
