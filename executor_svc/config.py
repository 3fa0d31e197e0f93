"""The settings of the executor and of the fake executor; the scheme is in `octavo_shared/process/config.py`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from octavo_shared.process.service_config import ADDRESS_PATTERN, ServiceConfig

NamedPath = Annotated[str, Field(pattern=r"^[^=,]+=.+$")]


class _BatchConfig(ServiceConfig):
    """What limits a batch, with a model or without."""

    listen: str = Field(
        "127.0.0.1:50061",
        pattern=ADDRESS_PATTERN,
        description=(
            "Listen address for the scheduler, host:port. Port 0 picks a free port. To serve other machines, also set "
            "--tls-cert and --tls-client-ca."
        ),
    )
    max_num_seqs: int = Field(
        256,
        ge=1,
        le=2**16,
        description=(
            "Maximum number of live sequences. Each uses one slot of the batch table. With a hybrid model, such as "
            "Qwen3.5, a slot takes many MiB."
        ),
    )
    max_num_batched_tokens: int = Field(
        2048, ge=1, description="Maximum number of tokens per step. Limits the time and memory of a step."
    )

    max_grammar_slots: int = Field(
        256,
        ge=0,
        le=2**16,
        description=(
            "Maximum number of grammars that outputs follow at a time; equal ones count once. 0: no grammars. Needs "
            "llguidance."
        ),
    )

    max_draft_tokens: int = Field(
        7,
        ge=0,
        le=63,
        description=(
            "Maximum number of draft tokens of a sequence in a step. A CPU with the C kernels drafts where the "
            "scheduler allows it (--speculate); drafts change the speed, no output. 0: none."
        ),
    )

    lora: tuple[NamedPath, ...] = Field(
        (),
        description=(
            "Comma-separated LoRA adapters, NAME=PATH, which schedulers serve as models of these names: folders as "
            "peft writes them (of the fake executor: files of any bytes)."
        ),
    )
    lora_dir: tuple[str, ...] = Field(
        (),
        description="Comma-separated folders: a load may name adapters in them by path. Nothing else is ever read.",
    )
    max_adapter_slots: int = Field(
        8, ge=1, le=1024, description="Maximum number of adapters at a time. Without --lora and --lora-dir: none."
    )

    weights_dir: tuple[str, ...] = Field(
        (),
        description=(
            "Comma-separated folders: a scheduler's operators may load new weights of the model from folders in them; "
            "those that come over the network are kept in the first one until they are in place. Links out of them are "
            "refused. Empty: weights stay as they are."
        ),
    )

    role: Literal["both", "prefill", "decode"] = Field(
        "both",
        description=(
            "What a scheduler places here while other executors of its fleet take the rest: prefill, prompts with more "
            "tokens to compute than its --prefill-role-tokens, until their first token; decode, everything else."
        ),
    )

    transfer_address: str = Field(
        "",
        pattern=rf"^$|{ADDRESS_PATTERN}",
        description=(
            "Address by which other executors send KV cache blocks to this one, host:port. By default the listen "
            "address, or, if that stands for all addresses, the host by which the scheduler reaches this executor."
        ),
    )

    max_transfers: int = Field(
        16,
        ge=0,
        le=2**16,
        description=(
            "Maximum number of transfers of KV cache blocks, to and from other executors, that are pending at a time. "
            "0: none."
        ),
    )

    @property
    def num_adapter_slots(self) -> int:
        """Adapters that are loaded at a time: none where none may be read."""
        return self.max_adapter_slots if self.lora or self.lora_dir else 0

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
        description="The model: a Hugging Face directory, a GGUF file, or a hub id such as Qwen/Qwen3-0.6B, with or "
        "without @REVISION; for a GGUF file of the hub with :QUANTIZATION, such as :Q4_0, or /FILE.gguf; or "
        "ollama:NAME:TAG."
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="Device that runs the model. cpu works everywhere.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description=(
            "Data type of weights, and of the KV cache unless kv_cache_dtype differs. auto: float32 on a CPU; on a GPU "
            "the type in config.json, else float32. bfloat16 and float16 use half the memory of float32."
        ),
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8_e4m3", "fp8_e5m2"] = Field(
        "auto",
        description=(
            "Data type of the KV cache. auto: bfloat16 with compute_dtype bfloat16, else as in dtype. 16 or 8 bits "
            "instead of float32's 32 hold two to four times the tokens, are faster where contexts are long, and "
            "change outputs a little. int8 has a scale for each token and KV head; the FP8 formats use the "
            "checkpoint's k_scale and v_scale, else 1. On a GPU the attention backends triton and torch have all of "
            "them, the others only the model's dtype."
        ),
    )
    max_adapter_rank: int = Field(
        64,
        ge=1,
        le=2**10,
        description="Largest rank of a LoRA adapter. The KV cache leaves room for --max-adapter-slots adapters of it.",
    )
    quantization: Literal["none", "bfloat16", "int8", "int8-a8", "int4"] = Field(
        "none",
        description=(
            "Weight quantization: 16, 8 or 4 bits instead of float32's 32 use less memory, are faster on a CPU, and "
            "change outputs a little. int8-a8 and int4 also round activations to 8 bits, which is faster still. none: "
            "as in dtype; on a CPU a bfloat16 checkpoint stays in bfloat16, without loss. On a GPU only int8 is "
            "available, through torchao; it saves memory, not time."
        ),
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description=(
            "Data type that a CPU multiplies in; sums are float32. bfloat16: weights, activations, and what "
            "attention multiplies are rounded, up to twice as fast with AVX-512 BF16, and outputs change a little. "
            "Weights in 8 or 4 bits keep their own products. On a GPU, use --dtype."
        ),
    )
    allow_requantization: bool = Field(
        False,
        description=(
            "Round weights to int8-a8 where no format holds them exactly: types of a GGUF file such as IQ2_XS, and "
            "codes of safetensors without the kernels in C. The log has the error. Without it such a file is refused."
        ),
    )
    cpu_kernels: Literal["auto", "native", "torch"] = Field(
        "auto",
        description=(
            "Kernels for float32 on a CPU. native: C, compiled at the first start if they were not built ahead. "
            "auto: native if AVX2 and the kernels or a C compiler are available, else torch."
        ),
    )
    draft_method: Literal["prompt-lookup", "mtp"] = Field(
        "prompt-lookup",
        description=(
            "How drafts are proposed. prompt-lookup: what followed earlier in the sequence on the tokens that end it. "
            "mtp: by the model's own head for multi-token prediction, as Qwen3.5 has one; it takes memory for a layer "
            "more, and needs the kernels in C."
        ),
    )
    numerics: Literal["fast", "invariant"] = Field(
        "fast",
        description=(
            "invariant: batch-invariant kernels; an output depends on its request alone, bit for bit. The executor "
            "refuses to start if that is impossible. fast: the fastest kernels for this device; on a CPU the kernels "
            "in C are batch-invariant too."
        ),
    )
    attention_backend: Literal["auto", "triton", "flash_attn", "xformers", "torch"] = Field(
        "auto",
        description=(
            "Attention kernels. auto: on a GPU flash-attn 3 if installed, else Triton, else torch; on a CPU as set by "
            "cpu_kernels. flash_attn and xformers are libraries for float16 and bfloat16."
        ),
    )
    block_size_tokens: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Block size of the KV cache, in tokens. By default the attention backend's preference, usually 16.",
    )
    cuda_graphs: Literal["auto", "off"] = Field(
        "auto",
        description=(
            "auto: capture CUDA graphs at the start and replay them for decode-only steps, if model and backend allow "
            "it. off: faster start, slower small batches."
        ),
    )
    tp: int = Field(
        1,
        ge=1,
        description=(
            "Tensor-parallel size: the number of processes (ranks) that share the model. They are started on this "
            "machine, unless a launcher such as torchrun starts them."
        ),
    )
    num_threads: int | None = Field(
        None,
        ge=1,
        description=(
            "CPU threads per rank. By default the ranks share the physical cores that this process may use, up to its "
            "container's CPU quota. The kernels in C use fewer while other work needs the cores."
        ),
    )
    kv_cache_gib: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description=(
            "KV cache size per rank, in GiB, saved states included. By default, on a CPU: a quarter of the machine's "
            "memory, or less if less is free. On a GPU: what gpu_memory_utilization leaves."
        ),
    )
    state_cache_gib: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description=(
            "How much of the KV cache, in GiB per rank, is for saved states of a model whose layers keep states. By "
            "default a quarter, and no more states than blocks. With num_device_blocks it comes on top. 0: none is "
            "saved."
        ),
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description=(
            "Fraction of GPU memory to use: for the weights, for the largest step (measured at the start), and the "
            "rest for the KV cache."
        ),
    )
    num_device_blocks: int | None = Field(
        None,
        ge=1,
        description="Number of KV cache blocks. By default as many as fit in kv_cache_gib beside saved states.",
    )
    host_cache_gib: float = Field(
        0.5,
        ge=0,
        allow_inf_nan=False,
        description=(
            "Host cache, in GiB, for the blocks and saved states of preempted sequences and, in the rest, for copies "
            "of cached prefixes. On a CPU it is allocated on first use. 0: no swapping; preempted sequences are "
            "recomputed."
        ),
    )
    num_host_blocks: int | None = Field(
        None, ge=0, description="Number of host cache blocks. By default as many as fit in host_cache_gib."
    )
    pooling: Literal["auto", "off", "mean", "cls", "last"] = Field(
        "auto",
        description=(
            "How texts become embeddings. auto: as modules.json of the model directory says; for an encoder without "
            "one, the mean of its tokens. mean, cls, last: the mean of all tokens, the first or the last one, scaled "
            "to length 1; with it a model that generates computes embeddings too. off: no embeddings."
        ),
    )
    max_model_len: int | None = Field(
        None,
        ge=1,
        description=(
            "Maximum sequence length in tokens, prompt and output together. By default from the model's config.json."
        ),
    )


class FakeConfig(_BatchConfig):
    """Run the fake executor: the same service without a model. It checks every block table."""

    service: ClassVar[str] = "fake"
    program: ClassVar[str] = "python -m executor_svc.fake"

    block_size_tokens: int = Field(16, ge=1, le=1024, description="Block size of the KV cache, in tokens.")
    num_device_blocks: int = Field(4096, ge=1, description="Number of device blocks. The default holds 65,536 tokens.")
    num_host_blocks: int = Field(0, ge=0, description="Number of host blocks, for swapping. 0: no swapping.")
    max_model_len: int = Field(8192, ge=2, description="Maximum sequence length in tokens, prompt and output together.")
    step_ms: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="Minimum time of a step, in ms. 0: as fast as possible."
    )
    token_us: float = Field(0.0, ge=0, allow_inf_nan=False, description="Extra step time per token, in us.")
    eos_probability: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Probability that a token ends its sequence. 0: outputs always have the requested length.",
    )
    script: str = Field(
        "",
        description=(
            'File of JSON lines {"when": "...", "say": "..."}: a prompt is answered with the text of the row whose '
            "`when` stands last in it; a row without `when` answers all others. Empty: outputs are noise."
        ),
    )
    sliding_window_tokens: int = Field(
        0,
        ge=0,
        description=(
            "Sliding window: how many of the last tokens attention reads; the scheduler frees the older ones. 0: no "
            "window."
        ),
    )
    states: bool = Field(
        False,
        description=(
            "Be a model with a state beside its KV cache. A prefix is found again, and a request swapped, only with a "
            "saved state."
        ),
    )
    num_device_states: int = Field(
        0, ge=0, description="Number of saved states on the device, with `--states`. 0: none is saved."
    )
    num_host_states: int = Field(
        0, ge=0, description="Number of saved states on the host, for swapping, with `--states`. 0: no swapping."
    )
    pooling: bool = Field(False, description="Compute embeddings and scores too: a hash of the token ids.")
    pooling_only: bool = Field(
        False, description="Compute embeddings and scores, and generate nothing, as an encoder does. It has no blocks."
    )
    fail_step_every: int = Field(
        0, ge=0, description="Fault injection: every Nth step fails, and the process keeps running. 0: off."
    )
    hang_step_every: int = Field(
        0,
        ge=0,
        description="Fault injection: the Nth step hangs while heartbeats are still answered. 0: off.",
    )
    exit_after_steps: int = Field(
        0,
        ge=0,
        description="Fault injection: the step after N steps ends the process with exit code 1. 0: off.",
    )
    slow_step_every: str = Field(
        "",
        pattern=r"^([1-9]\d{0,8}:\d{1,8}(\.\d{1,3})?)?$",
        description="Fault injection: N:MS makes every Nth step MS milliseconds longer. Off by default.",
    )
    nan_token_id: int = Field(
        -1,
        ge=-1,
        le=258,
        description="Fault injection: after a token with this id the logits are NaN. Off by default.",
    )
