"""A fake executor whose model knows tools, in the format of Hermes; it writes noise unless a grammar holds it."""

import json

from executor_svc.fake.worker import FakeWorker
from octavo_shared.step_wire.executor_info import TokenizerFile

_TEMPLATE = (
    '{% for tool in tools or [] %}{{ tool | tojson }} in <tool_call>{"name": ..., "arguments": ...}</tool_call>\n'
    "{% endfor %}{% for message in messages %}{{ message['role'] + '\n' + message['content'] + '\n' }}{% endfor %}"
)


class ToolWorker(FakeWorker):
    """The fake with another chat template."""

    def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
        """Return the fake's files with it."""
        files = {file.name: file.content for file in super().tokenizer_files()}
        config = json.loads(files["tokenizer_config.json"])
        files["tokenizer_config.json"] = json.dumps({**config, "chat_template": _TEMPLATE}).encode()
        return tuple(TokenizerFile(name, content) for name, content in files.items())
