"""The command line. One file per command: file `x.py` is `sparrow x`. tyro reads the arguments of its function `x`.

A file with a function `main(arguments)` reads its arguments itself.
"""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

from sparrow.core.cores import share_cores
from sparrow.core.errors import UserError, suggest
from sparrow.core.memory import keep_freed_memory, leave_out, return_freed_memory

__all__ = ["main"]

# in the order in which a log meets them; others follow
ORDER = ("generate", "prepare", "train", "calibrate", "evaluate", "predict", "export", "compact", "serve", "swap")
EXTRAS = {  # package -> the extra that installs it, see pyproject.toml
    **{"pyarrow": "prepare", "tyro": "cli", "rich": "cli", "matplotlib": "pictures", "tensorboard": "report"},
    **dict.fromkeys(("starlette", "uvicorn", "msgspec", "prometheus_client"), "serve"),
    "redis": "redis",
    **{"daft": "ray", "ray": "ray", "onnxruntime": "onnx", "onnxscript": "onnx"},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code: a mistake of the user is one line on stderr and exit code 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if not given or given[0] in ("-h", "--help"):
            print(_overview())
            return 0
        if given[0] == "--version":
            print(importlib.import_module("sparrow").__version__)
            return 0
        if given[0] not in _commands():
            raise UserError(f"no command {given[0]!r}{suggest(given[0], _commands())}")
        if given[0] != "train" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UserError(f"{given[0]}: runs in one process; start it without torchrun")
        if arguments is None:  # this is the program itself
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else every rank warns about what is intended
            share_cores()
            sys.unraisablehook = _again
            return_freed_memory() if given[0] == "prepare" else keep_freed_memory()
            leave_out("pandas")  # pyarrow imports it wherever it is installed: 46 MB and a third of a second
        module = importlib.import_module(f"sparrow.cli.{given[0]}")
        if "main" in vars(module):
            return int(module.main(given[1:]) or 0)
        importlib.import_module("sparrow.cli._parse").call(getattr(module, given[0]), given[1:], given[0])
        return 0
    except UserError as error:
        return _refuse(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package == "sparrow":
            raise
        if package in EXTRAS:
            return _refuse(f"this command needs {error.name!r}; pip install 'sparrow-rec[{EXTRAS[package]}]'")
        at = traceback.extract_tb(error.__traceback__)[-1]
        return _refuse(f"{at.filename}:{at.lineno}: no module {error.name!r}; install it, or leave the import out")
    except BrokenPipeError:  # whoever read our output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _refuse(f"{place}{error.strerror or error}; check the path, its permissions and the free space")
    except MemoryError:
        return _refuse("out of memory; use smaller batches, fewer rows or a smaller dim")
    except KeyboardInterrupt:
        print("sparrow: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if type(error).__module__.split(".")[0] != "pyarrow":
            raise
        return _refuse(f"arrow cannot read this: {str(error).splitlines()[0]}; convert the column or make it 'ignore'")


def _again(lost: sys.UnraisableHookArgs) -> None:
    """Send an interrupt again that came while memory was freed, where Python can only print it and go on."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        main_thread = int(threading.main_thread().ident or 0)
        threading.Timer(0.01, signal.pthread_kill, (main_thread, signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(lost)


def _refuse(message: str) -> int:
    sys.stderr.write(f"sparrow: error: {' '.join(message.split())}\n")  # in one call: other ranks write there too
    return 2


def _commands() -> list[str]:
    names = {m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")}
    return [n for n in ORDER if n in names] + sorted(names - set(ORDER))


def _overview() -> str:
    lines = ["usage: sparrow COMMAND [...]    (sparrow COMMAND --help tells more)", ""]
    for name in _commands():  # read, not imported: help should not wait for torch
        tree = ast.parse(Path(__path__[0], f"{name}.py").read_text(encoding="utf-8"))
        lines.append(f"  {name:<10} {(ast.get_docstring(tree) or '').splitlines()[0]}")
    return "\n".join(lines)
