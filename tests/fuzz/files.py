"""Files of a model directory, and bodies of HTTP: tokenizers, templates, configurations, weights, requests in JSON."""

import json
import random
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from executor_svc.checkpoint.model_directory import SINGLE_FILE, ModelDirectory
from executor_svc.checkpoint.weights import Checkpoint
from executor_svc.config import ExecutorConfig
from executor_svc.fake.tokenizer import fake_tokenizer_files
from executor_svc.fake.worker import FakeWorker
from executor_svc.models.selection import read_model_config
from octavo_shared.errors import InvalidFieldError, ModelLoadError, TokenizerFailedError, TokenizerFileError
from octavo_shared.step_wire.executor_info import TokenizerFile
from scheduler_svc.front.text.conversation import Conversation
from scheduler_svc.front.text.tokenizer import Tokenizer
from tests.contract.openai.api import HELLO, Api, running_api
from tests.fuzz.target import Case, LoopTarget, Target, flipped
from tests.fuzz.values import changed_json
from tests.support.tokenizers import byte_fallback_backend, byte_level_backend, tokenizer_files

TEMPLATES = (
    "{% for message in messages %}{{ message['role'] + ': ' + message.content | trim }}\n{% endfor %}",
    "{%- macro of(m) -%}{{ m.content.split('x')[0] | upper }}{%- endmacro -%}{% set ns = namespace(n=0) %}"
    "{% for m in messages if m.role != 'tool' %}{% set ns.n = ns.n + 1 %}{{ of(m) ~ ns.n * 2 }}{% endfor %}"
    "{% if add_generation_prompt and ns.n > 0 %}{{ raise_exception('no') if tools else bos_token }}{% endif %}",
)
PIECES = (
    *("{{ ", " }}", "{% ", " %}", "messages", " * 99999999", "**", "[0]", "[-1:]", ".__class__", "| tojson", "| join"),
    *("| replace('a', 'b')", "| format", "'%999999999d' % 1", "{% for i in range(999999999) %}", "| batch(0)"),
    *("| indent(99999999)", "{{ of(of) }}", "| attr('x')", "(", ")", "none", "| center(2**40)", "| slice(0) | list"),
    *(
        "| round(-400)",
        "| int(base=99)",
        "| wordwrap(0)",
        "| truncate(-1)",
        "| sum",
        "| dictsort(by='x')",
        "loop.cycle()",
    ),
)


class Tokenizers(Target):
    """The tokenizer and the chat template of a model. A case is tokenizer.json and tokenizer_config.json."""

    name = "tokenizers"
    allowed = (TokenizerFileError, TokenizerFailedError, InvalidFieldError)

    def corpus(self) -> Sequence[Case]:
        """Return tokenizers of several kinds, and templates."""
        made = [tokenizer_files(kind) for kind in (byte_level_backend([b"word"]), byte_fallback_backend(["word"]))]
        bases = [tuple(file.content for file in files[:2]) for files in (fake_tokenizer_files(), *made)]
        with_templates = [
            (json_file, json.dumps(json.loads(config) | {"chat_template": template}).encode())
            for (json_file, config), template in zip(bases[1:], TEMPLATES, strict=True)
        ]
        return [*bases, *with_templates]

    def change(self, case: Case, chance: random.Random) -> Case:
        """Return files of which a value, a piece of the template or a byte is another one."""
        action, config = chance.random(), json.loads(case[1])
        if action < 0.4 and "chat_template" in config:
            template = config["chat_template"]
            for _ in range(chance.choice([1, 1, 2, 4])):
                place, cut = chance.randrange(len(template) + 1), chance.choice([0, 0, 1, 5])
                template = template[:place] + chance.choice(PIECES) + template[place + cut :]
            return case[0], json.dumps(config | {"chat_template": template}).encode()
        place = int(chance.random() < 0.3)
        spoiled = (changed_json if chance.random() < 0.9 else flipped)(case[place], chance)
        return (spoiled, case[1]) if place == 0 else (case[0], spoiled)

    def one(self, case: Case) -> None:
        """Load them, and use them."""
        names = ("tokenizer.json", "tokenizer_config.json")
        files = [TokenizerFile(name, content) for name, content in zip(names, case, strict=True)]
        tokenizer = Tokenizer(files, escapes_special_tokens=len(case[1]) % 2 == 0)
        known = tokenizer.encode("word and <|im_end|> \u00e9\U0001f600 " * 3)
        tokenizer.decode([*known[:50], 0, 7, 2**31], skip_special_tokens=True)
        tokenizer.render_chat(Conversation.of_turns([("user", "hello"), ("assistant", "axb")]))


