"""A fake executor whose model says what it is told to say, one byte a token: any output, in awkward splits."""

import json
from dataclasses import replace

import numpy as np

from executor_svc.fake.tokenizer import EOS_TOKEN_ID
from executor_svc.fake.worker import FakeWorker
from executor_svc.sampler.sample_rows import SampleRows
from octavo_shared.step_wire.batch_table import StepLayout
from octavo_shared.step_wire.executor_info import TokenizerFile
from octavo_shared.step_wire.step import Int32Array, Step, StepResult

# A prompt's last word of this kind; what follows it, up to the end of the message, is the output.
SAY = b"SAY:"

# The last of the fake's special tokens; no test needs it.
THIRD_TOKEN = "<|endoftext|>"

# Shows tools, and has the words by which the formats of Qwen3 are found.
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
    """{# </think>, "arguments" #}"""
)


class EchoWorker(FakeWorker):
    """Says what the prompt tells it to say. Log-probabilities are those of other tokens.

    Args:
        chat_template: Of the model.
        marker: The model's third special token, such as `[TOOL_CALLS]`.
    """

    def __init__(self, chat_template: str = CHAT_TEMPLATE, marker: str = THIRD_TOKEN, **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self._chat_template = chat_template
        self._marker = marker

    def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
        """Return the fake's files with another chat template and another special token."""
        files = {file.name: file.content for file in super().tokenizer_files()}
        files["tokenizer.json"] = files["tokenizer.json"].replace(THIRD_TOKEN.encode(), self._marker.encode())
        config = json.loads(files["tokenizer_config.json"])
        files["tokenizer_config.json"] = json.dumps({**config, "chat_template": self._chat_template}).encode()
        return tuple(TokenizerFile(name, content) for name, content in files.items())

    def _answer(self, step: Step, layout: StepLayout) -> StepResult:
        result = super()._answer(step, layout)
        rows = SampleRows.of_step(self._table, layout)
        sampled = [
            _next_token(rows.token_ids[slot, :num_prompt_tokens], num_output_tokens)
            for slot, num_prompt_tokens, num_output_tokens in zip(
                rows.slots, rows.num_prompt_tokens, rows.num_output_tokens, strict=True
            )
        ]
        return replace(result, sampled_token_ids=np.array(sampled, np.int32))


def _next_token(prompt: Int32Array, num_output_tokens: int) -> int:
    # Special tokens are above all bytes; none of them looks like a part of SAY.
    text = "".join(map(chr, prompt.tolist()))
    _, _, said = text.rpartition(SAY.decode())
    script, _, _ = said.partition(chr(EOS_TOKEN_ID))
    return ord(script[num_output_tokens]) if num_output_tokens < len(script) else EOS_TOKEN_ID
