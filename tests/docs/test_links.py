"""Every relative link of the Markdown leads somewhere, its anchor too."""

from tests.docs.pages import REPOSITORY, anchors, links, pages
from tests.support.each_row import each_row


@each_row(*pages())
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    broken = []
    for link in links(page):
        path = ((REPOSITORY / page).parent / link.target).resolve() if link.target else REPOSITORY / page
        if not path.exists() or (link.anchor and link.anchor not in anchors(str(path.relative_to(REPOSITORY)))):
            broken.append(f"{link.target}#{link.anchor}")
    assert broken == []
