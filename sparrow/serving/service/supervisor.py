"""Keeps the processes that answer: starts them, starts them again when they die, and changes their model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from sparrow.core.errors import UserError
from sparrow.serving.service import worker
from sparrow.serving.service.limits import Limits
from sparrow.serving.service.metrics import Metrics
from sparrow.serving.service.scrape import Scrape
from sparrow.serving.service.settings import Settings
from sparrow.serving.service.versions import Model, stacked
from sparrow.serving.service.worker import FINISH_S

_processes: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
_SOON_S, _PAUSE_S = 5.0, 1.0  # a worker that ends as soon after its start is started again after a pause
SILENT_S = 10.0  # a worker that obeys tells so each second: one that says nothing for so long has hung
_log = logging.getLogger(__name__)


def ready_processes() -> None:
    """Have one process import all that workers need. They are forks of it: they start sooner, and share that memory.

    Signals are ignored from here on, as it takes over what is. It finds modules where this process does, and not first
    in the folder in which the service was started.
    """
    worker.hear_no_signals()
    os.environ |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    if sys.platform == "linux":  # elsewhere not all libraries survive a fork
        _processes.set_forkserver_preload([worker.__name__])
        forkserver.ensure_running()


class BusyError(UserError):
    """Another swap is under way."""


def _remove(items: str | None, other: str | None) -> None:
    """Remove a copy of items that is not the other one."""
    if items is not None and items != other:
        Path(items).unlink(missing_ok=True)


class Child:
    """A process and the line to it.

    Args:
        target: what it does. It is called with its end of the line and the arguments.
        arguments: what can be sent to a process.
    """

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs:
            self.process = _processes.Process(target=target, args=(theirs, *arguments), daemon=True)
            self.process.start()
        self._writer: asyncio.StreamWriter | None = None
        self._one = asyncio.Lock()
        self.begun = time.monotonic()

    async def open(self) -> dict[str, Any]:
        """Returns its first line. To load a model may take long."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._ours, limit=worker.LINE)
        return await self._read(None)

    async def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Returns what it says to an order. To obey may take long, but not to say that it still obeys."""
        async with self._one:
            assert self._writer is not None
            with contextlib.suppress(OSError, RuntimeError):  # it has died
                self._writer.write(worker.line(order))
            return await self._read(SILENT_S)

    async def _read(self, silent_s: float | None) -> dict[str, Any]:
        """Returns a line that says something.

        Raises:
            EOFError: when the process has died. It is killed when it says nothing for some seconds.
        """
        try:
            while (line := await asyncio.wait_for(self._reader.readline(), silent_s)) == worker.BEAT:
                pass
            told: dict[str, Any] = json.loads(line)
        except (OSError, ValueError) as error:
            if isinstance(error, TimeoutError):
                _log.error("worker %s: says nothing for %g s; it is killed", self.process.pid, silent_s)
            await self.kill()
            raise EOFError from None
        if "refused" in told:
            raise UserError(told["refused"])
        return told

    async def gone(self) -> None:
        """Wait until the process has died."""
        loop, died = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.process.sentinel, died.set)
        await died.wait()
        loop.remove_reader(self.process.sentinel)
        self.process.join()

    async def kill(self) -> None:
        """Kill it. Returns when it cannot answer any more."""
        if self.process.is_alive():
            self.process.kill()
        await asyncio.to_thread(wait, [self.process.sentinel], SILENT_S)

    def close(self) -> None:
        """Tell it to end."""
        (self._writer or self._ours).close()


class Supervisor:
    """The workers of a service.

    Args:
        listening: where they answer.
        grpc: where they speak gRPC, if they do. It stays bound here, so that the port is ours.
        limits, settings: of the service.
        metrics: count what the supervisor does.
        scrape: is told which version answers.
    """

    def __init__(
        self,
        listening: Sequence[socket.socket],
        grpc: socket.socket | None,
        limits: Limits,
        settings: Settings,
        metrics: Metrics,
        scrape: Scrape,
    ) -> None:
        self._listening, self._limits, self._settings = list(listening), limits, settings
        self._grpc = None if grpc is None else grpc.getsockname()[:2]
        self._metrics, self._scrape = metrics, scrape
        self._workers: set[Child] = set()  # that answer
        self._starting: set[Child] = set()
        self._keepers: list[asyncio.Task[None]] = []
        self._copies = 0
        self._swapping, self._is_ending = asyncio.Lock(), False
        self.model = Model(())
        self.told: dict[str, Any] = {}  # of the model that answers
        self._columns = set[str]()  # that it reads

    async def start(self, paths: Sequence[str | Path]) -> None:
        """Begin to answer with a model.

        Args:
            paths: of a full folder and its deltas.

        Raises:
            UserError: see `load`.
        """
        self.model = Model(tuple(str(Path(path).resolve()) for path in paths), self._kept(self._settings.lookups.items))
        try:
            self.told = await self._checked(self.model)
        except UserError as error:
            raise UserError(str(error).replace(str(self.model.items), str(self._settings.lookups.items))) from None
        self._columns = {*self.told.pop("columns")}
        self.model = self.model._replace(version=self.told["version"])
        try:
            started = await asyncio.gather(*(self._started() for _ in range(self._settings.workers)))
        except EOFError:
            raise UserError(f"{paths[0]}: a worker died while it started; what it said is above") from None
        self._keepers = [asyncio.create_task(self._keep(first)) for first in started]
        self._scrape.serves(**self.told, folder=Path(self.model.paths[-1]))

    async def swap(
        self, folders: Sequence[str | Path], items: str | Path | None = None, by: str = "sparrow swap"
    ) -> dict[str, Any]:
        """Answer with another model. Returns what is told of it when no answer is of the old one any more.

        The log gets a line, also when it is refused.

        Args:
            folders: a full folder and deltas of it, or deltas of the model that answers, or none for the same model.
            items: a catalogue in the place of the one that there is.
            by: who asks, for the log.

        Raises:
            UserError: when another swap is under way, or when a folder is refused. Then the old model stays.
        """
        try:
            told = await self._swapped(folders, items)
        except BusyError:  # it is tried again, maybe soon
            raise
        except UserError as error:
            _log.warning("%s", error, extra={"by": by})
            raise
        _log.info("%s: answers now", told["folder"], extra={"by": by, **told})
        return told

    async def _swapped(self, folders: Sequence[str | Path], items: str | Path | None) -> dict[str, Any]:
        named = [*folders, *([] if items is None else [items])]
        if not named:
            raise UserError("swap: neither a folder nor items; give one")
        if items is not None and self.model.items is None:
            raise UserError("items: the service has none; start it with --items FILE --key COLUMN")
        if self._swapping.locked():
            raise BusyError(f"{named[0]}: another model is being loaded; try again when it answers")
        async with self._swapping:
            paths = stacked(self.model.paths, [str(Path(folder).resolve()) for folder in folders])
            before, kept = self.model, self.model.items if items is None else self._kept(Path(items))
            try:
                with self._metrics.swap_stages["check"].time():
                    told = await self._checked(Model(paths, kept))
                model = Model(paths, kept, told["version"])
                with self._metrics.swap_stages["load"].time():
                    for answer in await self._all({"prepare": model}):
                        if isinstance(answer, UserError):
                            raise answer
            except UserError as error:
                self._metrics.swaps.labels("refused").inc()
                await self._all({"prepare": before})  # so that no worker keeps what another has refused
                _remove(kept, before.items)
                raise UserError(str(error) if items is None else str(error).replace(str(kept), str(items))) from None
            was, known, columns = self.told, self._columns, {*told.pop("columns")}
            self.model, self.told, self._columns = model, told, columns  # from here on it holds for workers that start
            with self._metrics.swap_stages["flip"].time():
                await self._all({"flip": model}, must=True)
            _remove(before.items, kept)
            self._metrics.swaps.labels("done").inc()
            self._scrape.serves(**told, folder=Path(paths[-1]))
            told = told | {"folder": paths[-1], "before": {"folder": before.paths[-1], "version": was["version"]}}
            return told | {"columns": {"new": sorted(columns - known), "no longer read": sorted(known - columns)}}

    def _kept(self, items: Path | None) -> str | None:
        """Returns where a copy of items is, so that workers that start later find the same."""
        if items is None:
            return None
        self._copies += 1
        copy = self._settings.lookups.folder / f"{self._copies}.parquet"
        try:
            shutil.copyfile(items, copy)
        except OSError as error:
            raise UserError(f"{items}: cannot be read ({error.strerror}); give a Parquet file") from None
        return str(copy)

    async def end(self) -> None:
        """Have the workers answer what they have accepted, and end. Who asks later cannot connect."""
        self._is_ending = True
        for listener in self._listening:
            listener.close()
        for child in self._workers | self._starting:
            child.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*self._keepers), FINISH_S + 5)
        for child in self._workers | self._starting:  # that does not end
            child.process.kill()

    async def _checked(self, model: Model) -> dict[str, Any]:
        """Have a process of low priority load and check a model, so that workers only need to map it."""
        child = Child(worker.check, model, self._settings.lookups, self._settings.ssd)
        try:
            told = await child.open()
            for note in told.pop("notes"):
                _log.warning("%s: %s", model.paths[-1], note)
            return told
        except EOFError:
            raise UserError(f"{model.paths[-1]}: the process that loads it has died; is there memory for it?") from None
        finally:
            child.close()
            await child.kill()  # when nobody waits for it any more

    async def _all(self, order: dict[str, Any], must: bool = False) -> list[Any]:
        """Give all workers an order. Returns what each says, or the error with which it has refused or died.

        One that has died starts again with `self.model`. Where all must obey, so does one that refuses.
        """
        workers = list(self._workers)
        answers = await asyncio.gather(*(child.ask(order) for child in workers), return_exceptions=True)
        for child, answer in zip(workers, answers, strict=True):
            if must and isinstance(answer, BaseException):
                _log.error("worker %s: %s; another one starts", child.process.pid, answer or "it died")
                await child.kill()
        return answers

    async def _started(self) -> Child:
        child = Child(worker.work, self.model, self._listening, self._grpc, self._limits, self._settings)
        self._starting.add(child)
        try:
            await child.open()
            model = None
            while model != self.model:  # it may have changed meanwhile
                model = self.model
                await child.ask({"flip": model})
            self._workers.add(child)  # so a swap from here on asks it too, after the order to listen
            await child.ask({"listen": True})
            return child
        except BaseException:
            self._workers.discard(child)
            child.close()
            raise
        finally:
            self._starting.discard(child)

    async def _keep(self, child: Child) -> None:
        """Start a worker again whenever it has died."""
        while True:
            await child.gone()
            self._workers.discard(child)
            child.close()
            mark_process_dead(child.process.pid)
            if self._is_ending:
                return
            self._metrics.deaths.inc()
            _log.warning("worker %s has died (%s); another one starts", child.process.pid, child.process.exitcode)
            if time.monotonic() - child.begun < _SOON_S:
                await asyncio.sleep(_PAUSE_S)
            while True:
                if self._is_ending:
                    return
                try:
                    child = await self._started()
                    break
                except (EOFError, UserError) as error:
                    _log.error("a worker could not start (%s); it is tried again", error or "it died")
                    await asyncio.sleep(_PAUSE_S)
