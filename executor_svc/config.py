"""The settings of the executor and of the fake executor; the scheme is in `shared/config.py`."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from shared.service_config import ADDRESS_PATTERN, ServiceConfig


class _BatchConfig(ServiceConfig):
    """What limits a batch, with a model or without."""

    listen: str = Field(
        "127.0.0.1:50061",
        pattern=ADDRESS_PATTERN,
        description="Address to serve the scheduler on, host:port; port 0 takes a free one. The default is this "
        "machine only: elsewhere, set --tls-cert and --tls-client-ca too.",
    )
    max_num_seqs: int = Field(
        256, ge=1, le=2**16, description="Sequences that can be live at once; each costs a row of the batch table."
    )
    max_num_batched_tokens: int = Field(
        2048, ge=1, description="Most tokens that one step computes; bounds its time and its activations."
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

    model: str = Field(description="The model: a Hugging Face directory, or a hub id, maybe with @REVISION.")
    model_id: str | None = Field(
        None, description="Name to report; without it `model`, of a directory its last path component."
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="Where the model runs; cpu works everywhere.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Number format of weights and cache. auto: on a GPU what config.json says, mostly bfloat16, and "
        "float32 if it says nothing; on a CPU float32, also for a model stored in bfloat16 or float16, because the "
        "kernels in C compute in float32 and it holds all values of the others. Weights that are stored in another "
        "format are converted as they are loaded. bfloat16 and float16 take half the memory of float32.",
    )
    quantization: Literal["none", "int8"] = Field(
        "none",
        description="int8: weights become int8 as they are loaded, a quarter of float32's memory, and the outputs "
        "change a little. On a CPU a single stream is about twice as fast or more, by the kernels in C. A GPU needs "
        "the package torchao for it, which restores weights before each product: it saves memory there, not time.",
    )
    cpu_kernels: Literal["auto", "native", "torch"] = Field(
        "auto",
        description="What computes float32 on a CPU. native: C, compiled on this machine at the first start; torch: "
        "torch; auto: native where there are a compiler and AVX2, else torch, which the start says in one line.",
    )
    attention_backend: Literal["auto", "triton", "flash_attn", "xformers", "torch"] = Field(
        "auto",
        description="What computes attention. auto: on a GPU flash-attn 3 where it is installed, else our Triton "
        "kernels, else torch; on a CPU what cpu_kernels says. flash_attn and xformers are the libraries of that name, "
        "for float16 and bfloat16; flash-attn 2 has blocks of 256 tokens and xformers of 64, so equal prefixes are "
        "found less often. torch: plain torch, on a CPU whatever cpu_kernels says.",
    )
    block_size_tokens: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Tokens in a block of the KV cache; without it what the attention backend prefers: mostly 16, "
        "which wastes little.",
    )
    cuda_graphs: Literal["auto", "off"] = Field(
        "auto",
        description="auto: a GPU replays steps that only decode as CUDA graphs, captured at the start, where the model "
        "and the attention backend allow it; off: the start is faster, small batches are slower.",
    )
    tp: int = Field(
        1,
        ge=1,
        description="Tensor parallelism: ranks that share the model, each a process with its part of every layer. They "
        "are started on this machine, unless a launcher such as torchrun has started one process for each.",
    )
    num_threads: int | None = Field(
        None,
        ge=1,
        description="Threads that compute on a CPU, of each rank; by default the ranks share the cores. Fewer leave "
        "cores to other work; the kernels in C use fewer by themselves while other work wants the cores.",
    )
    kv_cache_gib: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Size of the KV cache in GiB, of each rank. Without it a CPU gives a quarter of the machine's "
        "memory, halved until it is at most half of what is free once the weights are loaded, and a GPU what "
        "gpu_memory_utilization leaves.",
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of a GPU's memory to use in all: weights, the largest step, which is run once at the start "
        "to measure it, and for the rest the KV cache.",
    )
    num_device_blocks: int | None = Field(
        None, ge=1, description="Blocks of the KV cache; without it as many as kv_cache_gib holds."
    )
    host_cache_gib: float = Field(
        0.5,
        ge=0,
        allow_inf_nan=False,
        description="Size of the pool in the machine's memory that preempted sequences are swapped to, in GiB; on a "
        "CPU it takes memory only as it is used. 0: they are computed again instead.",
    )
    num_host_blocks: int | None = Field(
        None, ge=0, description="Blocks of that pool; without it as many as host_cache_gib holds."
    )
    max_model_len: int | None = Field(
        None, ge=1, description="Longest sequence in tokens; without it what the model's config.json says."
    )


class FakeConfig(_BatchConfig):
    """Run the fake executor: the same service without a model, with every block table checked."""

    service: ClassVar[str] = "fake"
    program: ClassVar[str] = "python -m executor_svc.fake"

    block_size_tokens: int = Field(
        16, ge=1, le=1024, description="Tokens in a block; 16 is what most attention backends prefer."
    )
    num_device_blocks: int = Field(4096, ge=1, description="Blocks of the device pool; 65,536 tokens by default.")
    num_host_blocks: int = Field(0, ge=0, description="Blocks of the host pool for swapping; 0: it cannot swap.")
    max_model_len: int = Field(8192, ge=2, description="Longest sequence in tokens; that of small models.")
    step_ms: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="Time that every step takes at least, in ms; 0: as fast as it goes."
    )
    token_us: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="Time that each computed token adds to a step, in us."
    )
    eos_probability: float = Field(
        0.0, ge=0, le=1, description="Chance that a token ends its sequence; 0: outputs have the length asked for."
    )
    sliding_window_tokens: int = Field(
        0,
        ge=0,
        description="Last tokens that attention reads, with the token itself; 0: all. The scheduler frees the rest.",
    )
    fail_step_every: int = Field(
        0, ge=0, description="Fault for tests: every so many steps one fails; the process lives on. 0: none does."
    )
    hang_step_every: int = Field(
        0,
        ge=0,
        description="Fault for tests: a step never ends, the first time after so many; heartbeats are still answered. "
        "0: none hangs.",
    )
    exit_after_steps: int = Field(
        0,
        ge=0,
        description="Fault for tests: the process ends at once, with exit code 1, when the step after so many comes. "
        "0: it does not.",
    )
    slow_step_every: str = Field(
        "",
        pattern=r"^([1-9]\d{0,8}:\d{1,8}(\.\d{1,3})?)?$",
        description="Fault for tests: N:MS makes every Nth step MS milliseconds longer. By default none is.",
    )
