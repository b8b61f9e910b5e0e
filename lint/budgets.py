"""Keeps the house small, in tokens so that long lines gain nothing; see budgets.toml.

    python lint/budgets.py            # says what is over (exit status 1) and how folders changed
    python lint/budgets.py --write    # takes the tokens of today as the caps of folders

Each folder of the library, each extension and each app has a cap, and so has the library in all.
`tests/test_loaded.py` holds what the defaults load to its own. A function has at most so many
tokens and arguments, a file so many tokens.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from tokens import PACKAGE, ROOT, folders, read_tokens

BUDGETS = Path(__file__).with_name("budgets.toml")
LIBRARY = "the library"
Function = ast.FunctionDef | ast.AsyncFunctionDef


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


def oversized(path: Path, most: Mapping[str, int], excepted: set[str]) -> Iterator[str]:
    """What of a file is over its bounds, but for the excepted functions: "PATH:FUNCTION"."""
    text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
    lines = [token.start[0] for token in read_tokens(text)]
    if len(lines) > most["file"]:
        yield f"{name}: {len(lines):,} tokens, {most['file']:,} are allowed; it has two jobs"
    for function, node in functions(ast.parse(text)):
        if f"{name}:{function}" in excepted:
            continue
        size = sum(node.lineno <= line <= (node.end_lineno or 0) for line in lines)
        if size > most["function"]:
            yield f"{name}:{function}: {size} tokens, {most['function']} are allowed"
        if arguments(node) > most["arguments"]:
            yield f"{name}:{function}: {arguments(node)} arguments, {most['arguments']} are allowed"


def measured() -> dict[str, int]:
    """Tokens of each folder, and of the library in all: what is neither extension, app, command
    line nor C++.
    """
    sums = dict(sorted(folders().items()))
    above = ("extensions/", "apps/", "cli")
    library = [name for name in sums if not name.startswith(above) and not name.endswith("C++")]
    return {LIBRARY: sum(sums[name] for name in library), **sums}


def written(caps: Mapping[str, int]) -> str:
    """The caps as TOML."""
    return "\n".join(f'"{name}" = {count}' for name, count in caps.items())


def main() -> int:
    """Check, or write the caps."""
    text = BUDGETS.read_text(encoding="utf-8")
    budgets, sizes = tomllib.loads(text), measured()
    if "--write" in sys.argv[1:]:
        head = text.split("\n[folders]")[0]
        BUDGETS.write_text(f"{head}\n[folders]\n{written(sizes)}\n", encoding="utf-8")
        return 0
    caps, excepted = budgets["folders"], set(budgets["excepted"])
    paths = sorted(PACKAGE.rglob("*.py"))
    over = [line for path in paths for line in oversized(path, budgets["most"], excepted)]
    for name in sorted(sizes.keys() | caps.keys()):
        if name not in caps:
            over.append(f"{name}: no cap; add a row to {BUDGETS.relative_to(ROOT)}")
        elif name not in sizes:
            over.append(f"{name}: a cap without a folder; drop its row")
        elif sizes[name] > caps[name]:
            over.append(
                f"{name}: {sizes[name]:,} tokens, its cap is {caps[name]:,}; make it smaller, or"
                " say why it grows"
            )
    changes = [
        f"{name} {sizes[name] - caps[name]:+,d}"
        for name in sizes
        if sizes[name] != caps.get(name, sizes[name])
    ]
    print(
        f"{LIBRARY}: {sizes[LIBRARY]:,} tokens; against the caps:"
        f" {', '.join(changes) or 'the same'}"
    )
    print("\n".join(over), end="\n" if over else "")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
