"""How much there is to read, in tokens, so that long lines gain nothing.

    python lint/tokens.py             # loaded by defaults, of each folder, of a line; vague names;
                                      # functions of more than LONG lines
    python lint/tokens.py --loaded    # the loaded modules alone, the largest first

A token is one of Python's without comments, docstrings and layout. A comma at the end of a line
before a bracket, and a string in several pieces, are layout. *Loaded* is what stands in
`sys.modules` after a fresh process prepared 200 rows, trained a DCNv2 for three steps and predicted
a row. A name is vague if it is a pronoun, a participle or an adverb that does not say what it
holds. These are a list; participles alone, of which some are words of the field, are counted
beside.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sparrow"
LONG = 60  # lines of a function without its docstring
QUIET = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
VAGUE = """
    found of told said one ones other others made mine theirs ours each every asked kept given taken
    done seen this that these those there here all some any both what which it its them they whole
    again ahead beside
"""
IRREGULAR = """
    begun held left shown written drawn sent read chosen broken grown hidden laid led known meant
    paid put set lost met spent thrown spoken gone
"""
MAIN_WAY = """
import json, sys, tempfile
from pathlib import Path
from sparrow import cli

folder = Path(tempfile.mkdtemp())
log = folder / "log.csv"
rows = [f"{i % 7 == 0:d},{i % 11},{i % 13},{i / 10}" for i in range(200)]
log.write_text("\\n".join(["label,user,item,price", *rows]) + "\\n")
(folder / "one.csv").write_text("label,user,item,price\\n1,2,3,0.5\\n")
run = str(folder / "run")
commands = [
    ["prepare", str(log), "--out", str(folder / "data")],
    ["train", str(folder / "data"), "--model.name", "dcnv2", "--loop.max_steps", "3",
     "--run_dir", run],
    ["predict", run, str(folder / "one.csv"), "--out", str(folder / "scores.parquet")],
]
for command in commands:
    sys.argv = ["sparrow", *command]
    try:
        code = cli.main()
    except SystemExit as end:
        code = end.code
    assert not code, command
modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "sparrow"]
files = [module.__file__ or "" for module in modules]
print(json.dumps(sorted(file for file in files if file.endswith(".py"))), file=sys.__stdout__)
"""


def read_tokens(text: str) -> list[tokenize.TokenInfo]:
    """The tokens of a program that count."""
    docstring_lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            docstring_lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in QUIET or token.start[0] in docstring_lines:
            continue
        if (
            tokens
            and token.string in ")]}"
            and tokens[-1].string == ","
            and tokens[-1].start[0] < token.start[0]
        ):
            tokens.pop()
        if not (tokens and token.type == tokens[-1].type == tokenize.STRING):
            tokens.append(token)
    return tokens


def lines_with_tokens(text: str) -> set[int]:
    """The numbers of the lines with code."""
    lines: set[int] = set()
    for token in read_tokens(text):
        lines |= set(range(token.start[0], token.end[0] + 1))
    return lines


def cpp_tokens(text: str) -> int:
    """The number of tokens of a C++ source: words, texts and marks, without comments."""
    parts = re.findall(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\w+|[^\w\s]', text, re.DOTALL)
    return sum(not part.startswith(("//", "/*")) for part in parts)


def of_file(path: Path) -> int:
    """The number of tokens of a file."""
    return len(read_tokens(path.read_text(encoding="utf-8")))


def loaded() -> list[Path]:
    """The files of Sparrow that the defaults of `prepare`, `train` and `predict` load."""
    done = subprocess.run(
        [sys.executable, "-c", MAIN_WAY], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [Path(file) for file in json.loads(done.stdout.splitlines()[-1])]


def folder_of(path: Path) -> str:
    """The folder that a source counts for: of the library, an extension or an app; C++ counts
    apart.
    """
    parts = path.relative_to(PACKAGE).parts
    depth = 2 if parts[0] in ("extensions", "apps") else 1
    name = "/".join(part.removesuffix(".py") for part in parts[:depth]) if len(parts) > 1 else "."
    return name if path.suffix == ".py" else f"{name} C++"


def folders() -> Counter[str]:
    """Tokens of each folder of the package."""
    sums: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        sums[folder_of(path)] += of_file(path)
    for pattern in ("*.cpp", "*.h"):
        for path in PACKAGE.rglob(pattern):
            sums[folder_of(path)] += cpp_tokens(path.read_text(encoding="utf-8"))
    return sums


def bindings(tree: ast.AST) -> Iterator[str]:
    """The names that a program binds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def all_bindings() -> list[str]:
    """The names that the package binds."""
    names: list[str] = []
    for path in PACKAGE.rglob("*.py"):
        names += bindings(ast.parse(path.read_text(encoding="utf-8")))
    return names


def is_vague(name: str) -> bool:
    """Whether a name begins with a word of `VAGUE`."""
    return name.strip("_").partition("_")[0] in VAGUE.split()


def is_participle(name: str) -> bool:
    """Whether a name is a participle and nothing else."""
    word = name.strip("_")
    return word in IRREGULAR.split() or bool(re.fullmatch("[a-z]+ed", word))


def trainer_size() -> tuple[int, int]:
    """How many attributes of its own the `Trainer` uses, and what its file imports of Sparrow."""
    tree = ast.parse((PACKAGE / "training" / "loop.py").read_text(encoding="utf-8"))
    imports = [
        node
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sparrow")
    ]
    attributes = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
    }
    return len(attributes), len(imports)


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many lines a function has without its docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return lines


def long_functions() -> list[tuple[int, str]]:
    """Lines and name of the package's functions that have more than `LONG`, the longest first."""
    functions = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and code_lines(node) > LONG:
                name = f"{path.relative_to(PACKAGE).with_suffix('')}:{node.name}"
                functions.append((code_lines(node), name))
    return sorted(functions, reverse=True)


def main() -> None:
    """See above."""
    files = loaded()
    sizes = {path: of_file(path) for path in files}
    print(f"loaded: {sum(sizes.values()):,} tokens in {len(files)} files")
    if "--loaded" in sys.argv:
        for path, size in sorted(sizes.items(), key=lambda item: -item[1]):
            print(f"{size:8,}  {path.relative_to(ROOT)}")
        return
    sums = folders()
    for name, size in sums.most_common():
        print(f"{size:8,}  {name}")
    python = sum(size for name, size in sums.items() if not name.endswith("C++"))
    lines = sum(
        len(lines_with_tokens(path.read_text(encoding="utf-8"))) for path in PACKAGE.rglob("*.py")
    )
    print(f"{python:8,}  of Python in all, {python / lines:.1f} a line")
    names = all_bindings()
    for kind, is_such in (("vague names", is_vague), ("participles alone", is_participle)):
        counts = Counter(filter(is_such, names))
        often = ", ".join(f"{name} {count}" for name, count in counts.most_common(12))
        print(f"{kind}: {counts.total() / len(names):.1%} of bindings ({often})")
    functions = long_functions()
    longest = ", ".join(f"{name} {lines}" for lines, name in functions)
    print(f"functions of more than {LONG} lines: {len(functions)} ({longest})")
    attributes, imports = trainer_size()
    print(f"Trainer: {attributes} attributes, {imports} imports of Sparrow")


if __name__ == "__main__":
    main()