class ModelDirectories(Target):
    """The executor's reading of a model. A case is config.json, generation_config.json and the weights."""

    name = "model-directories"
    allowed = (ModelLoadError,)

    def corpus(self) -> Sequence[Case]:
        """Return models of which there is little but a configuration."""
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name)
        weights = save({"lm_head.weight": np.zeros((7, 32), np.float32), "model.norm.weight": np.ones(32, np.float32)})
        common: dict[str, Any] = {"vocab_size": 7, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        common |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        common |= {"tie_word_embeddings": False, "rope_theta": 1e4, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
        scaled = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "torch_dtype": "float32", "eos_token_id": 2}
        mixture = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "norm_topk_prob": True}
        sliding = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
        families: dict[str, dict[str, Any]] = {
            "Llama": scaled,
            "Mistral": {"sliding_window": 8},
            "Qwen3Moe": mixture,
            "Gemma3": sliding,
        }
        families |= {"Qwen3": {"head_dim": 8}, "GPT2": {"n_head": 4, "n_layer": 2, "n_embd": 32}}
        settings = json.dumps({"eos_token_id": [1, 2], "temperature": 0.5, "top_k": 5, "do_sample": True}).encode()
        return [
            (json.dumps(common | own | {"architectures": [f"{name}ForCausalLM"]}).encode(), settings, weights)
            for name, own in families.items()
        ]

    def change(self, case: Case, chance: random.Random) -> Case:
        """Return a model of which a value, or a byte of the weights' header, is another one."""
        if chance.random() < 0.6:
            place = int(chance.random() < 0.2)
            spoiled = (changed_json if chance.random() < 0.95 else flipped)(case[place], chance)
            return (*case[:place], spoiled, *case[place + 1 :])
        size = int.from_bytes(case[2][:8], "little")
        header, values = case[2][8 : 8 + size], case[2][8 + size :]
        spoiled = (changed_json if chance.random() < 0.7 else flipped)(header, chance)
        length = chance.choice([len(spoiled)] * 9 + [0, 2**63, size + 1, len(case[2])]).to_bytes(8, "little")
        return (*case[:2], length + spoiled + values[: chance.choice([len(values)] * 5 + [0, 1, 100])])

    def one(self, case: Case) -> None:
        """Read all that is read before the weights are loaded, and hash the weights."""
        for name, content in zip(("config.json", "generation_config.json", SINGLE_FILE), case, strict=True):
            (self._path / name).write_bytes(content)
        directory = ModelDirectory(self._path)
        checkpoint = Checkpoint(self._path)
        checkpoint.number_formats()
        checkpoint.model_hash()
        directory.sampling_defaults()
        directory.eos_token_ids()
        read_model_config(directory, ExecutorConfig(model=str(self._path)))

    def close(self) -> None:
        """Remove the files."""
        self._folder.cleanup()


class HttpBodies(LoopTarget):
    """OpenAI's API. A case is a path and a body."""

    name = "http-bodies"
    _api: Api

    async def open(self, running: AsyncExitStack) -> Sequence[Case]:
        """Start a scheduler with the API."""
        self._api = await running.enter_async_context(running_api(FakeWorker(max_model_len=100)))
        common = {"model": "fake", "max_tokens": 3, "n": 2, "stop": ["x"], "seed": 1, "temperature": 0.5, "top_p": 0.9}
        common |= {"logit_bias": {"40": 1.5}, "user": "u", "presence_penalty": 0.1, "stream_options": None}
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
        chat = {
            **common,
            "messages": HELLO,
            "logprobs": True,
            "top_logprobs": 2,
            "tool_choice": "none",
            "tools": [tool],
        }
        bodies = [
            ("/v1/completions", {**common, "prompt": ["a", "b"], "logprobs": 2, "echo": False}),
            ("/v1/completions", {**common, "prompt": [40, 41], "stream": True}),
            ("/v1/chat/completions", chat),
            (
                "/v1/chat/completions",
                {**common, "messages": [*HELLO, {"role": "assistant", "content": "x"}], "stream": True},
            ),
        ]
        return [(path.encode(), json.dumps(body).encode()) for path, body in bodies]

    def change(self, case: Case, chance: random.Random) -> Case:
        """Return a body with another value or byte."""
        return case[0], (changed_json if chance.random() < 0.9 else flipped)(case[1], chance)

    async def run(self, case: Case) -> None:
        """Send it."""
        path = case[0].decode()
        answer = await self._api.send("POST", path, data=case[1], headers={"Content-Type": "application/json"})
        assert answer.status < 500, answer.text
        assert answer.status == 200 or answer.error["message"]
