"""The set-ups of agents that use the HTTP port, each as one command.

docs/responses.md and docs/messages.md say the same; tests/docs/test_agents.py compares.
"""

import shlex
from collections.abc import Mapping

# What they send before the first word of a person, and a small task.
LEAST_CONTEXT_TOKENS = 32_768


def agent_commands(model_id: str, max_model_len: int, url: str) -> list[str]:
    """Return a command for each agent, named in front; none for a model whose context is too short for them.

    Args:
        model_id: The name of the model.
        max_model_len: Its context, in tokens.
        url: Where the port is, without /v1.
    """
    if max_model_len < LEAST_CONTEXT_TOKENS:
        return []
    settings = codex_settings(model_id, max_model_len, url)
    flags = [f"-c {shlex.quote(f'{name}={value}')}" for name, value in settings.items()]
    variables = [f"{name}={shlex.quote(value)}" for name, value in claude_variables(model_id, url).items()]
    return [f"Codex CLI: codex {' '.join(flags)}", f"Claude Code: {' '.join(variables)} claude"]


def codex_settings(model_id: str, max_model_len: int, url: str) -> Mapping[str, object]:
    """Return the settings of Codex CLI, as its config.toml has them, with dots between tables."""
    return {
        "model": model_id,
        "model_provider": "octavo",
        "model_context_window": max_model_len,
        "web_search": "disabled",
        "model_providers.octavo.name": "Octavo",
        "model_providers.octavo.base_url": f"{url}/v1",
        "model_providers.octavo.wire_api": "responses",
    }


def claude_variables(model_id: str, url: str) -> Mapping[str, str]:
    """Return the environment of Claude Code."""
    names = ("MODEL", "DEFAULT_HAIKU_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_OPUS_MODEL")
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        **{f"ANTHROPIC_{name}": model_id for name in names},
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "8192",
    }
