"""The file of tokens: what it may hold, and what is said of what it may not."""

from pathlib import Path

import pytest

from scheduler_svc.front.access.identity import ANYBODY, Identity
from scheduler_svc.front.access.token_table import TokensFileError, read_tokens


def complaint(path: Path, content: str) -> str:
    path.write_text(content, encoding="utf-8")
    with pytest.raises(TokensFileError) as caught:
        read_tokens(path)
    return str(caught.value)


def test_each_token_has_its_tenant(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("# comment\n\nblue 0123456789abcdef\nblue second-token-of-blue\n  * operator-token-012\n")

    table = read_tokens(path)

    assert table.find("0123456789abcdef") == table.find("second-token-of-blue") == Identity("blue")
    assert table.find("operator-token-012") == ANYBODY
    assert [table.find(token) for token in ("", "#", "0123456789abcdeF", "operator", "# comment")] == [None] * 5


TOKEN = "0123456789abcdef"
LINES = [
    (f"{TOKEN}", "line 1: 1 words; write TENANT TOKEN"),
    (f"blue {TOKEN} more", "line 1: 3 words; write TENANT TOKEN"),
    (
        "blue 0123456789abcde",
        'line 1: the token is 15 characters long; use at least 16 ("openssl rand -hex 32" generates one)',
    ),
    (f"blue {TOKEN}ü", "line 1: the token contains non-ASCII characters, which clients cannot send"),
    (f"{257 * 't'} {TOKEN}", "line 1: the tenant is 257 characters long; use at most 256"),
    (
        f"blue {TOKEN}\n# comment\ngreen {TOKEN}",
        "line 3: the token is the same as on line 1; give each tenant its own",
    ),
]


@pytest.mark.parametrize(("content", "sentence"), LINES, ids=[sentence for _, sentence in LINES])
def test_a_wrong_line_is_named_without_its_token(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "tokens"

    text = complaint(path, content)

    assert text == f"--tokens-file {path}, {sentence}"
    assert "0123456789" not in text


def test_a_byte_order_mark_is_no_part_of_a_tenant(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("blue 0123456789abcdef", encoding="utf-8-sig")
    assert read_tokens(tmp_path / "tokens").find("0123456789abcdef") == Identity("blue")


def test_a_file_without_tokens_locks_nobody_out_by_mistake(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    assert complaint(path, "# none yet\n") == (
        f"--tokens-file {path} contains no token, so no client could call; write one TENANT TOKEN per line"
    )


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokensFileError) as caught:
        read_tokens(tmp_path)
    assert str(caught.value) == (
        f"--tokens-file {tmp_path} cannot be read (Is a directory); give a file that this process may read"
    )
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(TokensFileError, match="is not UTF-8 text; write one TENANT TOKEN per line"):
        read_tokens(tmp_path / "binary")


def test_an_operator_asks_for_any_tenant_and_others_for_their_own() -> None:
    assert [ANYBODY.tenant_for(tenant) for tenant in ("", "blue")] == ["", "blue"]
    assert [Identity("blue").tenant_for(tenant) for tenant in ("", "blue")] == ["blue", "blue"]
    assert [Identity("").may_act_for("blue"), Identity("blue").may_act_for("")] == [False, False]
