"""The Open Inference Protocol (V2) over gRPC, with the stubs of `tritonclient`.

Source: https://github.com/kserve/open-inference-protocol,
`specification/protocol/open_inference_grpc.proto`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as messages

from sparrow.apps.service import logs, token
from sparrow.apps.service.app import REQUEST_ID, Call, Held, Service, count, refusal
from sparrow.apps.service.limits import RefusedError
from sparrow.apps.service.protocols import v2
from sparrow.apps.service.versions import Version
from sparrow.core.errors import UserError, suggest

NAME = "inference.GRPCInferenceService"
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
_CONTENTS = {
    "BOOL": "bool",
    "INT64": "int64",
    "UINT64": "uint64",
    "FP32": "fp32",
    "FP64": "fp64",
    "BYTES": "bytes",
}
_CONTENTS |= {f"INT{bits}": "int" for bits in (8, 16, 32)} | {
    f"UINT{bits}": "uint" for bits in (8, 16, 32)
}
_IDLE_MS = 300_000  # until a connection without calls is closed
_HEALTH = ("ServerLive", "ServerReady")  # for all, without a token
_METHODS = (*_HEALTH, "ServerMetadata", "ModelReady", "ModelMetadata", "ModelInfer")


async def serve_grpc(service: Service, host: str, port: int) -> tuple[grpc.aio.Server, int]:
    """Serve on the running event loop. Returns the server, whose `stop(seconds)` ends it, and its
    port.

    Processes that give the same port share it: each gets some of the connections (SO_REUSEPORT).

    Args:
        service: what answers.
        host, port: where. Port 0 takes any that is free.

    Raises:
        UserError: when it cannot listen there.
    """
    limits = service.limits
    options = [
        ("grpc.so_reuseport", 1),
        ("grpc.max_metadata_size", int(1e3 * limits.header_kb)),
        ("grpc.max_receive_message_length", int(1e6 * limits.body_mb)),
        ("grpc.server_handshake_timeout_ms", int(1e3 * limits.read_s)),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
    ]
    alive_ms = int(1e3 * limits.write_s)  # a client that is gone, or frozen, is noticed
    options += [("grpc.keepalive_time_ms", alive_ms), ("grpc.keepalive_timeout_ms", alive_ms)]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=limits.connections)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(NAME, Methods(service).handlers())]
    )
    try:
        bound_port = server.add_insecure_port(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        )
    except RuntimeError as error:
        raise UserError(
            f"{host}:{port}: cannot listen ({error}); choose another --grpc-port"
        ) from None
    await server.start()
    return server, bound_port


class Methods:
    """What can be called. Each takes a message and returns one.

    Args:
        service: what answers.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        limits = service.limits
        self._reading = asyncio.Semaphore(max(int(limits.held_mb / limits.body_mb), 1))

    def handlers(self) -> dict[str, Any]:
        """Returns name -> handler of each method."""
        return {
            name: grpc.stream_unary_rpc_method_handler(
                self._handler(name), response_serializer=lambda reply: reply.SerializeToString()
            )
            for name in _METHODS
        }

    def _handler(self, name: str) -> Any:
        """Returns a method as gRPC calls it. It reads the message itself, so that few are read at a
        time.
        """
        service = self._service
        route = f"/{NAME}/{name}"
        request = getattr(messages, f"{name}Request")

        async def handle(stream: AsyncIterator[bytes], context: Any) -> Any:
            metadata = context.invocation_metadata()
            headers = {
                key.encode(): value.encode() if isinstance(value, str) else value
                for key, value in metadata
            }
            held = Held(service)
            call = Call(b"", headers, {}, time.perf_counter())
            status = "cut"
            is_done = False

            def finish(_: Any = None) -> None:  # the answer has been written, or never will be
                nonlocal is_done
                if not is_done:
                    is_done = True
                    held.give_back()
                    for work in call.after:
                        work()
                    count(service, route, call, status)

            context.add_done_callback(finish)
            try:
                if name not in _HEALTH:
                    token.check(headers.get(b"authorization", b""), service.token)
                if name == "ModelInfer":
                    service.batcher.check(call.begun)
                call.body = await self._read(stream, name)
                held.take(len(call.body))
                left_s = context.time_remaining()
                call.left_ms = math.inf if left_s is None else 1e3 * left_s
                response, status = await self._answer(request.FromString(call.body), call), "200"
                # who does not read holds nothing
                asyncio.get_running_loop().call_later(service.limits.write_s, finish)
                return response
            except DecodeError as error:
                refused = RefusedError(400, str(error))
            except Exception as error:
                refused = refusal(error, call)
            status = str(refused.status)
            trailers: tuple[tuple[str, str], ...] = (("x-request-id", call.id),)
            if refused.retry_s is not None:
                trailers += (("grpc-retry-pushback-ms", str(1000 * refused.retry_s)),)
            await context.abort(
                _CODES.get(refused.status, grpc.StatusCode.INTERNAL), str(refused), trailers
            )

        return handle

    async def _read(self, stream: AsyncIterator[bytes], name: str) -> bytes:
        read_s = self._service.limits.read_s
        try:
            async with (
                asyncio.timeout(read_s),
                contextlib.nullcontext() if name in _HEALTH else self._reading,
            ):
                return await anext(stream)
        except TimeoutError:
            raise RefusedError(
                408, f"message: took longer than {read_s:g} s; send it faster"
            ) from None
        except StopAsyncIteration:
            raise RefusedError(400, "message: none came; send one") from None

    async def _answer(self, message: Any, call: Call) -> Any:
        """Returns the answer to a message."""
        at = self._service.version
        match message:
            case messages.ServerLiveRequest():
                return messages.ServerLiveResponse(live=True)
            case messages.ServerReadyRequest():
                return messages.ServerReadyResponse(ready=True)
            case messages.ServerMetadataRequest():
                return messages.ServerMetadataResponse(
                    name="sparrow", version=version("sparrow-rec")
                )
            case messages.ModelInferRequest():
                return await self._infer(message, call)
        name = self._check_name(message.name, message.version, call, at)
        if isinstance(message, messages.ModelMetadataRequest):
            return ParseDict(
                v2.metadata(at.scorer, name, at.name), messages.ModelMetadataResponse()
            )
        return messages.ModelReadyResponse(ready=True)

    async def _infer(self, message: Any, call: Call) -> Any:
        service = self._service
        name = self._check_name(message.model_name, message.model_version, call, service.version)
        kinds = {
            key: parameter.WhichOneof("parameter_choice")
            for key, parameter in message.parameters.items()
        }
        parameters = {
            key: getattr(message.parameters[key], kind) for key, kind in kinds.items() if kind
        }
        tensors, contents = _tensors(message)
        request = v2.request_of_tensors(
            tensors, contents, parameters, service.sources(), service.limits, call.left_ms
        )
        call.id = logs.request_id(call.headers.get(REQUEST_ID), message.id.encode())
        answer = await service.score(call, request)
        self._check_name(message.model_name, message.model_version, call, answer.version)
        response = messages.ModelInferResponse(
            model_name=name, model_version=answer.version.name, id=message.id
        )
        labels = answer.version.scorer.labels
        for label in v2.Wanted(
            message.id, dict.fromkeys((output.name for output in message.outputs), True), True
        ).select(labels):
            scores_N = answer.scores_NT[:, labels.index(label)].astype("<f4")
            response.outputs.add(name=label, datatype="FP32", shape=[len(scores_N)])
            response.raw_output_contents.append(scores_N.tobytes())
        for kind, counts in zip(answer.odd_values._fields, answer.odd_values, strict=True):
            response.parameters[kind].int64_param = sum(counts.values())
        if answer.users is not None:
            response.parameters["users"].string_param = answer.users
        return response

    def _check_name(self, name: str, wanted_version: str, call: Call, at: Version) -> str:
        call.path = {"name": name, **({"version": wanted_version} if wanted_version else {})}
        return self._service.check_name(call, at)


def _tensors(message: Any) -> tuple[list[v2.Tensor], list[bytes | None]]:
    """Returns the inputs of a request, and the bytes of each, which has them or values."""
    raw = message.raw_input_contents
    if len(raw) not in (0, len(message.inputs)):
        raise UserError(
            f"raw_input_contents: {len(raw)} for {len(message.inputs)} inputs; give one for each,"
            " or none"
        )
    tensors = []
    for tensor in message.inputs:
        data: list[Any] | None = None
        if not raw:
            if tensor.datatype not in _CONTENTS:
                raise UserError(
                    f"input {tensor.name!r}: datatype"
                    f" {tensor.datatype!r}{suggest(tensor.datatype, _CONTENTS)}"
                )
            values = getattr(tensor.contents, f"{_CONTENTS[tensor.datatype]}_contents")
            try:
                data = (
                    [value.decode() for value in values]
                    if tensor.datatype == "BYTES"
                    else list(values)
                )
            except UnicodeDecodeError as error:
                raise UserError(f"input {tensor.name!r}: {error}; send UTF-8") from None
        tensors.append(v2.Tensor(tensor.name, tensor.datatype, list(tensor.shape), {}, data))
    return tensors, list(raw) if raw else [None] * len(tensors)
