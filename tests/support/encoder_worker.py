"""A fake executor of an encoder: its tokenizer has a template for texts and pairs, its files have prompts and sizes."""

import json
from dataclasses import replace
from typing import Any

from executor_svc.fake.tokenizer import fake_tokenizer_files
from executor_svc.fake.worker import FakeWorker
from octavo_shared.step_wire.executor_info import TokenizerFile

CLS, SEP = 256, 257


class EncoderWorker(FakeWorker):
    """Texts are `CLS text SEP`, and pairs `CLS first SEP second SEP`, whose second part is of type 1."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"has_pooling": True, "is_generative": False, "max_model_len": 512, **options})

    def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
        """Return the fake's files, with the template, and those of sentence-transformers."""
        [tokenizer, *others] = fake_tokenizer_files()
        content = json.loads(tokenizer.content)
        content["post_processor"] = _template()
        sentence_transformers = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": None}
        return (
            replace(tokenizer, content=json.dumps(content).encode()),
            *others,
            TokenizerFile("config_sentence_transformers.json", json.dumps(sentence_transformers).encode()),
            TokenizerFile("config.json", json.dumps({"matryoshka_dimensions": [4, 8]}).encode()),
        )


def _template() -> dict[str, Any]:
    def special(token: str, type_id: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": token, "type_id": type_id}}

    def text(name: str, type_id: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": type_id}}

    cls, sep = "<|im_start|>", "<|im_end|>"
    single = [special(cls, 0), text("A", 0), special(sep, 0)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, text("B", 1), special(sep, 1)],
        "special_tokens": {
            token: {"id": token, "ids": [i], "tokens": [token]} for token, i in ((cls, CLS), (sep, SEP))
        },
    }
