"""OpenVINO GenAI's pipeline with continuous batching, in this process.

float32 and bfloat16 say so (`INFERENCE_PRECISION_HINT`, and a KV cache of the same format); int8 and int4 run with the
defaults of the library: it chooses how to compute and what the KV cache holds.
"""

import time
from typing import Any

from benchmarks.end_to_end.adapters.interface import Description, Engine, Generation, Options
from benchmarks.end_to_end.workloads import Request

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


class OpenVinoGenAi:
    """A pipeline with a prefix cache and room for all sequences."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._pipeline: Any = None

    def start(self) -> Description:
        """Compile the model."""
        import openvino
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = self._options.kv_cache_gib
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = 64
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        properties: dict[str, object] = {"INFERENCE_NUM_THREADS": self._options.num_threads}
        if precision := _PRECISIONS.get(self._options.number_format):
            properties |= {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(self._options.model, scheduler, "CPU", properties)
        told = {name: str(value) for name, value in properties.items()}
        settings = {"max_num_batched_tokens": "2048", "enable_prefix_caching": "True", **told}
        versions = {"openvino": openvino.__version__, "openvino-genai": openvino_genai.__version__}
        return Description({name: text.partition("-")[0] for name, text in versions.items()}, settings)

    def generate(self, requests: list[Request]) -> Generation:
        """Add all requests, then step until all are done."""
        import numpy as np
        import openvino

        prompts = [openvino.Tensor(np.array([request.prompt], dtype=np.int64)) for request in requests]
        configs = [self._config(request.output_tokens) for request in requests]
        first_token_s = [0.0] * len(requests)
        started = time.perf_counter()
        handles = [
            self._pipeline.add_request(index, *both) for index, both in enumerate(zip(prompts, configs, strict=True))
        ]
        silent = list(range(len(requests)))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            if silent:
                now_s = time.perf_counter() - started
                for index in [index for index in silent if handles[index].can_read()]:
                    first_token_s[index] = now_s
                    silent.remove(index)
        seconds = time.perf_counter() - started
        outputs = [handle.read_all()[0].generated_ids for handle in handles]
        return Generation(seconds, first_token_s, [len(output) for output in outputs])

    def _config(self, num_tokens: int) -> Any:
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.min_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        return config

    def stop(self) -> None:
        """Free the pipeline; its threads end with it."""
        self._pipeline = None


def make_engine(options: Options) -> Engine:
    """Return the engine."""
    return OpenVinoGenAi(options)
