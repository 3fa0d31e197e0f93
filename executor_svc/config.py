"""The settings of the executor and of the fake executor; the scheme is in `octavo_shared/process/config.py`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from octavo_shared.process.service_config import ADDRESS_PATTERN, ServiceConfig


class _BatchConfig(ServiceConfig):
    """What limits a batch, with a model or without."""

    listen: str = Field(
        "127.0.0.1:50061",
        pattern=ADDRESS_PATTERN,
        description="Address for the scheduler, host:port. Port 0 takes a free one. To serve other machines, set "
        "--tls-cert and --tls-client-ca too.",
    )
    max_num_seqs: int = Field(
        256, ge=1, le=2**16, description="Most sequences that are live at once. Each takes a row of the batch table."
    )
    max_num_batched_tokens: int = Field(
        2048, ge=1, description="Most tokens in one step. It limits the time and the memory of a step."
    )

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least max_num_seqs, "
                f"{self.max_num_seqs}, so that every sequence can decode in one step"
            )
        return self


class ExecutorConfig(_BatchConfig):
    """Run a model behind octavo.execution.v1: one KV cache, one batch table, one scheduler at a time."""

    service: ClassVar[str] = "executor"
    program: ClassVar[str] = "python -m executor_svc"
    removed: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"model_id": "--served-model-name of the scheduler gives the model another name"}
    )

    model: str = Field(
        description="The model: a Hugging Face directory, or a hub id such as Qwen/Qwen3-0.6B, with or without "
        "@REVISION."
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="Where the model runs. cpu works everywhere.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Number format of weights and KV cache. auto: float32 on a CPU; on a GPU the format in "
        "config.json, else float32. bfloat16 and float16 take half the memory of float32.",
    )
    quantization: Literal["none", "bfloat16", "int8", "int8-a8", "int4"] = Field(
        "none",
        description="Number format of the weights: 16, 8 or 4 bits in place of float32's 32 take less memory, are read "
        "faster on a CPU, and change outputs a little. int8-a8 and int4 round activations to 8 bits too, which is "
        "faster again. none: as dtype says; on a CPU a checkpoint in bfloat16 stays so, without loss. A GPU has int8 "
        "only, by the package torchao; it saves memory there, not time.",
    )
    cpu_kernels: Literal["auto", "native", "torch"] = Field(
        "auto",
        description="What computes float32 on a CPU. native: C, compiled at the first start. auto: native if there "
        "are a C compiler and AVX2, else torch.",
    )
    numerics: Literal["fast", "invariant"] = Field(
        "fast",
        description="invariant: an output depends on its request alone, to the bit, or the executor does not start. "
        "fast: what is fastest on this device; on a CPU the kernels in C are invariant too.",
    )
    attention_backend: Literal["auto", "triton", "flash_attn", "xformers", "torch"] = Field(
        "auto",
        description="What computes attention. auto: on a GPU flash-attn 3 if it is installed, else Triton, else "
        "torch; on a CPU what cpu_kernels says. flash_attn and xformers are libraries for float16 and bfloat16.",
    )
    block_size_tokens: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Tokens in a block of the KV cache. By default what the attention backend prefers, mostly 16.",
    )
    cuda_graphs: Literal["auto", "off"] = Field(
        "auto",
        description="auto: record CUDA graphs at the start and replay them for steps that only decode, if model and "
        "backend allow it. off: a faster start, slower small batches.",
    )
    tp: int = Field(
        1,
        ge=1,
        description="Tensor parallelism: the number of processes (ranks) that share the model. They start on this "
        "machine, unless a launcher such as torchrun has started them.",
    )
    num_threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of each rank. By default the ranks share the cores that this process may use, as many "
        "as its container's quota allows; two hardware threads of a core count once. The kernels in C use fewer while "
        "other work needs the cores.",
    )
    kv_cache_gib: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Size of the KV cache of each rank, in GiB. By default, on a CPU: a quarter of the machine's "
        "memory, or less if less is free. On a GPU: what gpu_memory_utilization leaves.",
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of a GPU's memory to use: for the weights, for the largest step (measured at the start), "
        "and the rest for the KV cache.",
    )
    num_device_blocks: int | None = Field(
        None, ge=1, description="Blocks of the KV cache. By default as many as kv_cache_gib holds."
    )
    host_cache_gib: float = Field(
        0.5,
        ge=0,
        allow_inf_nan=False,
        description="Host memory for the blocks of preempted sequences, in GiB. On a CPU it is taken only when it is "
        "used. 0: no swapping, their tokens are computed again.",
    )
    num_host_blocks: int | None = Field(
        None, ge=0, description="Blocks of the host cache. By default as many as host_cache_gib holds."
    )
    max_model_len: int | None = Field(
        None,
        ge=1,
        description="Longest sequence in tokens: prompt and output together. By default what the model's config.json "
        "says.",
    )


class FakeConfig(_BatchConfig):
    """Run the fake executor: the same service without a model. It checks every block table."""

    service: ClassVar[str] = "fake"
    program: ClassVar[str] = "python -m executor_svc.fake"

    block_size_tokens: int = Field(16, ge=1, le=1024, description="Tokens in a block of the KV cache.")
    num_device_blocks: int = Field(4096, ge=1, description="Blocks on the device. The default holds 65,536 tokens.")
    num_host_blocks: int = Field(0, ge=0, description="Blocks in host memory, for swapping. 0: no swapping.")
    max_model_len: int = Field(8192, ge=2, description="Longest sequence in tokens: prompt and output together.")
    step_ms: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="Shortest time of a step, in ms. 0: as fast as possible."
    )
    token_us: float = Field(0.0, ge=0, allow_inf_nan=False, description="Time that each token adds to a step, in us.")
    eos_probability: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Chance that a token ends its sequence. 0: each output has the length that was asked for.",
    )
    sliding_window_tokens: int = Field(
        0,
        ge=0,
        description="How many of the last tokens attention reads; the scheduler frees the others. 0: all.",
    )
    fail_step_every: int = Field(
        0, ge=0, description="A fault for tests: every Nth step fails, and the process lives on. 0: none fails."
    )
    hang_step_every: int = Field(
        0,
        ge=0,
        description="A fault for tests: the Nth step never ends, and heartbeats are still answered. 0: none hangs.",
    )
    exit_after_steps: int = Field(
        0,
        ge=0,
        description="A fault for tests: after N steps, the next one ends the process with exit code 1. 0: none does.",
    )
    slow_step_every: str = Field(
        "",
        pattern=r"^([1-9]\d{0,8}:\d{1,8}(\.\d{1,3})?)?$",
        description="A fault for tests: N:MS makes every Nth step MS milliseconds longer. By default none is.",
    )
    nan_token_id: int = Field(
        -1,
        ge=-1,
        le=258,
        description="A fault for tests: behind a token with this id the logits are NaN. By default behind none.",
    )
