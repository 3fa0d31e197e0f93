"""A fake executor that answers by a script, one token a byte: what agents and tools are tested with.

The model looks like Qwen3: its chat template shows tools, calls stand in `<tool_call>` tags, reasoning in
`<think>` tags.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from executor_svc.fake.tokenizer import EOS_TOKEN_ID, IM_START_TOKEN_ID
from executor_svc.fake.worker import FakeWorker
from executor_svc.sampler.sample_rows import SampleRows
from octavo_shared.errors import ModelLoadError
from octavo_shared.step_wire.executor_info import TokenizerFile
from octavo_shared.step_wire.step import Int32Array, Step, StepResult

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

# Returns the tokens of the answer to a prompt; the end of the sequence follows them.
Answer = Callable[[Int32Array], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Script:
    """What is answered to which prompt.

    The row answers whose `when` stands last in the prompt, so a result of a tool comes before the task that led to
    it. A row without `when` answers all other prompts.

    Attributes:
        rows: `when` and `say` of each row.
    """

    rows: Sequence[tuple[str, str]]

    @classmethod
    def read(cls, path: str) -> Self:
        """Return the script in a file of JSON lines, each {"when": "...", "say": "..."}.

        Raises: ModelLoadError: the file cannot be read, or a line is no row.
        """
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"the script {path} cannot be read: {error}") from error
        return cls([_row(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()])

    def __call__(self, prompt: Int32Array) -> Sequence[int]:
        """See `Answer`; a prompt that no row fits is answered with nothing."""
        text = bytes(token_id for token_id in prompt.tolist() if token_id < IM_START_TOKEN_ID)
        # What is empty stands before all else.
        places = [text.rfind(when.encode()) if when else -1 for when, _ in self.rows]
        fitting = [row for row, place in enumerate(places) if place >= 0 or not self.rows[row][0]]
        return list(self.rows[max(fitting, key=places.__getitem__)][1].encode()) if fitting else []


def _row(line: str, where: str) -> tuple[str, str]:
    with suppress(ValueError):
        row = json.loads(line)
        if isinstance(row, dict) and isinstance(when := row.get("when", ""), str) and isinstance(row.get("say"), str):
            return when, row["say"]
    raise ModelLoadError(f'{where} must be a JSON object such as {{"when": "...", "say": "..."}}')


class ScriptedWorker(FakeWorker):
    """Answers by a script. Log-probabilities are of the sampled tokens; these stay where a grammar forbids the script.

    Args:
        answer: The script.
        chat_template: Of the model.
    """

    def __init__(self, answer: Answer, chat_template: str = CHAT_TEMPLATE, **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self._answer_to = answer
        self._chat_template = chat_template

    def reset(self, *, uses_groups: bool = False) -> None:
        """See `FakeWorker`."""
        super().reset(uses_groups=uses_groups)
        self._said: dict[int, Sequence[int]] = {}  # by slot

    def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
        """Return the fake's files with the chat template."""
        files = {file.name: file.content for file in super().tokenizer_files()}
        config = json.loads(files["tokenizer_config.json"])
        files["tokenizer_config.json"] = json.dumps({**config, "chat_template": self._chat_template}).encode()
        return tuple(TokenizerFile(name, content) for name, content in files.items())

    def _replace_samples(self, step: Step, rows: SampleRows, result: StepResult) -> None:
        forks = (*step.delta.forks, *step.delta.beam_forks)
        for slot in (*(one.slot for one in step.delta.admissions), *(fork.slot for fork in forks)):
            self._said.pop(slot, None)
        masks: dict[int, npt.NDArray[np.uint8]] = {}
        if rows.is_guided is not None:
            held, allowed = rows.allowed_masks()
            masks = dict(zip(held.tolist(), allowed, strict=True))
        for row, slot in enumerate(rows.slots.tolist()):
            if slot not in self._said:
                self._said[slot] = self._answer_to(rows.token_ids[slot, : rows.num_prompt_tokens[row]])
            said, place = self._said[slot], rows.num_output_tokens[row]
            token_id = said[place] if place < len(said) else EOS_TOKEN_ID
            if row not in masks or masks[row][token_id // 8] >> token_id % 8 & 1:
                result.sampled_token_ids[row] = token_id
