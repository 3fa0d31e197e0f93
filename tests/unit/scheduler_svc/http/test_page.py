"""A page's policy allows its own script and style, by hash, and nothing else."""

import base64
import hashlib

from scheduler_svc.http.page import page_with_policy


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def directives(policy: str) -> dict[str, list[str]]:
    return {name: sources for name, *sources in (part.split() for part in policy.split("; "))}


def test_the_policy_names_every_script_and_style_to_the_letter() -> None:
    script, module, style = '\nif (1 < 2 && "é") { x = "<b>&amp;</b>"; }\n', "import.meta;", "\nb > i { color: red }\n"
    page = page_with_policy(
        f"<p><script>{script}</script><style>{style}</style><script type='module'>{module}</script>text"
    )
    policy = directives(page.content_security_policy)
    assert policy["script-src"] == [digest(script), digest(module)]
    assert policy["style-src"] == [digest(style)]
    assert page.html.decode().startswith("<p><script>\nif")


def test_all_else_is_refused() -> None:
    policy = directives(page_with_policy("<p onclick='x' style='y'>plain").content_security_policy)
    assert policy == {
        "default-src": ["'none'"],
        "script-src": ["'none'"],
        "style-src": ["'none'"],
        "img-src": ["data:"],
        "connect-src": ["'self'"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
        "frame-ancestors": ["'none'"],
    }
