"""The live page as it is sent."""

from scheduler_svc.admin.page.bundle import load_page


def test_the_page_of_the_package_is_html_that_loads_nothing_from_elsewhere() -> None:
    page = load_page()
    text = page.html.decode()
    assert text.startswith("<!doctype html>")
    assert 'src="http' not in text
    assert "unsafe" not in page.content_security_policy
