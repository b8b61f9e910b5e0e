"""Comments and docstrings at the width that `ruff format` gives to code.

    python lint/rewrap.py FILE ...                # those that are too long, of each file, in place
    python lint/rewrap.py --from 120 FILE ...     # of files that were written at another width

Two lines are of one paragraph if the second one's first word did not fit into the first. Only
paragraphs with a line that is too long change. A comment behind code goes above it. Examples,
tables and formulas stay as they are.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from pathlib import Path
from textwrap import TextWrapper

WIDTH = 100
PRAGMA = re.compile(r"#\s*(type:|noqa|fmt:|pragma|!)")
SECTION = re.compile(r"\s*(Args|Attributes|Fields|Raises|Returns|Yields):$")
ENTRY = re.compile(r"\s*(\*{0,2}\w+(, \*{0,2}\w+)*|[\w.]+Error(, [\w.]+)*):\s")
BULLET = re.compile(r"\s*([-*]|\d+\.)\s")
VERBATIM = re.compile(r"^#|>>>|\.\.\. |\||\S  +\S|^[\w.]+ = |::$")
RULER = re.compile(r"\s*# --.*---$")
CODE_SPAN = re.compile(r"`[^`\n]*`")


def indent_of(line: str) -> str:
    """The blanks with which a line begins."""
    return line[: len(line) - len(line.lstrip(" "))]


def wrap(prose: str, first: str, later: str, width: int = WIDTH) -> list[str]:
    """Lines of prose that begin with `first`, then with `later`. Code in it is not cut."""
    wrapper = TextWrapper(
        width,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )
    prose = CODE_SPAN.sub(lambda span: span.group().replace(" ", "\0"), prose)
    return [line.replace("\0", " ") for line in wrapper.wrap(prose)]


def goes_on(line: str, after: str, width: int) -> bool:
    """Whether the next line is of the same paragraph."""
    if not line.strip() or not after.strip() or len(indent_of(after)) < len(indent_of(line)):
        return False
    if VERBATIM.search(after.strip()) or BULLET.match(after) or SECTION.match(after):
        return False
    word = re.match(r"`[^`]*`\S*|\S+", after.strip())
    assert word is not None
    return len(line) + 1 + len(word.group()) > width - 1


def reflow(lines: list[str], width: int) -> list[str]:
    """Prose, its paragraphs wrapped that hold a line that is too long."""
    done: list[str] = []
    is_in_section = False
    while lines:
        is_in_section |= bool(SECTION.match(lines[0]))
        count = 1
        if not VERBATIM.search(lines[0].strip()):
            while count < len(lines) and goes_on(lines[count - 1], lines[count], width):
                if is_in_section and ENTRY.match(lines[count]):
                    break
                count += 1
        paragraph, lines = lines[:count], lines[count:]
        is_long = max(map(len, paragraph)) > WIDTH
        if not is_long or VERBATIM.search(paragraph[0].strip()):
            done += paragraph
            continue
        first = later = indent_of(paragraph[0])
        if count > 1:
            later = indent_of(paragraph[1])
        elif is_in_section and ENTRY.match(paragraph[0]):
            later += "    "
        elif BULLET.match(paragraph[0]):
            later += "  "
        done += wrap(" ".join(line.strip() for line in paragraph), first, later)
    return done


def docstrings(text: str) -> list[tuple[int, int]]:
    """First and last lines of strings that stand for themselves, from the last to the first."""
    spans: list[tuple[int, int]] = []
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = getattr(statement, "value", None)
            is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
            if isinstance(statement, ast.Expr) and is_text:
                spans.append((statement.lineno, statement.end_lineno or statement.lineno))
    return sorted(spans, reverse=True)


def rewrap_docstrings(text: str, width: int) -> str:
    """A program with docstrings that are not too wide."""
    lines = text.splitlines()
    for begin, end in docstrings(text):
        block = lines[begin - 1 : end]
        opening = re.match(r' *(r?""")', block[0])
        if max(map(len, block)) <= WIDTH or opening is None or not block[-1].endswith('"""'):
            continue
        quotes, pad = opening.group(1), indent_of(block[0])
        if len(block) == 1:
            prose = block[0].strip()[len(quotes) : -3]
            wrapped = wrap(prose, pad + quotes, pad)
            if len(wrapped) == 1:  # the closing quotes alone were too much
                wrapped = wrap(prose, pad + quotes, pad, WIDTH - 3)
        else:
            mark = "\1" * len(quotes)
            inner = [block[0].replace(quotes, mark, 1), *block[1:-1]]
            if block[-1].strip() != '"""':
                inner.append(block[-1][:-3])
            wrapped = reflow(inner, width)
            wrapped[0] = wrapped[0].replace(mark, quotes, 1)
        lines[begin - 1 : end] = [*wrapped, pad + '"""']
    return "\n".join(lines) + "\n"


def above(line: str, column: int, following: str) -> list[str]:
    """A line of code and the comment behind it, as lines with the comment above the code."""
    code, comment = line[:column].rstrip(), line[column:]
    if pragma := re.search(r"#\s*(type: ignore|noqa|fmt:)[^#]*$", comment[1:]):
        code = f"{code}  {pragma.group()}"
        comment = comment[: comment.rindex(pragma.group())].rstrip()
    if code.endswith(":") and re.match(r"\s*(else|elif|except|finally|case)\b", code):
        pad = indent_of(following)
        return [code, *wrap(comment.lstrip("# "), f"{pad}# ", f"{pad}# ")]
    pad = indent_of(line)
    return [*wrap(comment.lstrip("# "), f"{pad}# ", f"{pad}# "), code]


def rewrap_comments(text: str, width: int) -> str:
    """A program with comments that are not too wide."""
    lines = text.splitlines()
    columns: dict[int, int] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not PRAGMA.match(token.string):
            columns[token.start[0] - 1] = token.start[1]
    done: list[str] = []
    at = 0
    while at < len(lines):
        line, column = lines[at], columns.get(at)
        if column is None or line[:column].strip():
            is_long = column is not None and len(line) > WIDTH
            following = lines[at + 1] if at + 1 < len(lines) else ""
            done += above(line, column or 0, following) if is_long else [line]
            at += 1
            continue
        end = at + 1
        while columns.get(end) == column and not lines[end][:column].strip():
            end += 1
        block, at = lines[at:end], end
        if RULER.match(block[0]):
            done += [ruler[:WIDTH] for ruler in block]
            continue
        prose = ["  " + " " * column + comment[column + 2 :] for comment in block]
        done += [
            f"{' ' * column}# {words[column + 2 :]}".rstrip() for words in reflow(prose, width)
        ]
    return "\n".join(done) + "\n"


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="width", type=int, default=WIDTH)
    parser.add_argument("files", nargs="+", type=Path)
    given = parser.parse_args()
    for path in given.files:
        text = path.read_text(encoding="utf-8")
        wrapped = rewrap_comments(rewrap_docstrings(text, given.width), given.width)
        if text.strip() and wrapped != text:
            path.write_text(wrapped, encoding="utf-8")


if __name__ == "__main__":
    main()
