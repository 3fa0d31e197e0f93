"""The other engines, each asked in a process that runs with its own interpreter."""

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.adapters.interface import Description, Generation, Options
from benchmarks.end_to_end.workloads import Request

NUM_SLOTS = 32
_SLOT_TOKENS = 1024
_START_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 900.0

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


class LlamaCppServer:
    """llama.cpp's server on loopback, asked over HTTP without streaming.

    Its cache is divided among its slots, and that size slows it down. So one server has 32 slots, for many requests,
    and another one a single slot, for one request and for long prompts; only the server in use runs.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._server: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._num_slots = 0

    def start(self) -> Description:
        # The program itself tells the commit of the repository it was built in, whichever that is.
        version = Path(self._options.program).with_name("VERSION").read_text(encoding="utf-8").strip()
        self._ensure_slots(NUM_SLOTS)
        threads = str(self._options.num_threads)
        return Description(
            {"llama.cpp": version},
            {"threads": threads, "cache-ram": "0", "parallel": f"{NUM_SLOTS}, or 1 for one request"},
        )

    def generate(self, requests: list[Request]) -> Generation:
        """Post all requests at once; the server says how long it took from the first token to the last."""
        is_small = all(len(request.prompt) + request.output_tokens <= _SLOT_TOKENS for request in requests)
        self._ensure_slots(1 if len(requests) == 1 or not is_small else NUM_SLOTS)
        with ThreadPoolExecutor(len(requests)) as pool:
            started = time.perf_counter()
            answers = list(pool.map(lambda request: self._answer(request, started), requests))
            seconds = time.perf_counter() - started
        return Generation(seconds, [first_s for first_s, _ in answers], [tokens for _, tokens in answers])

    def _answer(self, request: Request, started: float) -> tuple[float, int]:
        """Return when the first token was there, and how many came."""
        body = {
            "prompt": request.prompt,
            "n_predict": request.output_tokens,
            "temperature": 0,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "cache_prompt": True,
            "stream": False,
        }
        answer = self._call("POST", "/completion", body, _ANSWER_TIMEOUT_S)
        ended_s = time.perf_counter() - started
        return first_token_time(answer, ended_s), answer["tokens_predicted"]

    def _ensure_slots(self, num_slots: int) -> None:
        if self._num_slots == num_slots:
            return
        self.stop()
        context = num_slots * _SLOT_TOKENS if num_slots > 1 else self._options.max_tokens + 64
        threads = str(self._options.num_threads)
        with socket.socket() as listener:  # the server cannot say which port it took
            listener.bind(("127.0.0.1", 0))
            self._port = listener.getsockname()[1]
        command = [self._options.program, "--model", self._options.model, "--host", "127.0.0.1"]
        command += ["--port", str(self._port), "--parallel", str(num_slots), "--ctx-size", str(context)]
        command += ["--threads", threads, "--threads-batch", threads]
        command += ["--cache-ram", "0"]  # up to 8 GiB of earlier prompts, of which none comes again
        self._server = subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr)
        self._wait_until_ready(self._server)
        self._num_slots = num_slots
        self._answer(Request(list(range(100, 164)), 4), 0.0)  # warm, whenever it was started

    def _wait_until_ready(self, server: subprocess.Popen[bytes]) -> None:
        give_up_at = time.monotonic() + _START_TIMEOUT_S
        while True:
            if server.poll() is not None:
                raise RuntimeError(f"llama-server ended with exit code {server.returncode} before it was ready")
            try:
                self._call("GET", "/health", None, 5.0)
                return
            except (OSError, RuntimeError):
                if time.monotonic() > give_up_at:
                    raise
            time.sleep(0.1)

    def _call(self, method: str, path: str, body: object, timeout_s: float) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout_s)
        try:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"llama-server answered {response.status}: {text[:200]!r}")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def stop(self) -> None:
        server, self._server, self._num_slots = self._server, None, 0
        if server is not None:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def first_token_time(answer: dict[str, Any], ended_s: float) -> float:
    """Return when the first token was there, of an answer that came at `ended_s`."""
    num_tokens = answer["tokens_predicted"]
    return ended_s - answer["timings"]["predicted_ms"] / 1e3 if num_tokens > 1 else ended_s


class OpenVinoGenAi:
    """OpenVINO GenAI's pipeline with continuous batching and a prefix cache, in this process.

    float32 and bfloat16 say so (`INFERENCE_PRECISION_HINT`, and a KV cache of the same format); int8 and int4 run with
    the defaults of the library: it chooses how to compute and what the KV cache holds.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._pipeline: Any = None

    def start(self) -> Description:
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
        self._pipeline = None


def generate_batch(
    model: Any, prompts: Sequence[Any], num_new_tokens: int, device: Any, streamer: object = None
) -> Any:
    """Generate greedily, prompts padded on the left; return the tokens, [len(prompts), longest prompt + new]."""
    import torch

    length = max(map(len, prompts))
    ids = torch.zeros((len(prompts), length), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = torch.as_tensor(prompt)
        mask[row, length - len(prompt) :] = 1
    with torch.inference_mode():
        return model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            do_sample=False,
            min_new_tokens=num_new_tokens,
            max_new_tokens=num_new_tokens,
            pad_token_id=0,
            eos_token_id=None,
            streamer=streamer,
        )


class TransformersGenerate:
    """transformers' `generate`: all requests as one batch, padded on the left, as long as the longest output."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._model: Any = None

    def start(self) -> Description:
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
        length = max(len(request.prompt) for request in requests)
        longest = max(request.output_tokens for request in requests)
        times = _TokenTimes()
        started = time.perf_counter()
        output = generate_batch(self._model, [request.prompt for request in requests], longest, "cpu", times)
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


class VllmEngine:
    """vLLM's CPU build, `LLM.generate`: compiled, with a prefix cache, as it is by default.

    It has no processes of its own: they would compete for the cores with the threads that compute.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._llm: Any = None

    def start(self) -> Description:
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
        self._llm = None
