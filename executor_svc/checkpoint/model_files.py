"""Which files of a directory or of a hub repository make a model, and why some make none: one rule for both.

Files are known by their names here. `executor_svc/checkpoint/model_location.py` looks into a directory,
`executor_svc/checkpoint/hub_model.py` asks the hub.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from executor_svc.checkpoint.model_directory import (
    INDEX_FILE,
    POOLING_FILE_NAMES,
    SINGLE_FILE,
    TOKENIZER_FILE_NAMES,
    read_json_object,
)
from octavo_shared.errors import ModelLoadError

FORMAT = f"config.json and {SINGLE_FILE} (or shards with {INDEX_FILE})"
# With these bytes a GGUF file begins.
GGUF_MAGIC = b"GGUF"
# Weights in formats that are not read. Files of a training run have these names too.
WEIGHT_SUFFIXES = (".bin", ".gguf", ".h5", ".msgpack", ".nemo", ".onnx", ".pt", ".pth", ".safetensors")
TRAINING_FILES = ("optimizer", "rng_state", "scheduler", "training_args")

# NVIDIA's ModelOpt says here how it has quantized a model.
MODEL_OPT_FILE = "hf_quant_config.json"
# What is read beside the weights; all but config.json may be missing.
SMALL_FILES = (MODEL_OPT_FILE, *TOKENIZER_FILE_NAMES, *POOLING_FILE_NAMES)


def why_no_model(file_names: Sequence[str], directories_with_config: Sequence[str] = ()) -> str | None:
    """Return what is wrong with files that make no model, as the end of a sentence about them; None: they make one.

    Args:
        file_names: All of them, sorted.
        directories_with_config: Directories beside them that hold a config.json, as `--model` would take them.
    """
    if "config.json" not in file_names:
        return _why_no_config(file_names, directories_with_config)
    if SINGLE_FILE not in file_names and INDEX_FILE not in file_names:
        return _why_no_weights(file_names)
    return None


def weight_files(file_names: Collection[str], index: object) -> list[str]:
    """Return the names of the files with the weights.

    Args:
        file_names: All files of the model; they make one.
        index: What INDEX_FILE holds; only read if there is no SINGLE_FILE. Loading the weights checks it.
    """
    if SINGLE_FILE in file_names:
        return [SINGLE_FILE]
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    return sorted({str(name) for name in weight_map.values()}) if isinstance(weight_map, dict) else []


def _why_no_config(file_names: Sequence[str], directories_with_config: Sequence[str]) -> str:
    if not file_names:
        return "is empty"
    if gguf := [name for name in file_names if name.endswith(".gguf")]:
        one = "give that file" if len(gguf) == 1 else "give one of these files"
        return f"contains {', '.join(gguf[:3])} and no config.json: {one}"
    if "adapter_config.json" in file_names:
        return "is an adapter (such as LoRA), not a model: merge it into its base model first"
    if "params.json" in file_names:
        return f"has params.json, its publisher's own format: Octavo needs the Hugging Face format, with {FORMAT}"
    if len(directories_with_config) == 1:
        return f"has no config.json, but {directories_with_config[0]} has one: use that for --model"
    if directories_with_config:
        return f"has no config.json; {', '.join(directories_with_config[:3])} have one: use one of them for --model"
    return "has no config.json"


def _why_no_weights(file_names: Sequence[str]) -> str:
    others = [
        name for name in file_names if name.endswith(WEIGHT_SUFFIXES) and not name.startswith((*TRAINING_FILES, "."))
    ]
    if others:
        return (
            f"has its weights as {others[0]}, which Octavo does not read; it needs {SINGLE_FILE} (or shards with "
            f"{INDEX_FILE}), as written by save_pretrained of transformers"
        )
    return f"has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}"


# Where tools leave their settings in config.json: transformers and most others, llm-compressor once, MLX.
CONFIG_FIELDS = ("quantization_config", "compression_config", "quantization")


def refuse_quantized(values: Mapping[str, object], source: Path) -> None:
    """Refuse a model whose weights are quantized.

    Raises: ModelLoadError: they are.
    """
    method = _quantization(values) or _model_opt(source.parent / MODEL_OPT_FILE)
    if method is not None:
        raise ModelLoadError(
            f"the weights of {source.parent} are quantized with {method}, which Octavo does not read; use the "
            "unquantized checkpoint, with --quantization int8 or int4 if memory is short"
        )


def _quantization(values: Mapping[str, object]) -> str | None:
    """Return the method that config.json names; None: the weights are plain."""
    for field in CONFIG_FIELDS:
        settings = values.get(field)
        if not isinstance(settings, dict) or not settings:
            continue
        if settings.get("kv_cache_scheme") and settings.get("config_groups") == {}:
            continue  # of compressed-tensors: the weights are plain, and there are scales for an FP8 cache
        if method := settings.get("quant_method"):
            kind = settings.get("format")
            return f"{method} ({kind})" if isinstance(kind, str) else str(method)
        if settings.get("load_in_4bit") or settings.get("load_in_8bit"):  # before it said so
            return "bitsandbytes"
        return "MLX" if field == "quantization" else f"a method that its {field} does not name"
    return None


def _model_opt(path: Path) -> str | None:
    if not path.is_file():
        return None
    settings = read_json_object(path).get("quantization")
    algorithm = settings.get("quant_algo") if isinstance(settings, dict) else None
    return "modelopt" if algorithm is None else f"modelopt ({algorithm})"
