"""`no_repeat_ngram_size` from end to end: the tokens of transformers, greedy and of beams, with drafts and without."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.client import Client
from tests.numerics.architectures import save_tiny_architecture
from tests.numerics.encoder_decoders import FAMILIES
from tests.numerics.real_model import RealModel
from tests.support.stack import running_stack

BART = "BartForConditionalGeneration"
MODELS: Mapping[str, Mapping[str, Any]] = {"LlamaForCausalLM": {}, BART: FAMILIES[BART]}
# What repeats itself, so that prompt lookup drafts what must not come.
PROMPTS = [[5, 6, 7, 8] * 4, [3, 3, 3, 3, 3], [9, 8, 7, 6, 5, 4]]
NUM_TOKENS = 24
START = 7
NO_IDS = dict.fromkeys(("eos_token_id", "forced_eos_token_id", "forced_bos_token_id"))


@pytest.mark.parametrize("speculate", ["off", "on"])
@pytest.mark.parametrize("name", MODELS)
async def test_tokens_are_those_of_transformers(tmp_path: Path, name: str, speculate: str) -> None:
    reference = save_tiny_architecture(tmp_path, name, MODELS[name])
    is_encoded = reference.config.is_encoder_decoder
    # The size in the file is that of requests without one.
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"decoder_start_token_id": START, "no_repeat_ngram_size": 3})
    )
    worker = RealModel(tmp_path, 8, 64, max_num_seqs=16, max_model_len=64).new_worker()
    async with running_stack(worker, speculate=speculate) as stack, Client(stack.address) as client:
        for prompt in PROMPTS:
            found: dict[tuple[int, int], list[list[int]]] = {}
            for size, width in ((0, 0), (1, 0), (2, 0), (3, 0), (2, 3), (3, 3)):
                theirs = reference.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    no_repeat_ngram_size=size,
                    num_beams=width or 1,
                    num_return_sequences=width or 1,
                    max_new_tokens=NUM_TOKENS,
                    do_sample=False,
                    pad_token_id=1,
                    use_cache=False,
                    **({"decoder_start_token_id": START} if is_encoded else {}),
                    **NO_IDS,
                )
                expected = theirs[:, 1 if is_encoded else len(prompt) :].tolist()
                way: dict[str, Any] = {"beam_width": width, "n": width} if width else {"temperature": 0.0}
                asked: dict[str, Any] = {} if size == 3 else {"no_repeat_ngram_size": size}
                answer = await client.generate(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, **way, **asked)
                assert [list(output.token_ids) for output in answer.outputs] == expected, (size, width)
                found[size, width] = expected
            assert len({str(found[size, 0]) for size in (0, 1, 2, 3)}) > 2, "the sizes decide nothing"
        assert (stack.engine.meter.num_drafts > 0) is (speculate == "on")
