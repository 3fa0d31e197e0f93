"""Checkpoints with quantized weights: refused by the name of their format, before anything else is looked at.

Both ways to run a model read plain safetensors only: our own code and transformers' code.
"""

from collections.abc import Mapping
from pathlib import Path

from executor_svc.checkpoint.model_directory import read_json_object
from executor_svc.checkpoint.model_files import MODEL_OPT_FILE
from octavo_shared.errors import ModelLoadError

# Where tools leave their settings in config.json: transformers and most others, llm-compressor once, MLX.
CONFIG_FIELDS = ("quantization_config", "compression_config", "quantization")


def refuse_quantized(values: Mapping[str, object], source: Path) -> None:
    """Refuse a model whose weights are quantized.

    Args:
        values: The contents of config.json.
        source: That file.

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
            return str(method)
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
