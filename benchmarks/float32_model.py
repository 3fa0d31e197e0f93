"""The demo model as a Hugging Face directory in float32: for tests and benchmarks that want one.

Octavo serves the GGUF file itself. This is the same model with each quantized number written out.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from gguf import MODEL_ARCH, get_tensor_name_map
from gguf.quants import dequantize
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from executor_svc.checkpoint.gguf.model import GGUFModel
from executor_svc.checkpoint.gguf.weights import GGUFCheckpoint
from octavo.models.progress import ignore_progress
from octavo.models.store import exclusive_lock, prepare_model


def float32_model() -> Path:
    """Return the directory, made at the first call; it lies in the cache, beside the GGUF file that it is made of."""
    gguf_file = prepare_model("smollm2")
    directory = gguf_file.parent / "float32" / gguf_file.stem
    with exclusive_lock(gguf_file.with_name(".float32.lock"), ignore_progress):
        if not directory.exists():
            partial = gguf_file.with_name("float32.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            _write(gguf_file, partial)
            directory.parent.mkdir(exist_ok=True)
            partial.rename(directory)
    return directory


def _write(gguf_file: Path, directory: Path) -> None:
    model = GGUFModel(gguf_file)
    eos_token_ids = list(model.eos_token_ids())
    config = LlamaConfig(**model.config(), bos_token_id=1, eos_token_id=eos_token_ids, dtype="float32")
    config.save_pretrained(directory)
    generation = json.loads(gguf_file.with_name("generation_config.json").read_text(encoding="utf-8"))
    generation["eos_token_id"] = eos_token_ids
    (directory / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    for file in model.tokenizer_files():
        (directory / file.name).write_bytes(file.content)
    with torch.device("meta"):
        names = [name for name, _ in LlamaForCausalLM(config).model.named_parameters(prefix="model")]
    checkpoint = model.checkpoint()
    weights = {name: _float32(checkpoint, config, name) for name in names}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _float32(checkpoint: GGUFCheckpoint, config: LlamaConfig, name: str) -> torch.Tensor:
    """Return a tensor by its Hugging Face name."""
    stem = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers).get_name(name.removesuffix(".weight"))
    tensor = checkpoint.tensors[f"{stem}.weight"]
    stored = np.fromfile(tensor.path, np.uint8, tensor.num_bytes, offset=tensor.begin)
    values = dequantize(stored.reshape(*tensor.shape[:-1], -1), tensor.type).reshape(tensor.shape)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads:  # llama.cpp rotates neighbours of a head, transformers its halves
        values = values.reshape(heads, -1, 2, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
    return torch.from_numpy(np.ascontiguousarray(values, np.float32))
