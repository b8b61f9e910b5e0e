"""Keeps the house small: lines of a file and of a function, arguments, and lines per room, against budgets.toml.

    python lint/budgets.py            # says what is over, and how far each room has changed; exit status 1 if any is
    python lint/budgets.py --write    # takes the lines of today as the rooms' budgets

A code line has code on it: blank lines, comments and docstrings do not count.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGETS = Path(__file__).with_name("budgets.toml")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(text: str) -> set[int]:
    """The numbers of the lines with code."""
    quiet = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in quiet:
            found |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, Function]]:
    """Every function with its dotted name in the file."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{within}{node.name}.")
        elif isinstance(node, Function):
            yield f"{within}{node.name}", node
            yield from functions(node, f"{within}{node.name}.")


def arguments(node: Function) -> int:
    """How many arguments a caller may give."""
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([a for a in given if a.arg not in ("self", "cls", "ctx")])


def check(path: Path, most: dict[str, int], excepted: set[str]) -> Iterator[str]:
    """What of a file is over budget, but for the excepted ones: "PATH" or "PATH:FUNCTION"."""
    text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
    code = code_lines(text)
    if len(code) > most["file"] and name not in excepted:
        yield f"{name}: {len(code)} code lines, {most['file']} are allowed; it has two jobs"
    for function, node in functions(ast.parse(text)):
        if f"{name}:{function}" in excepted:
            continue
        lines = len(code & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)))
        if lines > most["function"]:
            yield f"{name}:{function}: {lines} code lines, {most['function']} are allowed"
        if arguments(node) > most["arguments"]:
            yield f"{name}:{function}: {arguments(node)} arguments, {most['arguments']} are allowed"


def rooms(apart: set[str]) -> dict[str, int]:
    """Code lines of Python per room of sparrow/. apart: rooms and files; "X/Y" counts for itself, not for X."""
    found: dict[str, int] = {}
    for path in sorted((ROOT / "sparrow").rglob("*.py")):
        parts = path.relative_to(ROOT / "sparrow").parts
        within = ["/".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
        room = next((one for one in within if one in apart), parts[0] if len(parts) > 1 else ".")
        found[room] = found.get(room, 0) + len(code_lines(path.read_text(encoding="utf-8")))
    return found


def main() -> int:
    """Check, or write the rooms' lines."""
    budgets = tomllib.loads(BUDGETS.read_text(encoding="utf-8"))
    now, allowed = rooms(set(budgets["apart"])), budgets["rooms"]
    if "--write" in sys.argv[1:]:
        head = BUDGETS.read_text(encoding="utf-8").split("\n[rooms]")[0]
        lines = [f"{room} = {count}" if room.isalnum() else f'"{room}" = {count}' for room, count in now.items()]
        BUDGETS.write_text(head + "\n[rooms]\n" + "\n".join(lines) + "\n", encoding="utf-8")
        return 0
    excepted = set(budgets["excepted"])
    told = [
        line for path in sorted((ROOT / "sparrow").rglob("*.py")) for line in check(path, budgets["most"], excepted)
    ]
    for room, count in now.items():
        if room not in allowed:
            told.append(f"{room}: no budget; add a row to {BUDGETS.relative_to(ROOT)}")
        elif count > allowed[room]:
            told.append(f"{room}: {count} code lines, {allowed[room]} are budgeted; make it smaller or raise its row")
    flow = sum(count for room, count in now.items() if room not in budgets["apart"])
    if flow > budgets["most"]["flow"]:
        told.append(f"the flow: {flow} code lines, {budgets['most']['flow']} are allowed")
    changed = [
        f"{room} {now[room] - allowed[room]:+d}" for room in now if room in allowed and now[room] != allowed[room]
    ]
    print(
        f"flow: {flow} of {budgets['most']['flow']} code lines; against the budgets: {', '.join(changed) or 'the same'}"
    )
    print("\n".join(told), end="\n" if told else "")
    return bool(told)


if __name__ == "__main__":
    sys.exit(main())
