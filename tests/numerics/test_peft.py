"""Adapters that peft makes and saves: logits and greedy tokens are those of peft on transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo_shared.errors import ModelLoadError
from tests.numerics.architectures import save_tiny_architecture
from tests.numerics.family_architectures import FAMILY_ARCHITECTURES
from tests.numerics.test_adapters import FAMILIES, loaded, logits_of, tokens

peft: Any = pytest.importorskip("peft", reason="peft is not installed")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers. to:UserWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning"),
]

CONFIGS: dict[str, dict[str, Any]] = {
    "rank 4": {"r": 4, "lora_alpha": 8},
    "rank 16": {"r": 16, "lora_alpha": 4, "use_rslora": True},
    "rank 64": {"r": 64, "lora_alpha": 64},
    "ranks by module": {
        "r": 8,
        "rank_pattern": {"mlp.down_proj": 32, "dense_4h_to_h": 32},
        "alpha_pattern": {"o_proj": 4, "dense": 4},
    },
}


def with_adapter(directory: Path, model: Any, seed: int, **config: Any) -> Any:
    """Return peft's form of a model with a random adapter, which is saved there."""
    torch.manual_seed(seed)
    made = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", **config)).eval()
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.3 / config["r"] ** 0.25)
    made.save_pretrained(directory)
    return made


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_greedy_tokens_are_those_of_peft(name: str, kind: str, tmp_path: Path) -> None:
    reference = save_tiny_architecture(tmp_path / "model", name, FAMILY_ARCHITECTURES[name])
    model, backend, slots = loaded(tmp_path / "model")
    prompt = tokens(37, seed=1)
    base = reference(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
    changed = with_adapter(tmp_path / "adapter", reference, 2, **CONFIGS[kind])
    slots.load(3, slots.read(tmp_path / "adapter"))

    expected = changed(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
    assert (expected - base).abs().max() > 0.05 * base.abs().max(), "it changes the model"
    actual = logits_of(model, backend, slots, prompt, 3, 16, is_composed=False)
    assert (actual - expected).abs().max() < 2e-4 * expected.abs().max()

    for _ in range(8):
        last = changed(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1]
        actual = logits_of(model, backend, slots, prompt, 3, 16, is_composed=False)[-1]
        assert actual.argmax() == last.argmax()
        prompt = [*prompt, int(last.argmax())]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens.base_layer.weight: embeddings or a head"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head.base_layer.weight: embeddings or a head"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "sets modules_to_save"),
        ({"target_modules": ["q_proj"], "use_dora": True}, "sets use_dora"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [1]}, "sets trainable_token_indices"),
    ],
    ids=["embeddings", "head", "modules", "DoRA", "tokens"],
)
def test_what_peft_saves_beside_linear_layers_is_refused_by_name(
    config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    name = "LlamaForCausalLM"
    reference = save_tiny_architecture(tmp_path / "model", name, FAMILY_ARCHITECTURES[name])
    _, _, slots = loaded(tmp_path / "model")
    peft.get_peft_model(reference, peft.LoraConfig(**config)).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ModelLoadError, match=said):
        slots.read(tmp_path / "adapter")
