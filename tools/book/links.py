"""Checks the links of a book that mdBook has built: links.py BOOK SOURCES

Each one must lead to a file, and to an anchor there. Links to files of the tree outside of the book (`../README.md` in
SOURCES) are rewritten, so that they work in a book that lies in the tree.
"""

import html.parser
import os
import pathlib
import re
import sys
import urllib.parse


class Page(html.parser.HTMLParser):
    """The anchors and the links of a page."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


def outside(path, link, book, sources):
    """The link to a file of the tree, from a page of the book; None if it stays in the book or leads nowhere."""
    parts = urllib.parse.urlsplit(link)
    page = sources / path.relative_to(book).parent / urllib.parse.unquote(parts.path)
    # mdBook gives every page the ending of its own.
    for file in (page, page.with_suffix(".md")):
        file = pathlib.Path(os.path.normpath(file))
        if file.exists() and sources not in file.parents:
            return parts._replace(path=os.path.relpath(file, path.parent)).geturl()
    return None


def main(book, sources):
    texts = {path: path.read_text() for path in sorted(book.rglob("*.html"))}
    pages = {path: Page(text) for path, text in texts.items()}
    faults, count = [], 0
    for path, page in pages.items():
        # 404.html is shown for every path, print.html has all pages in one.
        if path.name in ("404.html", "print.html"):
            continue
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            count += 1
            target = pathlib.Path(os.path.normpath(path.parent / urllib.parse.unquote(parts.path))) if parts.path else path
            if not target.exists():
                other = outside(path, link, book, sources)
                if other is None:
                    faults.append(f"{path.relative_to(book)}: {link} leads nowhere")
                    continue
                texts[path] = re.sub(f'"{re.escape(link)}"', f'"{other}"', texts[path])
            elif target in pages and urllib.parse.unquote(parts.fragment) not in pages[target].anchors | {""}:
                faults.append(f"{path.relative_to(book)}: {link}: there is no such heading")
        path.write_text(texts[path])
    print("\n".join(faults + [f"{len(pages)} pages, {count} links, {len(faults)} faults"]))
    return 1 if faults or len(pages) < 30 or count < 1000 else 0


if __name__ == "__main__":
    sys.exit(main(*(pathlib.Path(argument).resolve() for argument in sys.argv[1:3])))
