"""transformers' `generate`: all requests as one batch, padded on the left; it runs as long as the longest output."""

import time
from typing import Any

from benchmarks.end_to_end.adapters.interface import Description, Engine, Generation, Options
from benchmarks.end_to_end.workloads import Request


class TransformersGenerate:
    """A model in this process."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._model: Any = None

    def start(self) -> Description:
        """Load the model."""
        import torch
        import transformers

        torch.set_num_threads(self._options.num_threads)
        dtype = getattr(torch, self._options.number_format)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(self._options.model, dtype=dtype).eval()
        return Description(
            {"transformers": transformers.__version__, "torch": torch.__version__},
            {"dtype": self._options.number_format, "threads": str(self._options.num_threads)},
        )

    def generate(self, requests: list[Request]) -> Generation:
        """Run the batch; only the tokens that were asked for count."""
        import torch

        length = max(len(request.prompt) for request in requests)
        longest = max(request.output_tokens for request in requests)
        ids = torch.zeros((len(requests), length), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, length - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, length - len(request.prompt) :] = 1
        times = _TokenTimes()
        started = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=longest,
                max_new_tokens=longest,
                pad_token_id=0,
                streamer=times,
            )
        seconds = time.perf_counter() - started
        if tuple(output.shape) != (len(requests), length + longest):
            raise RuntimeError(f"generate returned {tuple(output.shape)} tokens; {(len(requests), length + longest)}")
        first_token_s = times.puts[1] - started  # the prompt is put first
        return Generation(seconds, [first_token_s] * len(requests), [request.output_tokens for request in requests])

    def stop(self) -> None:
        """Nothing runs but this process."""


class _TokenTimes:
    """A streamer that keeps nothing but the times."""

    def __init__(self) -> None:
        self.puts: list[float] = []

    def put(self, value: object) -> None:
        self.puts.append(time.perf_counter())

    def end(self) -> None:
        pass


def make_engine(options: Options) -> Engine:
    """Return the engine."""
    return TransformersGenerate(options)
