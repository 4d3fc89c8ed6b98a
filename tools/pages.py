"""Pages whose tables are made of committed results: replaces what is between two marker lines."""

import re


def into(page: str, name: str, section: str) -> str:
    """The text `page`, with `section` in place of what is between the lines <!-- NAME --> and
    <!-- end of NAME -->.

    Raises ValueError if the page has no such lines.
    """
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"the page has no lines {start} and {end}: add them where the tables go")
    return pattern.sub(lambda found: f"{start}\n\n{section}\n\n{end}", page)


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [f"| {' | '.join(row)} |" for row in [head, *rows]]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]
