"""What int8 weights change: perplexity, logits and likeliest tokens of the demo model on a fixed text.

    python -m benchmarks.quantization [--model DIRECTORY]

The text is the Apache License 2.0 of this project, in windows of 512 tokens. The reference is the same executor
with float32 weights in torch. Perplexity is exp of the mean negative log-probability of the next token; the error
of the logits is their distance, as a part of the reference's length.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.machine import describe_machine
from executor_svc.attention.interface import AttentionMetadata, LayerCache
from executor_svc.checkpoint.model_directory import ModelDirectory
from executor_svc.checkpoint.weights import Checkpoint
from executor_svc.models.config import ModelConfig
from executor_svc.models.families import parse_config
from executor_svc.models.kernels import CpuKernels, make_model
from executor_svc.models.weight_format import Quantization
from octavo.models.store import prepare_model

TEXT = Path(__file__).parent.parent / "LICENSE"
WINDOW_TOKENS = 512
CASES: tuple[tuple[CpuKernels, Quantization], ...] = (("torch", "none"), ("auto", "none"), ("auto", "int8"))


@dataclass(frozen=True, slots=True)
class Scores:
    """What one model says about the text."""

    perplexity: float
    logits: torch.Tensor  # [num_tokens, vocab_size], those that foretell a token


@torch.inference_mode()
def score(directory: Path, config: ModelConfig, token_ids: list[int], case: tuple[CpuKernels, Quantization]) -> Scores:
    """Load the model and run it over the text, window by window."""
    made = make_model(config, torch.float32, torch.device("cpu"), cpu_kernels=case[0], quantization=case[1])
    model, backend = made.model, made.attention
    model.load(Checkpoint(directory))
    shape = (1, WINDOW_TOKENS, config.num_key_value_heads, config.head_dim)
    caches = [LayerCache(torch.empty(shape), torch.empty(shape)) for _ in range(config.num_hidden_layers)]
    logits, losses = [], []
    for begin in range(0, len(token_ids) - 1, WINDOW_TOKENS):
        window = torch.tensor(token_ids[begin : begin + WINDOW_TOKENS])
        positions = torch.arange(len(window))
        metadata = AttentionMetadata(
            np.zeros(1, np.int32), np.array([len(window)], np.int32), np.zeros((1, 1), np.int32), positions
        )
        hidden = model.forward(window, positions, caches, backend.plan(metadata, caches[0]), positions[:-1])
        some_logits = model.logits(hidden)
        assert some_logits is not None, "there is one rank"
        logits.append(some_logits)
        losses.append(torch.nn.functional.cross_entropy(logits[-1], window[1:], reduction="none"))
    return Scores(float(torch.cat(losses).double().mean().exp()), torch.cat(logits))


def compare(directory: Path) -> Table:
    """Return the table."""
    config = parse_config(ModelDirectory(directory).config(), directory / "config.json")
    token_ids = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(TEXT.read_text(encoding="utf-8")).ids
    table = Table(title=f"{len(token_ids)} tokens of text, beside float32 weights in torch")
    for heading in ("kernels", "quantization", "perplexity", "logit error", "same likeliest token"):
        table.add_column(heading, justify="right")
    reference: Scores | None = None
    for case in CASES:
        scores = score(directory, config, token_ids, case)
        reference = reference or scores
        error = float((scores.logits - reference.logits).norm() / reference.logits.norm())
        same = float((scores.logits.argmax(-1) == reference.logits.argmax(-1)).float().mean())
        table.add_row(*case, f"{scores.perplexity:.3f}", f"{error:.1e}", f"{same:.3f}")
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What int8 weights change in the demo model's numbers.")
    parser.add_argument("--model", type=Path, help="Hugging Face directory (default: the demo model)")
    arguments = parser.parse_args()
    console = Console()
    console.print(compare(arguments.model or prepare_model("smollm2")))
    console.print(describe_machine())


if __name__ == "__main__":
    main()
