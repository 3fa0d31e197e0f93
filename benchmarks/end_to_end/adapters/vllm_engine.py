"""vLLM's CPU build, `LLM.generate` in this process: compiled, with a prefix cache, as it is by default."""

import os
import time
from typing import Any

from benchmarks.end_to_end.adapters.interface import Description, Engine, Generation, Options
from benchmarks.end_to_end.workloads import Request


class VllmEngine:
    """An `LLM` without processes of its own: they would compete for the cores with the threads that compute."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._llm: Any = None

    def start(self) -> Description:
        """Load and compile the model."""
        environment = {
            "OMP_NUM_THREADS": str(self._options.num_threads),
            "VLLM_CPU_KVCACHE_SPACE": str(self._options.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, self._options.cores[: self._options.num_threads])),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        os.environ.update({"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", **environment})
        import torch
        import vllm

        self._llm = vllm.LLM(
            model=self._options.model,
            dtype=self._options.number_format,
            max_model_len=self._options.max_tokens,
            disable_log_stats=False,  # it holds the time of each first token
        )
        return Description({"vllm": vllm.__version__, "torch": torch.__version__}, environment)

    def generate(self, requests: list[Request]) -> Generation:
        """Run all requests."""
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True, detokenize=False)
            for request in requests
        ]
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        started = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        return Generation(
            seconds,
            [output.metrics.first_token_latency for output in outputs],
            [len(output.outputs[0].token_ids) for output in outputs],
        )

    def stop(self) -> None:
        """Free the model."""
        self._llm = None


def make_engine(options: Options) -> Engine:
    """Return the engine."""
    return VllmEngine(options)
