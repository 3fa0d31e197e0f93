"""The model families: each file reads a config.json into a `ModelConfig`. To add one, see CONTRIBUTING.md."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from executor_svc.checkpoint.model_files import refuse_quantized
from executor_svc.checkpoint.scaled_codes import read_codes
from executor_svc.models.config import ModelConfig
from executor_svc.models.families.bart import read_bart, read_marian, read_mbart, read_pegasus
from executor_svc.models.families.deepseek import read_deepseek_v2, read_deepseek_v3, read_dots1, read_glm4_moe_lite
from executor_svc.models.families.gemma import (
    read_gemma,
    read_gemma2,
    read_gemma3,
    read_gemma4,
    read_gemma4_unified,
)
from executor_svc.models.families.glm import read_glm, read_glm4, read_glm4_moe
from executor_svc.models.families.gpt_oss import read_gpt_oss
from executor_svc.models.families.granite import read_granite, read_granite_hybrid
from executor_svc.models.families.layer_norm import read_bloom, read_mpt, read_opt
from executor_svc.models.families.layer_norm_rotary import read_nemotron, read_stablelm, read_starcoder2
from executor_svc.models.families.lfm2 import read_lfm2, read_lfm2_moe
from executor_svc.models.families.llama import (
    read_arcee,
    read_cwm,
    read_ernie4_5,
    read_llama,
    read_ministral,
    read_ministral3,
    read_mistral,
    read_mixtral,
    read_phi3,
    read_qwen2,
    read_qwen2_moe,
    read_qwen3,
    read_qwen3_moe,
    read_seed_oss,
    read_smollm3,
)
from executor_svc.models.families.nemotron import read_nemotron_h
from executor_svc.models.families.qwen_hybrid import read_qwen3_5, read_qwen3_5_moe, read_qwen3_next
from executor_svc.models.families.t5 import read_mt5, read_t5
from executor_svc.models.fields import ConfigFields, refuse_absurd_numbers
from octavo_shared.errors import ModelLoadError, UnknownArchitectureError, UnsupportedModelError

FAMILIES: Final[Mapping[str, Callable[[ConfigFields], ModelConfig]]] = MappingProxyType(
    {
        "ArceeForCausalLM": read_arcee,
        "BartForConditionalGeneration": read_bart,
        "BloomForCausalLM": read_bloom,
        "CwmForCausalLM": read_cwm,
        "DeepseekV2ForCausalLM": read_deepseek_v2,
        "DeepseekV3ForCausalLM": read_deepseek_v3,
        "Dots1ForCausalLM": read_dots1,
        "Ernie4_5ForCausalLM": read_ernie4_5,
        "GemmaForCausalLM": read_gemma,
        "Gemma2ForCausalLM": read_gemma2,
        "Gemma3ForCausalLM": read_gemma3,
        "Gemma4ForCausalLM": read_gemma4,
        "Gemma4UnifiedForCausalLM": read_gemma4_unified,
        "GlmForCausalLM": read_glm,
        "Glm4ForCausalLM": read_glm4,
        "Glm4MoeForCausalLM": read_glm4_moe,
        "Glm4MoeLiteForCausalLM": read_glm4_moe_lite,
        "GptOssForCausalLM": read_gpt_oss,
        "GraniteForCausalLM": read_granite,
        "GraniteMoeHybridForCausalLM": read_granite_hybrid,
        "Lfm2ForCausalLM": read_lfm2,
        "Lfm2MoeForCausalLM": read_lfm2_moe,
        "LlamaForCausalLM": read_llama,
        "MBartForConditionalGeneration": read_mbart,
        "MT5ForConditionalGeneration": read_mt5,
        "PegasusForConditionalGeneration": read_pegasus,
        "MarianMTModel": read_marian,
        "MinistralForCausalLM": read_ministral,
        "Ministral3ForCausalLM": read_ministral3,
        "MistralForCausalLM": read_mistral,
        "MixtralForCausalLM": read_mixtral,
        "MPTForCausalLM": read_mpt,  # so MosaicML's own checkpoints call it
        "MptForCausalLM": read_mpt,
        "NemotronForCausalLM": read_nemotron,
        "NemotronHForCausalLM": read_nemotron_h,
        "OPTForCausalLM": read_opt,
        "Phi3ForCausalLM": read_phi3,
        "Qwen2ForCausalLM": read_qwen2,
        "Qwen2MoeForCausalLM": read_qwen2_moe,
        "Qwen3ForCausalLM": read_qwen3,
        "Qwen3MoeForCausalLM": read_qwen3_moe,
        "Qwen3NextForCausalLM": read_qwen3_next,
        "Qwen3_5ForCausalLM": read_qwen3_5,
        "Qwen3_5MoeForCausalLM": read_qwen3_5_moe,
        "SeedOssForCausalLM": read_seed_oss,
        "SmolLM3ForCausalLM": read_smollm3,
        "StableLmForCausalLM": read_stablelm,
        "Starcoder2ForCausalLM": read_starcoder2,
        "T5ForConditionalGeneration": read_t5,
    }
)

# Names of the same decoders as embedders, stored without a head. Gemma3Model, Gemma4Model and those of Qwen3.5 have a
# vision tower; MPT's names differ.
_OTHER_NAMES: Final = ("Gemma3", "Gemma4", "MPT", "Mpt", "Qwen3_5")
_WITHOUT_HEAD: Final[Mapping[str, str]] = MappingProxyType(
    {name.replace("ForCausalLM", "Model"): name for name in FAMILIES if not name.startswith(_OTHER_NAMES)}
)


def parse_config(values: Mapping[str, object], source: Path) -> ModelConfig:
    """Read the contents of config.json.

    Raises:
        UnknownArchitectureError: there is no such family.
        UnsupportedModelError: a value asks for what the family does not have.
        ModelLoadError: a value is missing or has the wrong type, or the weights are quantized by a method that is not
            read.
    """
    codes = read_codes(values, source)
    if codes is None:
        refuse_quantized(values, source)
        return _parse(values, source)
    try:
        return _parse(values, source)
    except UnsupportedModelError as reason:
        raise ModelLoadError(
            f"the weights of {source.parent} are {codes.kind.name}, which needs Octavo's own decoder; but {reason}"
        ) from reason


def _parse(values: Mapping[str, object], source: Path) -> ModelConfig:
    refuse_absurd_numbers(values, source)
    fields = ConfigFields(values, source)
    family = _WITHOUT_HEAD.get(fields.architecture, fields.architecture)
    if family not in FAMILIES:
        raise UnknownArchitectureError(
            f"{source} has the architecture {fields.architecture}, which Octavo's own decoder does not have"
        )
    fields.refuse({"is_causal": True})
    config = FAMILIES[family](fields)
    if family == fields.architecture or config.tie_word_embeddings:
        return config
    return replace(config, tie_word_embeddings=True, has_head=False)
