"""Which architectures the executor runs, as a Markdown table: tiny random models against plain transformers.

    python -m benchmarks.architectures [ARCHITECTURE ...]

Logits are compared at every position of a prompt, and greedy tokens of prompts that are decoded together, in float32 on
the CPU. The exit code is 1 if an architecture differs.
"""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers

from executor_svc.models.language_model import LanguageModel
from executor_svc.models.transformers_model import TransformersModel
from octavo.bench.provenance import markdown_table
from octavo_shared.errors import ModelLoadError
from tests.numerics import encoder_decoders
from tests.numerics.architectures import (
    ARCHITECTURES,
    compare_with_transformers,
    load_architecture,
    save_tiny_architecture,
)
from tests.numerics.encoder_decoders import FAMILIES, compare_on_the_cache, load

# What people download at the end of 2026; these come first.
MODELS: Mapping[str, str] = {
    "Qwen3ForCausalLM": "Qwen3 0.6B to 32B, Qwen3-Embedding",
    "Qwen3MoeForCausalLM": "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
    "GptOssForCausalLM": "gpt-oss-20b, gpt-oss-120b",
    "LlamaForCausalLM": "Llama 3.1 to 3.3, SmolLM2",
    "Gemma3ForCausalLM": "Gemma 3 (text)",
    "Gemma4ForCausalLM": "Gemma 4 (text)",
    "MistralForCausalLM": "Mistral 7B, Mistral Small 3",
    "Ministral3ForCausalLM": "Ministral 3",
    "Phi3ForCausalLM": "Phi-4, Phi-4-mini",
    "Qwen2ForCausalLM": "Qwen2.5",
    "MixtralForCausalLM": "Mixtral",
    "Glm4MoeForCausalLM": "GLM-4.5, GLM-4.6",
    "Glm4MoeLiteForCausalLM": "GLM-4.7-Flash",
    "MiniMaxM2ForCausalLM": "MiniMax-M2",
    "SmolLM3ForCausalLM": "SmolLM3",
    "Olmo3ForCausalLM": "OLMo 3",
    "SeedOssForCausalLM": "Seed-OSS",
    "GraniteForCausalLM": "Granite 3",
    "GraniteMoeHybridForCausalLM": "Granite 4.0",
    "T5ForConditionalGeneration": "T5",
    "Flan-T5": "Flan-T5, of T5's architecture",
    "MT5ForConditionalGeneration": "mT5",
    "BartForConditionalGeneration": "BART",
    "MBartForConditionalGeneration": "mBART-50",
    "PegasusForConditionalGeneration": "Pegasus",
    "MarianMTModel": "OPUS-MT",
}

MAX_LOGIT_DIFFERENCE = 1e-5
MAX_GREEDY_DISTANCE = 1e-4


def table_row(name: str) -> tuple[list[str], bool]:
    """Return the row of an architecture, and whether it equals transformers."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            if name in FAMILIES:
                model: LanguageModel
                model, backend, reference = load(Path(directory), name)
                comparison = compare_on_the_cache(model, backend, reference)
            else:
                reference = save_tiny_architecture(Path(directory), name, ARCHITECTURES[name])
                model, backend = load_architecture(Path(directory))
                comparison = compare_with_transformers(model, backend, reference)
        except ModelLoadError as error:
            return [name, MODELS.get(name, ""), f"refused: {error}", "", ""], False
    code = "transformers" if isinstance(model, TransformersModel) else "family"
    has_same_tokens = comparison.greedy_distance < MAX_GREEDY_DISTANCE
    row = [
        name,
        MODELS.get(name, ""),
        code,
        f"{comparison.logit_difference:.0e}",
        "equal" if has_same_tokens else "differ",
    ]
    limit = encoder_decoders.MAX_LOGIT_DIFFERENCE if name in FAMILIES else MAX_LOGIT_DIFFERENCE
    return row, has_same_tokens and comparison.logit_difference < limit


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    names = sys.argv[1:] or [*MODELS, *(name for name in ARCHITECTURES if name not in MODELS)]
    if unknown := set(names) - set(ARCHITECTURES) - set(FAMILIES):
        sys.exit(f"tests/numerics/architectures.py and encoder_decoders.py have no {min(unknown)}")
    print(f"transformers {transformers.__version__}, torch {torch.__version__}\n")
    rows, are_equal = zip(*map(table_row, names), strict=True)
    difference = "largest difference of a logit, as a part of the largest logit"
    print(markdown_table(["architecture", "models", "code", difference, "greedy tokens"], rows, num_texts=5))
    print(f"\n{sum(are_equal)} of {len(names)} equal transformers.")
    sys.exit(not all(are_equal))


if __name__ == "__main__":
    main()
