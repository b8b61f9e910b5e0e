"""The tests of sparrow/X/Y.py stand in tests/X/test_Y.py, those of a folder sparrow/X in
tests/X/test_X.py.
"""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
SPARROW = TESTS.parent / "sparrow"
ACROSS = {"equivalence", "faults", "recipes", "cli"}  # what Sparrow promises, through many folders
EXCEPTIONS = {  # what they test has no file of its own
    "data/test_damaged.py": "damaged files through reading and preparation",
    "data/test_real_logs.py": "real logs through inference and preparation",
    "data/batches/test_grouped.py": (
        "a loader on logs with groups, beside test_loader.py with its small windows"
    ),
    "embeddings/test_members.py": (
        "each choice of a table with a second member, through all that knows tables"
    ),
    "embeddings/test_tables_gpu.py": "test_tables.py on a GPU",
    "extensions/tiers/stores/test_stacked.py": "tiers above each other",
    "kernels/embedding_bag/test_compile.py": "what torch.compile must know of all operators",
    "kernels/embedding_bag/test_formats.py": "rows of every format, through all operators",
    "kernels/embedding_bag/test_products.py": (
        "rows multiplied by those of a second table, through all operators"
    ),
    "kernels/embedding_bag/test_programs.py": "any sequence of calls of all operators",
    "models/test_definitions.py": "models against the formulas of their papers",
    "apps/service/test_deploy.py": "the files in deploy/ that run the service elsewhere",
    "training/test_gpu.py": "whole runs on a GPU",
    "training/test_standin.py": "a run on a stand-in for a GPU, through all that it calls",
    "training/test_threads.py": "threads, through preflight, loop and command line",
    "training/test_unknown.py": "unknown ids, through preparation and training",
    "training/test_with_dedup.py": "training with rows of groups looked up once",
}


def has_source(test: Path) -> bool:
    """Whether a Python module, a folder or a C++ file has the name."""
    folder, name = SPARROW / test.parent, test.stem.removeprefix("test_")
    sources = [*folder.glob("*"), *folder.glob("cpu/*")] if folder.is_dir() else []
    return name == folder.name or name in {source.stem.removeprefix("_") for source in sources}


def test_every_test_file_has_a_source() -> None:
    files = [path.relative_to(TESTS) for path in TESTS.glob("*/**/test_*.py")]
    without = {str(path) for path in files if path.parts[0] not in ACROSS and not has_source(path)}
    assert without == set(EXCEPTIONS)
