"""The routes of the service: read a request within the limits, have it scored, write the
response.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any, NamedTuple, Protocol

import msgspec
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from sparrow.apps.service import explain, logs, page, token
from sparrow.apps.service.batcher import FAILED, Answer, Batcher
from sparrow.apps.service.limits import GONE, Limits, RefusedError
from sparrow.apps.service.lookups.users import Users
from sparrow.apps.service.metrics import Counted, Metrics
from sparrow.apps.service.protocols import openapi, rank, v2
from sparrow.apps.service.request import Request, Sources
from sparrow.apps.service.served_log import ServedLog
from sparrow.apps.service.settings import Settings
from sparrow.apps.service.versions import Version, Versions
from sparrow.core.errors import UserError

_JSON = b"application/json"
_BINARY = b"application/octet-stream"
REQUEST_ID = b"x-request-id"
_COUNT_S = 1.0  # how often what was counted is made readable
_log = logging.getLogger(__name__)
# without a token
_OPEN = ("/", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready")


class Response(NamedTuple):
    """A response of HTTP."""

    body: bytes
    status: int = 200
    type: bytes = _JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Call:
    """A request as it arrives, over HTTP or gRPC.

    Args:
        body: all of it.
        headers: names in small letters.
        path: the parts of the path that are variable.
        begun: `time.perf_counter` of its arrival.
    """

    def __init__(
        self, body: bytes, headers: Mapping[bytes, bytes], path: Mapping[str, str], begun: float
    ) -> None:
        self.body = body
        self.headers = headers
        self.path = path
        self.begun = begun
        self.id = logs.request_id(headers.get(REQUEST_ID))
        self.log_fields: dict[str, Any] = {}
        self.left_ms = math.inf  # until the caller's own deadline
        self.after: list[Callable[[], None]] = []  # done when the answer is written
        self.future: asyncio.Future[Answer] | None = None  # what is waited for

    def gone(self) -> None:
        """Say that the caller has gone, so that what waits for a scorer is not scored."""
        if self.future is not None and not self.future.done():
            self.future.set_exception(RefusedError(499, "the client has gone; nobody reads this"))


class Service:
    """Answers requests with the version that is current.

    Args:
        versions: the models.
        limits: of requests.
        settings: see `Settings`.
    """

    def __init__(self, versions: Versions, limits: Limits, settings: Settings) -> None:
        self.versions = versions
        self.limits = limits
        self.name = settings.name
        self.token = settings.token
        self.metrics = Metrics()
        self.metrics.on_ssd = self._tables_on_ssd
        folder = settings.logs.served_log
        self.served = ServedLog(folder, settings.logs.sample, self.metrics) if folder else None
        self.batcher = Batcher(versions, limits, self.metrics, settings)
        self.users = (
            Users.from_settings(settings.lookups, self.metrics) if settings.lookups.users else None
        )
        self.held = 0  # bytes of bodies

    @property
    def version(self) -> Version:
        """The one that is current."""
        return self.versions.current

    def _tables_on_ssd(self) -> list[Counted]:
        tables: list[Counted] = []
        for rows in self.version.scorer.on_ssd:
            tables.extend(rows.counted)
        return tables

    def sources(self) -> Sources:
        """Returns where the columns of a request come from."""
        sources = self.version.sources
        return sources if self.users is None else sources._replace(user_key=self.users.key)

    # -- what routes do ----------------------------------------------------------------------------

    async def rank(self, call: Call) -> Response:
        """Score a user's candidates."""
        self.batcher.check(call.begun)
        request, top = rank.parse_request(call.body, self.sources(), self.limits)
        return Response(rank.format_answer(request, top, await self.score(call, request)))

    async def infer(self, call: Call) -> Response:
        """Score the rows of tensors."""
        name = self.check_name(call, self.version)
        self.batcher.check(call.begun)
        request, wanted = v2.parse_request(
            call.body, call.headers.get(v2.HEADER), self.sources(), self.limits
        )
        call.id = logs.request_id(call.headers.get(REQUEST_ID), wanted.id.encode())
        answer = await self.score(call, request)
        self.check_name(call, answer.version)
        body, length = v2.format_answer(name, wanted, answer)
        if length is None:
            return Response(body)
        return Response(body, 200, _BINARY, ((v2.HEADER, b"%d" % length),))

    async def explain(self, call: Call) -> Response:
        """Say what the model makes of one candidate of a request, and how its score changes without
        each column.
        """
        request, _ = rank.parse_request(call.body, self.sources(), self.limits)
        if self.users is not None:
            request, _ = await self.users.fill_columns(request)
        at = self.version
        candidate = int(call.path["candidate"])
        request = request if at.items is None else at.items.fill_columns(request)
        if at.scorer.mixing:  # the candidate's own score would be another one than in its request
            raise UserError(f"explain: {at.scorer.mixing}; look at a model in another precision")
        trial, columns = explain.drop_each_column(request, candidate, at.scorer.schema, self.limits)
        answer = await self._wait_for_answer(call, trial)
        return Response(
            await asyncio.to_thread(explain.format_explanation, trial, candidate, columns, answer)
        )

    async def example(self, call: Call) -> Response:
        """Give a request for `/rank`, of rows that are kept with the model."""
        return Response(
            await asyncio.to_thread(page.example, self.version.scorer, int(call.path["row"]))
        )

    async def page(self, call: Call) -> Response:
        """Give a page to look at a request."""
        return Response(page.HTML, 200, page.TYPE, page.HEADERS)

    async def score(self, call: Call, request: Request) -> Answer:
        """Have a caller's request scored. It may enter the served log."""
        self.metrics.stages["read"].observe(time.perf_counter() - call.begun)
        users = None
        if self.users is not None:
            request, users = await self.users.fill_columns(request)
        answer = (await self._wait_for_answer(call, request))._replace(users=users)
        call.log_fields = {"version": answer.version.name, "candidates": request.count}
        if self.served is not None:
            self.served.put(call.id, request, answer, len(call.body))
        return answer

    async def _wait_for_answer(self, call: Call, request: Request) -> Answer:
        """Wait until a request is scored. Its version counts as in use until the answer is
        written.
        """
        self.limits.check_lists(request.user, request.candidates, self.version.lists)
        waiting = self.batcher.put(request, call.begun, call.id)
        call.after.append(lambda: self.batcher.finish(waiting))
        call.future = waiting.future
        return await waiting.future

    async def model(self, call: Call) -> Response:
        """Describe the tensors of the model."""
        at = self.version
        return json(v2.metadata(at.scorer, self.check_name(call, at), at.name))

    async def model_ready(self, call: Call) -> Response:
        """Say whether the model answers, which it does from the first moment on."""
        return json({"name": self.check_name(call, self.version), "ready": True})

    def check_name(self, call: Call, version: Version) -> str:
        """Check the model's name in a path, and return it. It is that of the service, or of the
        folder that answers.

        Raises:
            RefusedError: for another name, and for another version.
        """
        name = call.path["name"]
        folder = version.scorer.folder.path.name
        if name not in (self.name, folder):
            known = " or ".join(
                repr(known_name) for known_name in dict.fromkeys((self.name, folder))
            )
            raise RefusedError(404, f"model {name!r}: does not answer here; {known} does")
        if (wanted_version := call.path.get("version", version.name)) != version.name:
            raise RefusedError(
                404, f"version {wanted_version}: {version.name} answers; ask for that, or for none"
            )
        return name

    async def server(self, call: Call) -> Response:
        """Describe the server."""
        return json(
            {
                "name": "sparrow",
                "version": version("sparrow-rec"),
                "extensions": ["binary_tensor_data"],
            }
        )

    async def live(self, call: Call) -> Response:
        """Say that the service is there."""
        return json({"live": True})

    async def ready(self, call: Call) -> Response:
        """Say that the model answers, and which."""
        return json({"ready": True, "version": self.version.name})

    async def describe_api(self, call: Call) -> Response:
        """Give the routes and the columns of the model, as OpenAPI."""
        return json(openapi.describe(self.version.scorer, self.name, self.limits))


