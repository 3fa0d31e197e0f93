"""A scenario of what a GGUF file computes here and in llama.cpp: perplexity, likeliest tokens, distributions.

`python -m benchmarks.costs gguf --model FILE.gguf`. llama.cpp is the peer of `make bench-peers`; its tool
llama-perplexity takes the second half of each window of 512 tokens, and keeps tokens and log-probabilities in a
file, 16 bits each.
"""

import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.costs.harness import Figures, Groups, Size, Way, in_turn, scenario
from benchmarks.costs.quality import LOGIT_ROWS, WINDOW_TOKENS, WindowModel, reference_text
from benchmarks.end_to_end.engines import llama_cpp_program
from executor_svc.checkpoint.gguf.model import GGUFModel


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
        losses, their_losses, is_same, divergences = (list[torch.Tensor]() for _ in range(4))
        half = WINDOW_TOKENS // 2
        for window, expected in theirs.windows(begin):
            logits = torch.cat([rows.clone() for rows in ours.logits(window)])[half:]
            found, tokens = logits.log_softmax(-1), window[half + 1 :, None]
            losses.append(-found.gather(1, tokens)[:, 0].double())
            their_losses.append(-expected.gather(1, tokens)[:, 0].double())
            is_same.append((found.argmax(-1) == expected.argmax(-1)).double())
            for some, peer in zip(torch.split(found, LOGIT_ROWS), torch.split(expected, LOGIT_ROWS), strict=True):
                is_kept = peer > peer.amin(-1, keepdim=True)  # the rest is cut off at one value
                divergences.append((peer.exp() * (peer - some)).where(is_kept, 0).sum(-1).double())
    perplexities = [float(torch.cat(each).mean().exp()) for each in (losses, their_losses)]
    return {
        "perplexity": perplexities[0],
        "perplexity of llama.cpp": perplexities[1],
        "change, %": 100 * (perplexities[0] / perplexities[1] - 1),
        "same likeliest token, %": 100 * float(torch.cat(is_same).mean()),
        "KL divergence, nats": float(torch.cat(divergences).mean()),
        "same token ids, %": 100 * float(np.mean(np.equal(our_ids[: len(theirs.token_ids)], theirs.token_ids))),
    }


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
