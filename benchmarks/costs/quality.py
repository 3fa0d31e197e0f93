"""Scenarios of what number formats change in the outputs, and of a GGUF file here and in llama.cpp.

The text is a part of Python's language reference, which `help()` shows: it is on every machine, and differs a little
between releases of Python. Every model computes it as an executor does, with the kernels in C, in windows that begin as
prompts do. llama.cpp is the peer of `make bench-peers`; its tool llama-perplexity takes the second half of each window,
and keeps tokens and log-probabilities in a file, 16 bits each.
"""

import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, get_args

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.costs.harness import Figures, Groups, Size, Way, in_turn, scenario
from benchmarks.end_to_end.engines import llama_cpp_program
from executor_svc.attention.cache_format import CACHE_DTYPES
from executor_svc.attention.interface import AttentionMetadata
from executor_svc.cache.cache_engine import CacheEngine
from executor_svc.checkpoint.gguf.model import GGUFModel
from executor_svc.checkpoint.model import Model, open_checkpoint, open_model
from executor_svc.config import ExecutorConfig
from executor_svc.models.selection import choose_model
from executor_svc.models.weight_format import Quantization
from executor_svc.worker.assembly import cache_shape_of

WINDOW_TOKENS = 512
LOGIT_ROWS = 64  # at a time: a vocabulary of 262,144 tokens makes 1 MiB of logits each
EVERY_CHAPTER = 6
FORMATS: Mapping[str, Mapping[str, Any]] = {
    **{name: {"quantization": name} for name in get_args(Quantization)[1:]},
    "compute bfloat16": {"compute_dtype": "bfloat16"},
    **{f"cache {name}": {"kv_cache_dtype": name} for name in CACHE_DTYPES if name != "float32"},
}


@scenario("quality", "perplexity, likeliest tokens and distributions of each number format beside float32", pairs=1)
async def quality(size: Size) -> Groups:
    """Each run is the same."""
    directory, num_tokens = size.directory(), size.of(8192, 40)
    # A GGUF file has the formats of its weights already.
    names = [name for name, settings in FORMATS.items() if directory.is_dir() or "quantization" not in settings]
    yield [
        Way(name, in_turn(quality_of, directory, FORMATS[name], num_tokens))
        for name in size.of(names, ["int8", "cache int8"])
    ]


@torch.inference_mode()
def quality_of(directory: Path, settings: Mapping[str, Any], num_tokens: int) -> Figures:
    """Run a model in float32 and in a format over the text."""
    opened = open_model(directory)
    [tokens_file] = (file for file in opened.tokenizer_files() if file.name == "tokenizer.json")
    tokenizer = Tokenizer.from_str(tokens_file.content.decode())
    begin = tokenizer.encode("").ids  # what prompts of this model begin with
    token_ids = tokenizer.encode(reference_text(), add_special_tokens=False).ids[:num_tokens]
    exact_model, model = (WindowModel(opened, each) for each in ({}, settings))
    size = min(WINDOW_TOKENS, exact_model.most_tokens) - len(begin)
    beside = Beside("float32")
    for place in range(0, len(token_ids), size):
        window = torch.tensor(begin + token_ids[place : place + size])
        rows = zip(torch.split(window[1:], LOGIT_ROWS), exact_model.logits(window), model.logits(window), strict=True)
        for tokens, exact, found in rows:
            beside.add(tokens, exact.log_softmax(-1), found.log_softmax(-1))
    return beside.figures()


class Beside:
    """Log-probabilities [positions, vocabulary] of the same positions, compared with a reference's."""

    def __init__(self, reference: str) -> None:
        self._reference = reference
        self._values: list[torch.Tensor] = []  # [positions, 4]: losses of both, same likeliest token, divergence

    def add(self, tokens: torch.Tensor, exact: torch.Tensor, found: torch.Tensor) -> None:
        """Take in positions with the tokens that follow them."""
        is_kept = exact > exact.amin(-1, keepdim=True)  # a reference may have cut off the rest at one value
        columns = (
            -exact.gather(1, tokens[:, None])[:, 0],
            -found.gather(1, tokens[:, None])[:, 0],
            (found.argmax(-1) == exact.argmax(-1)).float(),
            (exact.exp() * (exact - found)).where(is_kept, 0).sum(-1),
        )
        self._values.append(torch.stack(columns, 1).double())

    def figures(self) -> Figures:
        """Return what changes."""
        exact_losses, losses, is_same, divergences = torch.cat(self._values).T
        changes = losses - exact_losses
        return {
            f"perplexity of {self._reference}": float(exact_losses.mean().exp()),
            "perplexity": float(losses.mean().exp()),
            "change, %": 100 * float(changes.mean().expm1()),
            "its standard error, %": 100 * float(changes.std()) / len(changes) ** 0.5,
            "same likeliest token, %": 100 * float(is_same.mean()),
            "KL divergence, nats": float(divergences.mean()),
            "that of 1 % of the tokens, nats": float(divergences.quantile(0.99)),
            "largest difference of a log-probability": float(changes.abs().max()),
        }


