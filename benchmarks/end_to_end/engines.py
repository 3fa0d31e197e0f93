"""Which engines there are, in which number formats, which of them this machine can run, and what a model costs them."""

import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from benchmarks.end_to_end.adapters.interface import Options
from benchmarks.end_to_end.result import Model
from benchmarks.end_to_end.workloads import Workload
from executor_svc.checkpoint.gguf.config import build_config
from executor_svc.checkpoint.gguf.files import read_files
from executor_svc.config import ExecutorConfig
from executor_svc.models.memory_needs import summarize_model

ROOT = Path(__file__).parents[2]
PEERS_FOLDER = ROOT / ".venv-bench"

# Engines are compared within a class: what an engine calls its formats differs.
CLASSES = ("float32", "bfloat16", "8 bits", "4 bits")
OURS = "Octavo"
# Files that both Octavo and llama.cpp load.
GGUF_TYPES = ("Q8_0", "Q4_0")
# Behind a quantization of ours: what activations and attention are then multiplied in.
IN_BFLOAT16 = " --compute-dtype bfloat16"
PRODUCTS = (OURS, "transformers", "llama.cpp", "OpenVINO", "vLLM")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine with one number format."""

    product: str  # as in tables
    number_format: str  # as the engine calls it
    number_class: str  # one of CLASSES
    adapter: str  # module in `adapters/`, and the class there
    # Of a weight of the layers and of one of the output head, where the size of a file does not say it.
    weight_bits: tuple[float, float] | None = None
    peer: str = ""  # folder of its environment in PEERS_FOLDER; "": it runs in ours
    workloads: tuple[str, ...] = ()  # the workloads that it runs; empty: all

    @property
    def name(self) -> str:
        """Unique among all engines."""
        return f"{self.product} {self.number_class if self.number_format == 'none' else self.number_format}"


def class_of(quantization: str) -> str:
    quantization = quantization.removesuffix(IN_BFLOAT16)
    if quantization in GGUF_TYPES:
        return f"{quantization[1]} bits"
    if quantization == "none":
        return "float32"
    bits = next((bits for bits in ("8", "4") if quantization.startswith(f"int{bits}")), None)
    return quantization if bits is None else f"{bits} bits"


def our_formats() -> tuple[str, ...]:
    """Return the values of the executor's setting `quantization`, some with bfloat16, and types of GGUF files."""
    formats: tuple[str, ...] = get_args(ExecutorConfig.model_fields["quantization"].annotation)
    return (*formats, *(f"{name}{IN_BFLOAT16}" for name in ("bfloat16", "int8-a8")), *GGUF_TYPES)


# With the float16 scales of groups of 32: one in int8-a8, and a minimum too in int4. There the output head is int8-a8,
# and so are the values, a 32nd of the weights in the demo model's layers.
_OUR_BITS = {
    "none": (32.0, 32.0),
    "bfloat16": (16.0, 16.0),
    "int8": (8.0, 8.0),
    "int8-a8": (8.5, 8.5),
    "int4": (5.1, 8.5),
    "Q8_0": (8.5, 8.5),
    "Q4_0": (5.0, 8.5),
}


def all_engines() -> list[EngineSpec]:
    """Return every engine that the benchmark knows, whether or not it is here."""
    ours = [
        EngineSpec(OURS, name, class_of(name), "octavo:OctavoStack", _OUR_BITS.get(name.removesuffix(IN_BFLOAT16)))
        for name in our_formats()
    ]
    return [
        *ours,
        EngineSpec(
            "transformers", "float32", "float32", "peers:TransformersGenerate", workloads=("W1", "W2", "P512", "P2000")
        ),
        EngineSpec("llama.cpp", "F32", "float32", "peers:LlamaCppServer", peer="llama.cpp"),
        EngineSpec("llama.cpp", "BF16", "bfloat16", "peers:LlamaCppServer", peer="llama.cpp"),
        EngineSpec("llama.cpp", "Q8_0", "8 bits", "peers:LlamaCppServer", peer="llama.cpp"),
        EngineSpec("llama.cpp", "Q4_0", "4 bits", "peers:LlamaCppServer", peer="llama.cpp"),
        EngineSpec("OpenVINO", "float32", "float32", "peers:OpenVinoGenAi", peer="openvino"),
        EngineSpec("OpenVINO", "bfloat16", "bfloat16", "peers:OpenVinoGenAi", (16.0, 16.0), peer="openvino"),
        EngineSpec("OpenVINO", "int8", "8 bits", "peers:OpenVinoGenAi", peer="openvino"),
        EngineSpec("OpenVINO", "int4", "4 bits", "peers:OpenVinoGenAi", peer="openvino"),
        EngineSpec("vLLM", "float32", "float32", "peers:VllmEngine", peer="vllm"),
        EngineSpec("vLLM", "bfloat16", "bfloat16", "peers:VllmEngine", (16.0, 16.0), peer="vllm"),
    ]