# -- HTTP ------------------------------------------------------------------------------------------


class _Index(IntegerConvertor):
    regex = "[0-9]{1,9}"  # Python refuses to read more than 4,300 digits


register_url_convertor("index", _Index())
Answering = Callable[[Call], Awaitable[Response]]
Routes = list[tuple[str, str, Answering]]  # method, path, and what answers


class Host(Protocol):
    """Whose routes they are. held: bytes of bodies that are there. token: what callers have to
    send, if anything.
    """

    limits: Limits
    token: bytes | None
    metrics: Metrics
    held: int


class Endpoint:
    """One route as an ASGI application.

    Args:
        service: whose it is.
        route: its path, for metrics.
        answers: what makes the response, by method of HTTP. Where nothing is there it is empty.
    """

    def __init__(self, service: Host, route: str, answers: Mapping[str, Answering]) -> None:
        self._service = service
        self._route = route
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        service = self._service
        begun = time.perf_counter()
        held = Held(self._service)
        call = Call(b"", dict(scope["headers"]), scope.get("path_params", {}), begun)
        scope[GONE] = call.gone
        try:
            response = await self._respond(scope, receive, call, held)
            answered = time.perf_counter()
            await _send(
                send, response._replace(headers=(*response.headers, (REQUEST_ID, call.id.encode())))
            )
            service.metrics.stages["write"].observe(time.perf_counter() - answered)
            count(service, self._route, call, str(response.status))
        finally:
            del scope[GONE]  # a connection keeps the scope until its next request
            held.give_back()
            for work in call.after:
                work()

    async def _respond(self, scope: Scope, receive: Receive, call: Call, held: Held) -> Response:
        """Returns the response, which for a mistake is one line about it."""
        try:
            self._check(scope, call.headers)
            try:
                async with asyncio.timeout(self._service.limits.read_s):
                    call.body = await held.read(call.headers, receive)
            except TimeoutError:
                reason = f"body: took longer than {self._service.limits.read_s:g} s; send it faster"
                raise RefusedError(408, reason) from None
            return await self._answers[scope["method"]](call)
        except Exception as error:
            return error_response(refusal(error, call))

    def _check(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Refuse a request for its headers, before its body is read."""
        limits = self._service.limits
        if self._route not in _OPEN:
            token.check(headers.get(b"authorization", b""), self._service.token)
        if sum(len(name) + len(value) for name, value in scope["headers"]) > 1e3 * limits.header_kb:
            raise RefusedError(
                431, f"headers: more than {limits.header_kb:g} kB; leave out what is not needed"
            )
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise RefusedError(
                415, "Content-Encoding: bodies are not unpacked here; send it as it is"
            )
        place = f"{scope['method']} {scope['path']!r}"
        if not self._answers:
            raise RefusedError(404, f"{place}: nothing is there; see docs/serving.md")
        if scope["method"] not in self._answers:
            raise RefusedError(405, f"{place}: send {min(self._answers)}", ", ".join(self._answers))


class Held:
    """The bytes of a body that is being read or scored, which count against `Limits.held_mb`."""

    def __init__(self, service: Host) -> None:
        self._service = service
        self._bytes = 0

    async def read(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """Returns a body within the limits. What has not arrived does not count: to be slow blocks
        nobody.
        """
        # the server has checked that it is a number
        self._fits(int(headers.get(b"content-length", b"0")))
        parts = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RefusedError(400, "body: ended early")
            parts.append(message.get("body", b""))
            self.take(len(parts[-1]))
            if not message.get("more_body", False):
                return b"".join(parts)

    def take(self, size: int) -> None:
        """Count some bytes.

        Raises:
            RefusedError: when they are too many.
        """
        self._fits(self._bytes + size)
        if self._service.held + size > self._service.limits.held_mb * 1e6:
            raise RefusedError(
                429, f"body: requests hold {self._service.held} bytes already; try again later"
            )
        self._bytes += size
        self._service.held += size

    def _fits(self, size: int) -> None:
        most = self._service.limits.body_mb
        if size > most * 1e6:
            raise RefusedError(
                413, f"body: more than {most:g} MB; split the request, or serve with --body-mb"
            )

    def give_back(self) -> None:
        """Say that the body is gone."""
        self._service.held -= self._bytes
        self._bytes = 0


def count(service: Host, route: str, call: Call, status: str) -> None:
    """Count an answer, and log it where that is wanted."""
    service.metrics.requests.labels(route, status).inc()
    if logs.access.isEnabledFor(logging.INFO):
        ms = round(1e3 * (time.perf_counter() - call.begun), 3)
        fields = {
            "route": route,
            "status": status,
            "ms": ms,
            "bytes": len(call.body),
            "request_id": call.id,
        }
        if trace := logs.trace_id(call.headers.get(b"traceparent")):
            fields["trace_id"] = trace
        logs.access.info("request", extra=fields | call.log_fields)


def refusal(error: Exception, call: Call) -> RefusedError:
    """Returns the error that the caller gets. An error of the service itself goes to its log."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, UserError):
        return RefusedError(400, str(error))
    _log.error("a request failed", exc_info=error, extra={"request_id": call.id})
    return RefusedError(500, FAILED)


def error_response(error: RefusedError) -> Response:
    """Returns the response that says why there are no scores."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if error.retry_s is not None:
        headers = ((b"retry-after", b"%d" % error.retry_s),)
    elif error.status == 401:
        headers = ((b"www-authenticate", b"Bearer"),)
    elif error.allow:
        headers = ((b"allow", error.allow.encode()),)
    return json({"error": str(error)}, error.status, headers)


async def _send(send: Send, response: Response) -> None:
    length = (b"content-length", b"%d" % len(response.body))
    headers = [(b"content-type", response.type), length, *response.headers]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})


def json(
    content: Any, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> Response:
    """Returns a response of JSON."""
    return Response(msgspec.json.encode(content), status, _JSON, headers)


def app(service: Service) -> Router:
    """Returns the ASGI application of a service. Its scorers end with it, after what was
    accepted.
    """
    model = "/v2/models/{name}"
    version_path = model + "/versions/{version}"
    routes: Routes = [
        ("GET", "/", service.page),
        ("GET", "/example/{row:index}", service.example),
        ("POST", "/explain/{candidate:index}", service.explain),
        ("POST", "/rank", service.rank),
        *((("POST", path + "/infer", service.infer)) for path in (model, version_path)),
        *((("GET", path, service.model)) for path in (model, version_path)),
        *((("GET", path + "/ready", service.model_ready)) for path in (model, version_path)),
        ("GET", "/v2", service.server),
        *((("GET", path, service.live)) for path in ("/health/live", "/v2/health/live")),
        *((("GET", path, service.ready)) for path in ("/health/ready", "/v2/health/ready")),
        ("GET", "/openapi.json", service.describe_api),
    ]

    async def count() -> None:
        while True:
            await asyncio.sleep(_COUNT_S)
            service.metrics.flush()

    @asynccontextmanager
    async def lifespan(_: Router) -> AsyncIterator[None]:
        counting = asyncio.create_task(count())
        if service.users is not None:
            await service.users.connect()
        yield
        counting.cancel()
        await asyncio.to_thread(service.batcher.close)  # the loop goes on, and says so
        if service.users is not None:
            await service.users.close()
        if service.served is not None:
            await asyncio.to_thread(service.served.close)
        service.metrics.flush()

    return make_router(service, routes, lifespan)


def make_router(
    service: Host, routes: Routes, lifespan: Callable[[Router], Any] | None = None
) -> Router:
    """Make an ASGI application with some routes, of which none has the path of another.

    What Starlette would answer itself is not used: errors, methods of no route, and redirections.
    """
    starlette_routes = []
    for method, path, answer in routes:
        methods = ("GET", "HEAD") if method == "GET" else (method,)
        starlette_routes.append(
            Route(path, Endpoint(service, path, dict.fromkeys(methods, answer)))
        )
    return Router(
        starlette_routes,
        redirect_slashes=False,
        lifespan=lifespan,
        default=Endpoint(service, "other", {}),
    )
