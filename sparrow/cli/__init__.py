"""The command line. One file per command: file `x.py` is `sparrow x`. tyro reads the arguments of
its function `x`.

A file with a function `main(arguments)` reads its arguments itself.

Imports: apps and below. Imported by: nothing.
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
from sparrow.core.errors import UserError, is_lack_of_memory, suggest
from sparrow.core.memory import keep_freed_memory, leave_out, return_freed_memory
from sparrow.core.terminated import Terminated, unwind_on_sigterm
from sparrow.core.torchrun import is_first, record, record_uncaught

__all__ = ["main"]

# in the order in which a log meets them; others follow
ORDER = (
    "generate",
    "prepare",
    "train",
    "calibrate",
    "evaluate",
    "predict",
    "export",
    "compact",
    "serve",
    "swap",
)
EXTRAS = {  # package -> the extra that installs it, see pyproject.toml
    **{
        "pyarrow": "prepare",
        "tyro": "cli",
        "rich": "cli",
        "matplotlib": "pictures",
        "tensorboard": "report",
    },
    **dict.fromkeys(("starlette", "uvicorn", "msgspec", "prometheus_client"), "serve"),
    "redis": "redis",
    **{"daft": "ray", "ray": "ray", "onnxruntime": "onnx", "onnxscript": "onnx"},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code: a mistake of the user is one line on stderr and exit
    code 2.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if not words or words[0] in ("-h", "--help"):
            print(_overview())
            return 0
        if words[0] == "--version":
            print(importlib.import_module("sparrow").__version__)
            return 0
        if words[0] not in _commands():
            raise UserError(f"no command {words[0]!r}{suggest(words[0], _commands())}")
        if words[0] != "train" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UserError(f"{words[0]}: runs in one process; start it without torchrun")
        if arguments is None:  # this is the program itself
            _set_up_process(words[0])
        module = importlib.import_module(f"sparrow.cli.{words[0]}")
        if "main" in vars(module):
            return int(module.main(words[1:]) or 0)
        importlib.import_module("sparrow.cli._parse").call(
            getattr(module, words[0]), words[1:], words[0]
        )
        return 0
    except UserError as error:
        return _refuse(str(error), error)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "sparrow":
            raise
        return _refuse(_describe_missing(error))
    except BrokenPipeError:  # whoever read our output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Terminated:
        print("sparrow: ended by SIGTERM", file=sys.stderr, flush=True)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)  # what waits for this program sees how it ended
        return 143
    except KeyboardInterrupt:
        print("sparrow: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if is_lack_of_memory(error):
            return _refuse(
                "out of memory; leave it more, or use smaller batches, fewer rows or a smaller dim"
            )
        if isinstance(error, OSError):
            place = f"{error.filename}: " if error.filename else ""
            return _refuse(
                f"{place}{error.strerror or error}; check the path, its permissions and the free"
                " space"
            )
        if type(error).__module__.split(".")[0] != "pyarrow":
            raise
        return _refuse(
            f"arrow cannot read this: {str(error).splitlines()[0]}; convert the column or make it"
            " 'ignore'"
        )


def _set_up_process(command: str) -> None:
    """Set what holds for a process that is the program itself."""
    # else every rank warns about what is intended
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    share_cores()
    sys.unraisablehook = _resend_interrupt
    unwind_on_sigterm()
    record_uncaught()
    return_freed_memory() if command == "prepare" else keep_freed_memory()
    # LightGBM imports it for estimators that nothing here uses: a half to a second
    leave_out("sklearn", "lightgbm.compat")
    # pyarrow imports it wherever it is installed: 46 MB and a third of a second
    leave_out("pandas")


def _describe_missing(error: ModuleNotFoundError) -> str:
    """Returns what to install for a module that is missing."""
    package = (error.name or "").split(".")[0]
    if package in EXTRAS:
        return f"this command needs {error.name!r}; pip install 'sparrow-rec[{EXTRAS[package]}]'"
    at = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{at.filename}:{at.lineno}: no module {error.name!r}; install it, or leave the import out"
    )


def _resend_interrupt(lost: sys.UnraisableHookArgs) -> None:
    """Send an interrupt again that came while memory was freed, where Python can only print it and
    go on.
    """
    if issubclass(lost.exc_type, KeyboardInterrupt):
        main_thread = int(threading.main_thread().ident or 0)
        number = signal.SIGTERM if issubclass(lost.exc_type, Terminated) else signal.SIGINT
        threading.Timer(0.01, signal.pthread_kill, (main_thread, number)).start()
    else:
        sys.__unraisablehook__(lost)


def _refuse(message: str, error: Exception | None = None) -> int:
    record(message)
    if is_first(error or ValueError(message)):
        # in one call: other ranks write there too
        sys.stderr.write(f"sparrow: error: {' '.join(message.split())}\n")
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