def file_engines(file: Path) -> list[EngineSpec]:
    """Return the engines that load a GGUF file as it is."""
    kind = summarize_model(file).formats[0]
    plain = {"F32": "float32", "F16": "float32", "BF16": "bfloat16"}
    number_class = plain.get(kind) or ("8 bits" if any(bits in kind for bits in "568") else "4 bits")
    return [
        EngineSpec(OURS, kind, number_class, "octavo:OctavoStack"),
        EngineSpec("llama.cpp", kind, number_class, "peers:LlamaCppServer", peer="llama.cpp"),
    ]


def peer_python(peer: str) -> Path:
    return PEERS_FOLDER / peer / "bin" / "python"


def llama_cpp_program(name: str) -> Path:
    return PEERS_FOLDER / "llama.cpp" / "build" / "bin" / name


def converted_model(peer: str, number_format: str) -> Path:
    """Return the demo model as a peer wants it: a directory, or a file for llama.cpp."""
    name = f"{peer}-{number_format}"
    return PEERS_FOLDER / "models" / (f"{name}.gguf" if peer == "llama.cpp" else name)


def model_path(spec: EngineSpec, model: Path) -> Path:
    """Return what an engine loads in the place of the Hugging Face directory; a GGUF file is loaded as it is."""
    if model.suffix == ".gguf":
        return model
    files = {"F32": "float32", "BF16": "bfloat16", "Q8_0": "int8", "Q4_0": "int4"}
    if spec.number_format in files:
        return converted_model("llama.cpp", files[spec.number_format])
    if spec.peer == "openvino":
        return converted_model(spec.peer, "float32" if spec.number_format == "bfloat16" else spec.number_format)
    return model


def why_missing(spec: EngineSpec, directory: Path) -> str | None:
    """Return why an engine cannot run here; None: it can."""
    program = llama_cpp_program("llama-server") if spec.product == "llama.cpp" else interpreter(spec)
    for path in (program, model_path(spec, directory)):
        if not path.exists():
            where = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
            return f"{where} is missing; make bench-peers makes it"
    return None


def interpreter(spec: EngineSpec) -> Path:
    """Return what runs the adapter: llama.cpp's needs no package, ours will do."""
    return Path(sys.executable) if spec.peer in ("", "llama.cpp") else peer_python(spec.peer)


def options_of(spec: EngineSpec, directory: Path, num_threads: int, max_tokens: int) -> Options:
    program = str(llama_cpp_program("llama-server")) if spec.product == "llama.cpp" else ""
    cores = sorted(os.sched_getaffinity(0))
    model = str(model_path(spec, directory))
    return Options(model, spec.number_format, num_threads, cores, max_tokens, program)


def weight_bytes(spec: EngineSpec, directory: Path, model: Model) -> int:
    """Return how many bytes of weights a token of one stream reads."""
    if spec.weight_bits is not None:
        of_layers, of_head = spec.weight_bits
        return int(model.prefill_flops / 2 * of_layers / 8 + model.head_flops / 2 * of_head / 8)
    path = model_path(spec, directory)
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for ending in ("safetensors", "bin") for file in path.glob(f"*model.{ending}"))


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
