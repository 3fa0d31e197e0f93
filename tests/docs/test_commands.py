"""Every command that the documentation types is executed by a test, or says why not; its flags exist."""

import functools
import re
from dataclasses import dataclass

from tests.docs import test_cookbook
from tests.docs.flags import SERVICES, mistake, unknown_flags
from tests.docs.pages import REPOSITORY, commands, pages, simple_commands, snippets
from tests.e2e.test_readme import grpcurl_session
from tests.support.each_row import each_row

PAGES = [page for page in pages() if page == "README.md" or page.startswith("docs/")]


@dataclass(frozen=True, slots=True)
class Excuse:
    """Why commands are not executed.

    Attributes:
        page: Pattern of the pages.
        command: Pattern of the commands.
        reason: What it would take; what runs it all the same.
    """

    page: str
    command: str
    reason: str


EXCUSES = (
    Excuse(".*", r"make (demo|test)", "installs packages and the demo model; they are what CI and newcomers run first"),
    Excuse(".*", r"make images|BUILD_FLAGS=.*", "builds container images, with buildah and base images"),
    Excuse(".*", r"pip install .*|python3 -m venv .venv && .venv/bin/pip install .*", "installs packages"),
    Excuse(".*", r"source .*", "changes the shell of a person"),
    Excuse(".*", r"octavo up.*", "runs until Ctrl-C; tests/e2e/test_readme.py runs it"),
    Excuse(
        "docs/adapters.md",
        r"python -m executor_svc .*|grpcurl .*LoadAdapter",
        "needs an adapter of the demo model; tests/contract/test_adapters.py calls LoadAdapter",
    ),
    Excuse("docs/rollouts.md", r"python -m examples.grpo", "tests/e2e/test_examples.py runs it"),
    Excuse(".*", r"octavo drain .*", "needs that executor; tests/contract/test_drain_executor.py runs the command"),
    Excuse(".*", r"octavo generate .*", "the words are the model's; tests/unit/octavo/test_cli.py runs the command"),
    Excuse(".*", r"echo '\{.*\}' > \w+\.json", "writes the schema of the next command"),
    Excuse(
        "docs/chaos.md",
        r"make chaos.*|python -m tests.chaos.*",
        "up to an hour of it; tests/chaos/test_chaos.py runs the short form",
    ),
    Excuse(
        "docs/testing.md",
        r"python -m tests.simulation.*",
        "minutes of it; tests/simulation/ runs seeds and its own tests",
    ),
    Excuse(".*", r"octavo chat.*", "talks with a person; tests/unit/octavo/test_cli.py runs the command"),
    Excuse(".*", r"octavo top.*", "fills a terminal until it is ended; tests/unit/octavo/top runs the command"),
    Excuse(
        ".*", r"octavo explain .*", "needs a request of that name; tests/unit/octavo/test_explain.py runs the command"
    ),
    Excuse(
        ".*", r"octavo replay .*", "needs a log of that moment; tests/contract/test_step_log.py runs it in all ways"
    ),
    Excuse(".*", r"octavo bench .*", "sends load for a minute or two; tests/contract/test_bench.py runs small ones"),
    Excuse(".*", r"octavo batch .*", "needs a file of requests; tests/contract/test_batch.py runs the command"),
    Excuse(
        ".*", r"curl .*:8080/v1/.*", "needs the demo model; tests/e2e/test_readme.py asks the same by OpenAI's client"
    ),
    Excuse(
        "README.md|docs/(getting-started|openai|replay).md",
        r"python (-P )?-m (executor_svc|scheduler_svc)( .*)?",
        "runs until Ctrl-C, with the demo model; tests/e2e/test_processes.py and test_fleet_processes.py run both",
    ),
    Excuse(
        "docs/getting-started.md",
        r"kill -9 .*engine_process.*",
        "kills whatever core runs; tests/e2e/test_fronts.py kills one under streams",
    ),
    Excuse(
        "docs/sizing.md",
        r"(python|grpcurl) .*",
        "the numbers are the demo model's on one machine; docs/grpcurl.md asks an executor the same, executed",
    ),
    Excuse(
        "docs/models.md",
        r"octavo (pull|up --model) Qwen/.*",
        "needs the hub; tests/e2e/test_hub_model.py and tests/unit/octavo/models/test_hub_transfer.py have one",
    ),
    Excuse(
        "docs/messages.md",
        r"export (ANTHROPIC|CLAUDE_CODE)_.*|claude",
        "needs Claude Code; tests/contract/anthropic/test_clients.py sends what it sends",
    ),
    Excuse(
        "docs/operations.md",
        r"octavo-front .*",
        "runs until it is ended; tests/contract/test_model_names.py has such a front",
    ),
    Excuse("docs/responses.md", r"python -m executor_svc.fake .*", "test_scripted_executor.py runs such a script"),
    Excuse("docs/models.md", r"octavo embed .*", "needs a model that embeds; tests/unit/octavo/test_embed.py runs it"),
    Excuse("docs/openai.md", r"lm_eval run .*", "needs lm-eval; tests/e2e/test_lm_eval.py sends what it sends"),
    Excuse(
        "docs/kubernetes.md",
        r"kubectl .*|for (key|what) in .*|head -c 32 .*|curl .*llm.example.com.*",
        "needs a cluster; tests/cluster runs them there",
    ),
    Excuse("docs/kubernetes.md", r"grpcurl .*", "needs a cluster; docs/grpcurl.md has the same calls, executed"),
    Excuse(
        "docs/security.md",
        r"(mkdir|cd|openssl|issue|printf|chmod|export)\b.*",
        "makes certificates and tokens with openssl; tests/support/certificates.py makes those of the tests",
    ),
    Excuse(
        "docs/security.md", r"python -m .*", "runs until it is ended; tests/tls/test_processes.py runs both with TLS"
    ),
    Excuse("docs/security.md", r"curl .*", "needs curl; tests/contract/test_page_port.py asks the same over HTTP"),
    Excuse("docs/security.md", r"grpcurl .*", "docs/grpcurl.md has the same call with a token, executed"),
)


