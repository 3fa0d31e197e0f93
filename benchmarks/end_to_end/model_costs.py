"""What a model of dense layers costs: bytes that a token reads, operations that a workload needs."""

import json
import math
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.result import Model
from benchmarks.end_to_end.workloads import Workload
from executor_svc.checkpoint.gguf.config import build_config
from executor_svc.checkpoint.gguf.files import read_files

_TABLES = ("embed_tokens.weight", "lm_head.weight", "token_embd.weight", "output.weight")


def model_costs(path: Path) -> Model:
    """Count the parameters of a Hugging Face directory or a GGUF file, and the operations of a token."""
    config: dict[str, Any]
    if path.is_file():
        metadata, tensors = read_files(path)
        config = dict(build_config(metadata, tensors))
        sizes = {name: math.prod(tensor.shape) for name, tensor in tensors.items()}
    else:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        sizes = _parameter_counts(path)
    vocabulary = config["vocab_size"] * config["hidden_size"]
    tables = [size for name, size in sizes.items() if name.endswith(_TABLES)]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return Model(
        name=path.stem if path.is_file() else path.name,
        num_parameters=sum(sizes.values()),
        vocab_size=config["vocab_size"],
        prefill_flops=2 * (sum(sizes.values()) - sum(tables)),
        head_flops=2 * vocabulary,
        attention_flops=4 * config["num_hidden_layers"] * heads * head_dim,
    )


def _parameter_counts(directory: Path) -> dict[str, int]:
    """Read the headers of the weights' files."""
    counts: dict[str, int] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        counts |= {name: math.prod(entry["shape"]) for name, entry in header.items()}
    return counts


def workload_flops(model: Model, workload: Workload) -> int:
    """Return the operations that a workload needs at least: a prefix that requests share is computed once."""
    total = 0
    for index, shape in enumerate(workload.shapes):
        computed = shape.prompt_tokens + shape.output_tokens - 1  # the last token is not read again
        begin = shape.shared_tokens if index else 0
        pairs = computed * (computed + 1) // 2 - begin * (begin + 1) // 2
        total += (computed - begin) * model.prefill_flops + shape.output_tokens * model.head_flops
        total += pairs * model.attention_flops
    return total