def reference_text() -> str:
    """Return some chapters of the language reference."""
    return "\n\n".join(topics[name] for name in sorted(topics)[::EVERY_CHAPTER])


class WindowModel:
    """A model that computes one window at a time."""

    def __init__(self, model: Model, settings: Mapping[str, Any]) -> None:
        config = ExecutorConfig(model=str(model.path), dtype="float32", cpu_kernels="native", **settings)
        self._chosen = choose_model(model, config, torch.device("cpu"))
        self._chosen.load(open_checkpoint(model))
        self.most_tokens = self._chosen.model.shape.max_position_embeddings
        shape = replace(cache_shape_of(self._chosen), block_size=WINDOW_TOKENS)
        self._caches = CacheEngine(shape, 1, 0, torch.device("cpu")).layers

    def logits(self, window: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the logits that foretell the tokens of a window but the first, some rows at a time."""
        positions = torch.arange(len(window))
        metadata = AttentionMetadata(
            np.zeros(1, np.int32), np.array([len(window)], np.int32), np.zeros((1, 1), np.int32), positions
        )
        model = self._chosen.model
        plan = self._chosen.attention.plan(metadata, self._caches[0])
        for hidden in torch.split(model.forward(window, positions, self._caches, plan, positions[:-1]), LOGIT_ROWS):
            logits = model.logits(hidden.clone())
            assert logits is not None, "there is one rank"
            yield logits


@scenario("gguf", "a GGUF file here and in llama.cpp: perplexity, likeliest tokens, distributions", pairs=1)
async def gguf(size: Size) -> Groups:
    """Each run is the same."""
    if size.model is None or not size.model.is_file():
        return  # no file was given
    yield [Way("GGUF", in_turn(beside_llama_cpp, size.model, size.of(16, 1)))]


@torch.inference_mode()
def beside_llama_cpp(path: Path, num_windows: int) -> Figures:
    """Run a file here and in llama.cpp over the same tokens."""
    model = GGUFModel(path)
    text = reference_text()
    with tempfile.TemporaryDirectory(prefix="octavo-gguf-") as folder:
        theirs = _PeerRun(path, text, num_windows, Path(folder))
        files = {file.name: file.content for file in model.tokenizer_files()}
        tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        begin, our_ids = tokenizer.encode("").ids, tokenizer.encode(text).ids
        ours = WindowModel(model, {})
        beside, half = Beside("llama.cpp"), WINDOW_TOKENS // 2
        for window, expected in theirs.windows(begin):
            logits = torch.cat([rows.clone() for rows in ours.logits(window)])[half:]
            rows = (torch.split(each, LOGIT_ROWS) for each in (window[half + 1 :], expected, logits.log_softmax(-1)))
            for tokens, exact, found in zip(*rows, strict=True):
                beside.add(tokens, exact, found)
    same_ids = np.equal(our_ids[: len(theirs.token_ids)], theirs.token_ids)
    return {**beside.figures(), "same token ids, %": 100 * float(np.mean(same_ids))}


class _PeerRun:
    """What llama-perplexity computed, read from its file.

    Source of the format: tools/perplexity/perplexity.cpp of llama.cpp, `process_logits`.
    """

    def __init__(self, path: Path, text: str, num_windows: int, folder: Path) -> None:
        (folder / "text").write_text(text, encoding="utf-8")
        self._path = folder / "logits"
        options = ("-c", WINDOW_TOKENS, "-b", WINDOW_TOKENS, "--chunks", num_windows, "--seed", 0)
        files = ("-m", path, "-f", folder / "text", "--kl-divergence-base", self._path)
        command = [str(word) for word in (llama_cpp_program("llama-perplexity"), *files, *options)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"llama-perplexity ended with {done.returncode}: {done.stderr[-2000:]}")
        with self._path.open("rb") as file:
            magic, size, self._vocab_size, self._num_windows = struct.unpack("<8sIii", file.read(20))
            assert magic == b"_logits_", "the format of the tool's file"
            assert size == WINDOW_TOKENS, "the tool takes the windows that it was asked for"
            self.token_ids = np.fromfile(file, "<i4", self._num_windows * WINDOW_TOKENS)
            self._begin = file.tell()

    def windows(self, begin: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield tokens of a window, the first ones `begin`, and their log-probabilities [positions, vocabulary]."""
        num_rows, width = WINDOW_TOKENS - 1 - WINDOW_TOKENS // 2, (self._vocab_size + 1) // 2 * 2 + 4
        tokens = self.token_ids.reshape(-1, WINDOW_TOKENS).copy()
        with self._path.open("rb") as file:
            file.seek(self._begin)
            for window in tokens:
                window[: len(begin)] = begin
                rows = np.fromfile(file, "<u2", num_rows * width).reshape(num_rows, width)
                scale, least = rows[:, :4].copy().view("<f4").T
                codes = torch.from_numpy(rows[:, 4 : 4 + self._vocab_size].astype(np.float32))
                yield (
                    torch.from_numpy(window.astype(np.int64)),
                    codes * torch.from_numpy(scale.copy())[:, None] + torch.from_numpy(least.copy())[:, None],
                )