@functools.cache
def not_executed() -> list[tuple[str, str]]:
    """Return the commands that no test types, each with its page."""
    executed = {(page, line.command) for page in test_cookbook.PAGES for line in test_cookbook.typed(page)}
    executed |= {("README.md", line.command) for line in grpcurl_session()}
    return [(page, command) for page in PAGES for command in commands(page) if (page, command) not in executed]


def is_excused(excuse: Excuse, page: str, command: str) -> bool:
    return bool(re.fullmatch(excuse.page, page) and re.fullmatch(excuse.command, command, re.DOTALL))


def test_every_command_is_executed_or_has_an_excuse() -> None:
    assert [line for line in not_executed() if not any(is_excused(excuse, *line) for excuse in EXCUSES)] == []


@each_row(*EXCUSES)
def test_every_excuse_is_needed(excuse: Excuse) -> None:
    assert any(is_excused(excuse, *line) for line in not_executed())


@each_row(*PAGES)
def test_commands_of_ours_are_understood(page: str) -> None:
    mistakes = []
    for command in commands(page):
        for inner in [command, *re.findall(r"\$\(([^()]*)\)", command)]:
            mistakes += [f"{inner}: {found}" for words in simple_commands(inner) if (found := mistake(words))]
    assert mistakes == []


@each_row(*pages())
def test_flags_in_sentences_exist(page: str) -> None:
    unknown = []
    for snippet in snippets(page):
        if re.match(r"(octavo|python3?) ", snippet):
            unknown += [f"{snippet}: {flag}" for flag in unknown_flags(snippet.split())]
    assert unknown == []


@each_row(*pages())
def test_variables_of_the_services_exist(page: str) -> None:
    services = [config_class.service for config_class in SERVICES.values()]
    known = {
        f"OCTAVO_{service}_{name}".upper()
        for config_class in SERVICES.values()
        for name in config_class.model_fields
        for service in [config_class.service]
    }
    pattern = rf"\bOCTAVO_(?:{'|'.join(services)})_[A-Z0-9_]+\b".upper()
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    assert {name for name in re.findall(pattern, text) if not name.endswith("_X_Y")} - known == set()
