"""Keeps the processes that answer: starts them, starts them again when they die or hang, and
changes their model.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from sparrow.apps.service import child as children
from sparrow.apps.service import worker
from sparrow.apps.service.child import LOADING, Child
from sparrow.apps.service.limits import Limits
from sparrow.apps.service.metrics import Metrics
from sparrow.apps.service.scrape import Scrape
from sparrow.apps.service.settings import Settings
from sparrow.apps.service.stalls import in_thread
from sparrow.apps.service.stand_in import StandIn
from sparrow.apps.service.versions import Model, stack_paths
from sparrow.apps.service.worker import FINISH_S
from sparrow.core.errors import UserError
from sparrow.serving.folder import Checked, find_modified

_SOON_S = 5.0  # a worker that ends as soon after it began to answer has failed
_CHANCE = 3  # failures in a row that may be chance, but not one while a worker starts
# before a worker is started again that has failed; beyond chance it doubles
_PAUSE_S = 1.0
_LONGEST_S = 60.0
_FILES_S = 5.0  # how often it is asked whether files of the model were written to
STALLED_S = 60.0  # that a disk may take to answer
_log = logging.getLogger(__name__)


class BusyError(UserError):
    """Another swap is under way."""


def _remove(items: str | None, in_use: str | None) -> None:
    """Remove a copy of items, unless it is the one in use."""
    if items is not None and items != in_use:
        Path(items).unlink(missing_ok=True)


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
        self._listening = list(listening)
        self._limits = limits
        self._settings = settings
        self._grpc = None if grpc is None else grpc.getsockname()[:2]
        self._metrics = metrics
        self._scrape = scrape
        self._workers: set[Child] = set()  # that answer
        self._starting: set[Child] = set()
        self._keepers: list[asyncio.Task[None]] = []
        self._copies = 0
        self._swapping = asyncio.Lock()
        self._is_ending = False
        self._turn = asyncio.Event()  # what ends the pauses before workers start again
        self._stand_in = StandIn(listening, limits, metrics)
        self._watching: asyncio.Task[None] | None = None
        self.model = Model(())
        self.trouble = ""  # why a worker cannot start
        self.description: dict[str, Any] = {}  # of the model that answers
        self._checked_files: Mapping[str, Checked] = {}  # of the same
        self._columns = set[str]()  # that it reads

    async def start(self, paths: Sequence[str | Path]) -> None:
        """Begin to answer with a model.

        Args:
            paths: of a full folder and its deltas.

        Raises:
            UserError: see `load`.
        """
        items = self._settings.lookups.items
        self.model = Model(
            tuple(await in_thread(paths[0], STALLED_S, _resolve, paths)), self._copy_of(items)
        )
        try:
            self.description = await self._check_model(self.model, items)
        except UserError as error:
            raise UserError(str(error).replace(str(self.model.items), str(items))) from None
        self._columns = {*self.description.pop("columns")}
        self._checked_files = worker.checked_files(self.description)
        del self.description["checked"]
        self.model = self.model._replace(version=self.description["version"])
        try:
            started = await asyncio.gather(
                *(self._start_worker() for _ in range(self._settings.workers))
            )
        except EOFError:
            raise UserError(
                f"{paths[0]}: a worker died while it started; what it said is above"
            ) from None
        self._keepers = [asyncio.create_task(self._keep(first)) for first in started]
        self._watching = asyncio.create_task(self._watch_files())
        await self._name_version(self.description)

    async def swap(
        self,
        folders: Sequence[str | Path],
        items: str | Path | None = None,
        by: str = "sparrow swap",
    ) -> dict[str, Any]:
        """Answer with another model. Returns its description when no answer is of the old one any
        more.

        The log gets a line, also when it is refused.

        Args:
            folders: a full folder and deltas of it, or deltas of the model that answers, or none
                for the same model.
            items: a catalogue in the place of the one that there is.
            by: who asks, for the log.

        Raises:
            UserError: when another swap is under way, or when a folder is refused. Then the old
                model stays.
        """
        try:
            description = await self._change_model(folders, items)
        except BusyError:  # it is tried again, maybe soon
            raise
        except UserError as error:
            _log.warning("%s", error, extra={"by": by})
            raise
        _log.info("%s: answers now", description["folder"], extra={"by": by, **description})
        return description

    async def _change_model(
        self, folders: Sequence[str | Path], items: str | Path | None
    ) -> dict[str, Any]:
        named = [*folders, *([] if items is None else [items])]
        if not named:
            raise UserError("swap: neither a folder nor items; give one")
        if items is not None and self.model.items is None:
            raise UserError("items: the service has none; start it with --items FILE --key COLUMN")
        if self._swapping.locked():
            raise BusyError(f"{named[0]}: another model is being loaded; try again when it answers")
        async with self._swapping:
            try:
                paths = await in_thread(named[0], STALLED_S, _stack, self.model.paths, folders)
            except UserError:
                self._metrics.swaps.labels("refused").inc()
                raise
            before = self.model
            copy = before.items if items is None else self._copy_of(Path(items))
            try:
                description = await self._load_everywhere(Model(paths, copy), items)
            except UserError as error:
                self._metrics.swaps.labels("refused").inc()
                # so that no worker keeps what another has refused
                await self._order_all({"prepare": before})
                _remove(copy, before.items)
                raise UserError(
                    str(error) if items is None else str(error).replace(str(copy), str(items))
                ) from None
            model = Model(paths, copy, description["version"])
            checked = description.pop("checked")
            version_before = self.description["version"]
            known = self._columns
            columns = {*description.pop("columns")}
            # from here on these hold for workers that start
            self.model = model
            self.description = description
            self._columns = columns
            self._checked_files = worker.checked_files({"checked": checked})
            self._retry()
            with self._metrics.swap_stages["flip"].time():
                await self._order_all({"flip": model, "checked": checked}, must=True)
            _remove(before.items, copy)
            await self._name_version(description)
            # after all that is waited for: who reads it may swap again
            self._metrics.swaps.labels("done").inc()
            old = {"folder": before.paths[-1], "version": version_before}
            return description | {
                "folder": paths[-1],
                "before": old,
                "columns": {
                    "new": sorted(columns - known),
                    "no longer read": sorted(known - columns),
                },
            }

    async def _load_everywhere(self, model: Model, items: str | Path | None) -> dict[str, Any]:
        """Let all workers have a model beside theirs, once it is checked. Returns what the check
        says of it.

        Raises:
            UserError: when the check or a worker refuses it.
        """
        begun = time.monotonic()
        with self._metrics.swap_stages["check"].time():
            description = await self._check_model(model, None if items is None else Path(items))
        order = {
            "prepare": model._replace(version=description["version"]),
            "checked": description["checked"],
        }
        # workers map what the check has read; where their disk stalls meanwhile, they do not hold
        # up all swaps
        ticks = LOADING + 2 * (time.monotonic() - begun) / children.TICK_S
        with self._metrics.swap_stages["load"].time():
            for answer in await self._order_all(order, ticks):
                if isinstance(answer, UserError):
                    raise answer
        return description

    def _copy_of(self, items: Path | None) -> str | None:
        """Returns where a copy of items is to be, so that workers that start later find the
        same.
        """
        if items is None:
            return None
        self._copies += 1
        return str(self._settings.lookups.folder / f"{self._copies}.parquet")

    async def _name_version(self, description: Mapping[str, Any]) -> None:
        """Have metrics name the version that answers."""
        folder = Path(self.model.paths[-1])
        # its disk does not answer: the version is named without its card
        with contextlib.suppress(UserError):
            await in_thread(
                folder, STALLED_S, lambda: self._scrape.serves(**description, folder=folder)
            )

    async def end(self) -> None:
        """Have the workers answer what they have accepted, and end. Who asks later cannot connect.

        A worker that hangs is not waited for.
        """
        self._is_ending = True
        self._retry()
        if self._watching is not None:
            self._watching.cancel()
        for listener in self._listening:
            listener.close()
        await self._stand_in.end()
        for child in self._starting - self._workers:  # they have accepted nothing
            child.process.kill()
        for child in self._workers | self._starting:
            child.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINISH_S + 5):
                await asyncio.gather(*self._keepers)
        for child in self._workers | self._starting:  # that does not end
            child.process.kill()

    async def _check_model(self, model: Model, items: Path | None = None) -> dict[str, Any]:
        """Have a process of low priority load and check a model, so that workers only need to map
        it.
        """
        child = Child(worker.check, model, self._settings.lookups, self._settings.ssd, items)
        try:
            description = await self._run_child(child)
            for note in description.pop("notes"):
                _log.warning("%s: %s", model.paths[-1], note)
            return description
        except EOFError:
            if child.is_hung:
                why = (
                    f"the process that loads it has waited for {LOADING * children.TICK_S:g} s; see"
                    " to its disk"
                )
                raise UserError(f"{model.paths[-1]}: {why}, and try again") from None
            raise UserError(
                f"{model.paths[-1]}: the process that loads it has died; is there memory for it?"
            ) from None

    async def _run_child(self, child: Child) -> dict[str, Any]:
        """Returns the only answer of a process, and ends it."""
        try:
            return await child.open()
        finally:
            child.close()
            await child.kill()  # when nobody waits for it any more

    async def _watch_files(self) -> None:
        """Read files of the model that were written to again: workers have mapped them, and so see
        what was written.

        Where bytes are others, all workers end. Others in their place are refused by the files, or
        start.
        """
        while True:
            await asyncio.sleep(_FILES_S)
            model = self.model
            checked = self._checked_files
            # the disk does not answer: then nothing is known
            with contextlib.suppress(UserError, EOFError):
                changed = await in_thread(model.paths[-1], STALLED_S, find_modified, checked)
                if not changed or not self._workers:
                    continue
                reread = await self._run_child(Child(worker.recheck, changed))
                if model is not self.model:
                    continue
                self._checked_files = {**checked, **worker.checked_files(reread)}
                for path in reread["changed"]:
                    _log.error(
                        "%s: was written to, and is not what was checked; workers that read it end",
                        path,
                    )
                for child in list(self._workers) if reread["changed"] else ():
                    await child.kill()

    async def _order_all(
        self, order: dict[str, Any], ticks: float = float("inf"), must: bool = False
    ) -> list[Any]:
        """Give all workers an order. Returns what each says, or the error with which it has refused
        or died.

        One that has died starts again with `self.model`. Where all must obey, so does one that
        refuses.
        """
        workers = list(self._workers)
        answers = await asyncio.gather(
            *(child.ask(order, ticks) for child in workers), return_exceptions=True
        )
        for child, answer in zip(workers, answers, strict=True):
            if must and isinstance(answer, BaseException):
                _log.error(
                    "worker %s: %s; another one starts", child.process.pid, answer or "it died"
                )
                await child.kill()
        return answers

    async def _start_worker(self) -> Child:
        arguments = (self._listening, self._grpc, self._limits, self._settings)
        child = Child(worker.work, self.model, self._checked_files, *arguments)
        self._starting.add(child)
        try:
            await child.open()
            model = None
            while model != self.model:  # it may have changed meanwhile
                model = self.model
                await child.ask({"flip": model, "checked": self._checked_files})
            # so a swap from here on asks it too, after the order to listen
            self._workers.add(child)
            await child.ask({"listen": True})
            child.begun = time.monotonic()
            await self._stand_in.end()
            return child
        except BaseException:
            self._workers.discard(child)
            child.close()
            if child.is_hung:
                self._metrics.hangs.inc()
            raise
        finally:
            self._starting.discard(child)

    async def _keep(self, child: Child) -> None:
        """Start a worker again whenever it has died."""
        failures = 0
        while True:
            await child.gone()
            self._workers.discard(child)
            child.close()
            mark_process_dead(child.process.pid)
            if self._is_ending:
                return
            self._metrics.deaths.inc()
            if child.is_hung:
                self._metrics.hangs.inc()
            _log.warning(
                "worker %s has died (%s); another one starts",
                child.process.pid,
                child.process.exitcode,
            )
            failures = failures + 1 if time.monotonic() - child.begun < _SOON_S else 0
            started = await self._restart_worker(failures)
            if started is None:
                return
            child = started

    async def _restart_worker(self, failures: int) -> Child | None:
        """Returns a worker in the place of one that died, or None at the end.

        After failures it waits, longer and longer, but not when the model changes. Where no worker
        is left, requests are told so meanwhile.
        """
        while not self._is_ending:
            turn = self._turn
            wait_s = _pause_s(failures)
            if failures > _CHANCE and not self._workers:
                self.trouble = self.trouble or "workers die soon after they begin to answer"
                self._stand_in.begin()
            if wait_s:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await turn.wait()
            if self._is_ending:
                break
            try:
                child = await self._start_worker()
            except (EOFError, UserError) as error:
                if self._is_ending:
                    break
                # of a new model the first
                failures = max(failures, _CHANCE) + 1 if turn is self._turn else _CHANCE + 1
                self.trouble = str(error) or "a worker died while it started"
                message = "a worker could not start (%s); it is tried again in %g s"
                _log.error(message, self.trouble, _pause_s(failures))
            else:
                self.trouble = ""
                return child
        return None

    def _retry(self) -> None:
        """End the pauses of workers that start again."""
        self._turn.set()
        self._turn = asyncio.Event()

    @property
    def answering(self) -> int:
        """How many workers there are."""
        return len(self._workers)


def _pause_s(failures: int) -> float:
    return (
        min(_PAUSE_S * 2.0 ** min(max(failures - _CHANCE - 1, 0), 10), _LONGEST_S)
        if failures
        else 0.0
    )


def _resolve(paths: Sequence[str | Path]) -> list[str]:
    return [str(Path(path).resolve()) for path in paths]


def _stack(current: Sequence[str], folders: Sequence[str | Path]) -> tuple[str, ...]:
    return stack_paths(tuple(current), _resolve(folders))
