"""llama.cpp's server on loopback: `llama-server` with 32 slots, asked over HTTP without streaming.

Its cache is divided among the slots, and that size slows it down. So one server has 32 slots, for many requests, and
another one a single slot, for one request and for long prompts; only the one that is needed runs.
"""

import http.client
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.adapters.interface import Description, Engine, Generation, Options
from benchmarks.end_to_end.workloads import Request

NUM_SLOTS = 32
_SLOT_TOKENS = 1024
_START_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 900.0


class LlamaCppServer:
    """A server for as many slots as the requests of a run need; another number of slots starts it again."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._server: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._num_slots = 0

    def start(self) -> Description:
        """Start the server."""
        # The program itself tells the commit of whatever repository it was built in.
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
        command = [self._options.program, "--model", self._options.model, "--host", "127.0.0.1", "--port", "0"]
        command += ["--parallel", str(num_slots), "--ctx-size", str(context)]
        command += ["--threads", threads, "--threads-batch", threads]
        command += ["--cache-ram", "0"]  # up to 8 GiB of earlier prompts, of which none comes again
        self._port = _free_port()
        command[command.index("--port") + 1] = str(self._port)
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
        """Stop the server."""
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


def _free_port() -> int:
    """Return a port that was free a moment ago: the server cannot say which one it took."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def make_engine(options: Options) -> Engine:
    """Return the engine."""
    return LlamaCppServer(options)
