"""Writes requests.json: what lm-eval's API classes send for the tasks beside this file.

Needs `pip install 'lm-eval[api]'`, and `octavo up` with the demo model. In a clone:

    python -m tests.e2e.lm_eval.record http://127.0.0.1:8080
"""

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

FOLDER = Path(__file__).parent
COMPLETION_TASKS = ["octavo_choice", "octavo_text", "octavo_go_on"]

# Model class, its arguments, tasks, whether they are chats.
RUNS: list[tuple[str, dict[str, Any], list[str], bool]] = [
    ("local-completions", {"batch_size": 4}, COMPLETION_TASKS, False),
    ("local-completions", {"tokenized_requests": False}, ["octavo_text"], False),
    ("local-completions", {"num_concurrent": 4, "max_length": 32}, COMPLETION_TASKS[1:], False),
    ("local-chat-completions", {}, ["octavo_go_on"], True),
]


def main(url: str) -> None:
    """Run the tasks against a server, and write what was sent."""
    recorded: list[dict[str, Any]] = []
    for name, arguments, tasks, is_chat in RUNS:
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        sent = _recorded_run(name, {"model": "smollm2", "base_url": url + path, **arguments}, tasks, is_chat=is_chat)
        recorded += [{"path": path, **request} for request in sent]
    lines = sorted({json.dumps(request, ensure_ascii=False) for request in recorded})
    version = json.dumps(lm_eval.__version__)
    text = f'{{"lm_eval": {version}, "requests": [\n' + ",\n".join(lines) + "\n]}\n"
    (FOLDER / "requests.json").write_text(text, encoding="utf-8")


def _recorded_run(name: str, arguments: dict[str, Any], tasks: list[str], *, is_chat: bool) -> list[dict[str, Any]]:
    """Return the bodies of a run, those of log-likelihoods with the lengths of their contexts."""
    model = lm_eval.api.registry.get_model(name)(**arguments)
    sent: list[dict[str, Any]] = []
    create, batch = model._create_payload, model.batch_loglikelihood_requests
    context_lengths: dict[str, int] = {}

    def create_payload(*args: Any, **kwargs: Any) -> dict[str, Any]:
        body: dict[str, Any] = create(*args, **kwargs)
        sent.append({"body": json.loads(json.dumps(body))})
        if body.get("echo"):
            prompts = body["prompt"] if isinstance(body["prompt"], list) else [model.tokenizer.encode(body["prompt"])]
            sent[-1]["context_lengths"] = [context_lengths[str(prompt)] for prompt in prompts]
        return body

    def batched(chunks: Any) -> Any:
        inputs, lengths, cache_keys = batch(chunks)
        context_lengths.update(zip(map(str, inputs), lengths, strict=True))
        return inputs, lengths, cache_keys

    model._create_payload, model.batch_loglikelihood_requests = create_payload, batched
    assert isinstance(model, LocalCompletionsAPI)
    manager = TaskManager(include_path=str(FOLDER), include_defaults=False)
    lm_eval.simple_evaluate(
        model=model, tasks=tasks, task_manager=manager, apply_chat_template=is_chat, bootstrap_iters=0
    )
    return sent


if __name__ == "__main__":
    main(sys.argv[1])
