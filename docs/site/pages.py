"""Pages of the site that are no files under docs/: README as its first, and each file of the
repository that a page links to (an example, the changelog), so that no link leads out of the site.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[(?P<text>[^\[\]]+)\]\((?!\w+:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
FIRST, CONTENTS = "README.md", "docs/README.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds README and what pages link to outside docs/."""
    from mkdocs.structure.files import File

    left = [FIRST, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(left)
    while left:
        source = left.pop()
        if not source.startswith("docs/"):
            content = text_of(source)
            files.append(File.generated(config, uri_of(source), content=content))
        for target in targets(source):
            if not target.startswith("docs/") and target not in seen:
                seen.add(target)
                left.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Links between files of the repository as links between pages; of those to folders, which are
    no pages, the text."""
    here = source_of(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        target = resolved(here, match["path"])
        if (ROOT / target).is_dir():
            return match["text"]
        if not (ROOT / target).is_file():
            return match[0]
        page_there = posixpath.relpath(uri_of(target), folder or ".")
        return f"[{match['text']}]({page_there}{match['anchor'] or ''})"

    return LINK.sub(link, markdown)


def targets(source: str) -> Iterator[str]:
    """The files that a page of the repository links to."""
    if not source.endswith(".md"):
        return
    for match in LINK.finditer((ROOT / source).read_text()):
        target = resolved(source, match["path"])
        if (ROOT / target).is_file():
            yield target


def text_of(source: str) -> str:
    """A file as a page: Markdown as it is, all else as a block of code."""
    text = (ROOT / source).read_text()
    if source.endswith(".md"):
        return text
    language = "python" if source.endswith(".py") else "text"
    return f"# {source}\n\n````{language}\n{text}````\n"


def resolved(source: str, link: str) -> str:
    """The file, from the repository's root, that a link of ``source`` leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def uri_of(source: str) -> str:
    """The page of a file of the repository."""
    if source in (FIRST, CONTENTS):
        return "index.md"
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    return f"repository/{source.removesuffix('.md')}.md"


def source_of(uri: str) -> str:
    """The file of the repository that a page is."""
    if uri == "index.md":
        return FIRST
    if uri.startswith("repository/"):
        path = uri.removeprefix("repository/")
        return path if (ROOT / path).is_file() else path.removesuffix(".md")
    return f"docs/{uri}"
