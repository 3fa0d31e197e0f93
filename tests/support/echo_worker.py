"""A fake executor whose model says what it is told to say, one byte a token: any output, in awkward splits."""

from collections.abc import Sequence

from executor_svc.fake.scripted_worker import CHAT_TEMPLATE, ScriptedWorker
from executor_svc.fake.tokenizer import EOS_TOKEN_ID
from octavo_shared.step_wire.executor_info import TokenizerFile
from octavo_shared.step_wire.step import Int32Array

# A prompt's last word of this kind; what follows it, up to the end of the message, is the output.
SAY = b"SAY:"

# The last of the fake's special tokens; no test needs it.
THIRD_TOKEN = "<|endoftext|>"


class EchoWorker(ScriptedWorker):
    """Says what the prompt tells it to say. Log-probabilities are those of other tokens.

    Args:
        chat_template: Of the model.
        marker: The model's third special token, such as `[TOOL_CALLS]`.
    """

    def __init__(self, chat_template: str = CHAT_TEMPLATE, marker: str = THIRD_TOKEN, **settings: object) -> None:
        super().__init__(_said_in, chat_template, **settings)
        self._marker = marker

    def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
        """Return the fake's files with another special token."""
        return tuple(
            TokenizerFile(file.name, file.content.replace(THIRD_TOKEN.encode(), self._marker.encode()))
            if file.name == "tokenizer.json"
            else file
            for file in super().tokenizer_files()
        )


def _said_in(prompt: Int32Array) -> Sequence[int]:
    # Special tokens are above all bytes; none of them looks like a part of SAY.
    text = "".join(map(chr, prompt.tolist()))
    _, _, said = text.rpartition(SAY.decode())
    script, _, _ = said.partition(chr(EOS_TOKEN_ID))
    return list(map(ord, script))
