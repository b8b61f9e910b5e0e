from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tritonclient.grpc", reason="needs the extra [grpc]")

import grpc
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as messages
from tritonclient.utils import InferenceServerException

from sparrow.apps.service.app import Service
from sparrow.apps.service.limits import Limits
from sparrow.apps.service.rpc import NAME, serve_grpc
from sparrow.apps.service.versions import Model
from sparrow.core.errors import UserError
from sparrow.serving import Scorer, load
from tests.apps.service.asking import ask, counted
from tests.apps.service.protocols.test_protocols import cut
from tests.apps.service.protocols.test_v2 import INFER, USER, as_json, shared, tensors, type_of
from tests.apps.service.test_batcher import CLOSE, held
from tests.pace import Deadline

TEXTS = ("cat_0", "cat_1", "cat_2")


def until(is_so: Callable[[], Any]) -> None:
    """Wait, as the server's event loop is in another thread."""
    deadline = Deadline(30)
    while not is_so():
        assert not deadline.over, deadline
        time.sleep(0.002)


class Running:
    """A service over gRPC, on an event loop in a thread of its own."""

    def __init__(self, service: Service, port: int = 0) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.server, self.port = self.do(serve_grpc(service, "127.0.0.1", port))
        self.address = f"127.0.0.1:{self.port}"

    def do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def end(self) -> None:
        self.do(self.server.stop(10))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def run() -> Iterator[Callable[..., Running]]:
    made: list[Running] = []

    def run(service: Service, port: int = 0) -> Running:
        made.append(Running(service, port))
        return made[-1]

    yield run
    for one in made:
        one.end()


@pytest.fixture
def address(run: Callable[..., Running], service: Service) -> str:
    return run(service).address


def inputs_of(arrays: dict[str, Any]) -> list[triton.InferInput]:
    found = []
    for name, array in arrays.items():
        found.append(triton.InferInput(name, list(array.shape), type_of(array)))
        found[-1].set_data_from_numpy(array)
    return found


def typed(arrays: dict[str, Any], **named: Any) -> messages.ModelInferRequest:
    """A request with values in place of bytes."""
    told = messages.ModelInferRequest(model_name="model", **named)
    for name, array in arrays.items():
        one = told.inputs.add(name=name, datatype=type_of(array), shape=list(array.shape))
        kind = {"BYTES": "bytes", "INT64": "int64", "FP32": "fp32"}[one.datatype]
        getattr(one.contents, f"{kind}_contents").extend(
            [value.encode() if kind == "bytes" else value for value in array.tolist()]
        )
    return told


def in_bytes(arrays: dict[str, Any]) -> messages.ModelInferRequest:
    """The same with bytes."""
    told = messages.ModelInferRequest(model_name="model")
    for name, array in arrays.items():
        told.inputs.add(name=name, datatype=type_of(array), shape=list(array.shape))
        texts = [text.encode() for text in array.tolist()] if array.dtype == object else []
        data = (
            b"".join(struct.pack("<I", len(text)) + text for text in texts)
            if array.dtype == object
            else array.tobytes()
        )
        told.raw_input_contents.append(data)
    return told


def call(address: str, message: Any, method: str = "ModelInfer", **named: Any) -> Any:
    """The answer to a message, over a connection of its own. What is no message is sent as it is."""
    data = message if isinstance(message, bytes) else message.SerializeToString()
    alone = [("grpc.use_local_subchannel_pool", 1)]  # else one that is just closed may serve again
    with grpc.insecure_channel(address, alone) as channel:
        found = channel.unary_unary(f"/{NAME}/{method}")(data, timeout=60, **named)
    return messages.ModelInferResponse.FromString(found) if method == "ModelInfer" else found


def scores_of(told: Any) -> Any:
    assert [one.shape for one in told.outputs] == [[len(told.raw_output_contents[0]) // 4]]
    return np.frombuffer(told.raw_output_contents[0], "<f4")


def test_other_models_and_few_bits(
    run: Callable[..., Running],
    serve: Callable[..., Service],
    other: Scorer,
    rows: list[dict[str, Any]],
) -> None:
    some = shared(rows[:9])
    user = {name: some[0][name] for name in USER}
    candidates = [{name: value for name, value in row.items() if name not in USER} for row in some]
    got = scores_of(call(run(serve(of=other)).address, in_bytes(tensors(other, some, USER))))
    assert np.abs(got - other.rank(user, candidates)[:, 0]).max() <= CLOSE


def test_the_public_client_works_as_it_is(
    address: str, service: Service, scorer: Scorer, rows: list[dict[str, Any]]
) -> None:
    """It gets the scores that HTTP gives, and the scorer alone, from bytes and from values."""
    client = triton.InferenceServerClient(address)
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("model")
    assert client.get_server_metadata().name == "sparrow"
    told = client.get_model_metadata("model", as_json=True)
    assert told["versions"] == [scorer.folder.digest]
    arrays = tensors(
        scorer, some := [row | {name: row[name] or "" for name in TEXTS} for row in rows[:30]]
    )
    assert {one["name"] for one in told["inputs"]} == arrays.keys()
    found, want = (
        client.infer("model", inputs_of(arrays), request_id="seven"),
        scorer.score(some)[:, 0],
    )
    assert np.abs(found.as_numpy("label") - want).max() <= CLOSE
    assert (
        found.get_response().model_version == scorer.folder.digest
        and found.get_response().id == "seven"
    )
    arrays = {
        name: np.nan_to_num(array, nan=0.5) if array.dtype.kind == "f" else array
        for name, array in arrays.items()
    }
    of_http = ask(service, INFER, as_json(arrays)).json["outputs"][0]["data"]
    assert (
        np.abs(client.infer("model", inputs_of(arrays)).as_numpy("label") - of_http).max() <= CLOSE
    )
    assert np.abs(scores_of(call(address, typed(arrays))) - of_http).max() <= CLOSE
    output = [triton.InferRequestedOutput("label")]
    path = {"model_version": scorer.folder.digest, "outputs": output, "timeout": 60_000_000}
    assert (
        np.abs(client.infer("one", inputs_of(arrays), **path).as_numpy("label") - of_http).max()
        <= CLOSE
    )
    client.close()
    until(lambda: f'{{route="/{NAME}/ModelInfer",status="200"}} 4.0' in counted(service))
    until(lambda: service.held == 0 and service.version.held == 0)


def test_a_request_without_candidates_has_no_scores(
    address: str, scorer: Scorer, rows: list[dict[str, Any]]
) -> None:
    arrays = tensors(scorer, rows[:1], USER)
    keep = {*USER, *(f"{name}:lengths" for name in USER)}
    for of_user in (keep, set()):
        some = {name: array if name in of_user else array[:0] for name, array in arrays.items()}
        for message in (typed(some), in_bytes(some)):
            assert len(scores_of(call(address, message))) == 0


def test_a_tensor_of_one_row_is_of_the_user(
    address: str, scorer: Scorer, rows: list[dict[str, Any]]
) -> None:
    some = [
        rows[0] | {n: row[n] for n in row if n not in USER} | {n: row[n] or "" for n in TEXTS}
        for row in rows[:9]
    ]
    with triton.InferenceServerClient(address) as client:
        found = client.infer("model", inputs_of(tensors(scorer, some, USER))).as_numpy("label")
    assert np.abs(found - scorer.score(some)[:, 0]).max() <= CLOSE


def refused(
    address: str, message: Any, method: str = "ModelInfer", **named: Any
) -> tuple[Any, str, dict[str, str]]:
    """Code, text and trailing metadata of what is refused."""
    with pytest.raises(grpc.RpcError) as caught:
        call(address, message, method, **named)
    return caught.value.code(), caught.value.details(), dict(caught.value.trailing_metadata())


def of(name: str, told: Any) -> Any:
    """The input of a column."""
    return next(one for one in told.inputs if one.name == name)


def change(key: str, value: Any) -> Any:
    return lambda told: setattr(told.inputs[0], key, value)


MISTAKES = {
    "no bytes": (
        lambda told: told.inputs[0].ClearField("contents"),
        "input 'user': 0 values where its shape says 5",
    ),
    "bytes for some": (
        lambda told: told.raw_input_contents.append(b""),
        "raw_input_contents: 1 for 12 inputs",
    ),
    "another type": (change("datatype", "FP16"), "input 'user': datatype 'FP16'"),
    "no type": (change("datatype", ""), "input 'user': datatype ''"),
    "a negative shape": (
        lambda told: told.inputs[0].shape.append(-1),
        "input 'user': shape [5, -1]",
    ),
    "twice": (change("name", "item"), "input 'item': is given twice"),
    "an unknown column": (change("name", "usr"), "no column 'user'"),
    "no text": (
        lambda told: of("cat_0", told).contents.bytes_contents.__setitem__(0, b"\xff"),
        "send UTF-8",
    ),
    "an output": (
        lambda told: told.outputs.add(name="x"),
        "output 'x': the model has no such label",
    ),
    "a timeout": (
        lambda told: told.parameters["timeout"].MergeFromString(b"\x1a\x01x"),
        "parameters.timeout: 'x'",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_messages_that_are_no_request(
    name: str, address: str, scorer: Scorer, rows: list[dict[str, Any]]
) -> None:
    mistake, says = MISTAKES[name]
    message = typed(tensors(scorer, [row | {n: row[n] or "" for n in TEXTS} for row in rows[:5]]))
    mistake(message)
    code, told, _ = refused(address, message)
    assert code is grpc.StatusCode.INVALID_ARGUMENT and says in told, told


def test_what_is_not_there(address: str, scorer: Scorer) -> None:
    assert refused(address, b"\xff\xff")[0] is grpc.StatusCode.INVALID_ARGUMENT
    code, told, _ = refused(address, messages.ModelInferRequest(model_name="other"))
    assert (
        code is grpc.StatusCode.NOT_FOUND
        and "model 'other': does not answer here; 'model' or 'one' does" in told
    )
    other = messages.ModelReadyRequest(name="model", version="1")
    assert refused(address, other, "ModelReady")[0] is grpc.StatusCode.NOT_FOUND
    stats = messages.ModelStatisticsRequest()
    assert refused(address, stats, "ModelStatistics")[0] is grpc.StatusCode.UNIMPLEMENTED
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.stream_unary(f"/{NAME}/ModelInfer")(iter(()))
    assert (
        caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        and "message: none came" in caught.value.details()
    )


def test_it_is_bounded(
    run: Callable[..., Running],
    serve: Callable[..., Service],
    scorer: Scorer,
    rows: list[dict[str, Any]],
) -> None:
    service = serve(Limits(deadline_ms=60_000, body_mb=0.02, held_mb=0.03, candidates=5))
    address, arrays = run(service).address, tensors(scorer, rows[:6])
    code, told, _ = refused(address, typed(arrays))
    assert (
        code is grpc.StatusCode.RESOURCE_EXHAUSTED
        and "candidates: 6 of them, 5 are allowed" in told
    )
    code, told, _ = refused(address, b"x" * 20_001)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "20001 vs. 20000" in told
    service.held = 29_900
    code, told, after = refused(address, typed(tensors(scorer, rows[:5])))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "requests hold" in told
    assert after["grpc-retry-pushback-ms"] == "1000" and service.held == 29_900


def test_the_deadline_of_the_client_counts(
    address: str,
    service: Service,
    scorer: Scorer,
    rows: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a scorer that is busy. Who has gone is not scored, and its version is given back."""
    go, sizes = held(service, monkeypatch)
    with grpc.insecure_channel(address) as channel:
        infer = channel.unary_unary(f"/{NAME}/ModelInfer")
        body = typed(tensors(scorer, rows[:5])).SerializeToString()
        first = infer.future(body, timeout=60)
        until(lambda: sizes)
        with pytest.raises(grpc.RpcError) as caught:
            infer(body, timeout=0.2)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        message = typed(tensors(scorer, rows[:5]))
        message.parameters["timeout"].int64_param = 1
        late = infer.future(message.SerializeToString(), timeout=60)
        assert (
            late.exception().code() is grpc.StatusCode.UNAVAILABLE
            and "deadline: 1 requests wait" in late.details()
        )
        go.set()
        assert len(scores_of(messages.ModelInferResponse.FromString(first.result()))) == 5
    assert sizes == [1]
    until(lambda: service.version.held == 0)


def test_who_would_wait_too_long_is_refused_before_the_message_is_read(
    address: str,
    service: Service,
    scorer: Scorer,
    rows: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go, sizes = held(service, monkeypatch)
    # half of a minute is spared
    service.version.cost.fixed_s, service.version.cost.candidate_s = 1e-6, 10.0
    monkeypatch.setattr(service.version.cost, "correct", lambda n, seconds: None)
    with grpc.insecure_channel(address) as channel:
        infer, body = (
            channel.unary_unary(f"/{NAME}/ModelInfer"),
            typed(tensors(scorer, rows[:5])).SerializeToString(),
        )
        first = infer.future(body, timeout=60)
        until(lambda: sizes)
        gone = infer.future(body, timeout=60)
        until(lambda: service.batcher._queue)
        code, told, after = refused(address, b"\xff\xff", metadata=(("x-request-id", "mine"),))
        assert code is grpc.StatusCode.UNAVAILABLE and "requests wait, which take 50000 ms" in told
        assert after["x-request-id"] == "mine" and after["grpc-retry-pushback-ms"] == "1000"
        gone.cancel()
        until(lambda: f'{{route="/{NAME}/ModelInfer",status="cut"}} 1.0' in counted(service))
        go.set()
        first.result()
    assert sizes == [1]  # who has gone is not scored


def test_a_call_is_a_line_of_the_access_log(
    address: str,
    service: Service,
    scorer: Scorer,
    rows: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message, trace = (
        typed(tensors(scorer, rows[:5]), id="of the message"),
        "4bf92f3577b34da6a3ce929d0e0e4736",
    )
    metadata = (("x-request-id", "mine"), ("traceparent", f"00-{trace}-00f067aa0ba902b7-01"))
    with caplog.at_level(logging.INFO, "sparrow.access"):
        call(address, message)
        call(address, message, metadata=metadata)
        refused(address, b"\xff\xff")
        with monkeypatch.context() as broken:
            broken.setattr(service.batcher, "put", lambda *_: 1 / 0)
            code, told, after = refused(address, message)
        assert (
            code is grpc.StatusCode.INTERNAL and told == "the service failed, and its log says why"
        )
        until(lambda: len([one for one in caplog.records if one.name == "sparrow.access"]) == 4)
    lines = [vars(one) for one in caplog.records if one.name == "sparrow.access"]
    assert {line["route"] for line in lines} == {f"/{NAME}/ModelInfer"}
    assert [line["status"] for line in lines] == ["200", "200", "400", "500"]
    assert [line["request_id"] for line in lines[:2]] == ["of the message", "mine"] and lines[1][
        "trace_id"
    ] == trace
    for line in lines[:2]:
        assert (
            line["candidates"] == 5
            and line["version"] == service.version.name
            and line["ms"] > 0 < line["bytes"]
        )
    (failure,) = (vars(one) for one in caplog.records if one.levelname == "ERROR")
    assert (
        failure["request_id"] == lines[3]["request_id"] == after["x-request-id"] == "of the message"
    )


def test_a_token(address: str, service: Service, scorer: Scorer) -> None:
    service.token = "geheim-\u00e4".encode()
    for given in ((), (("authorization", "Bearer geheim"),), (("authorization", "Basic x"),)):
        code, told, _ = refused(
            address, messages.ModelMetadataRequest(name="model"), "ModelMetadata", metadata=given
        )
        assert code is grpc.StatusCode.UNAUTHENTICATED and "send `Bearer TOKEN`" in told
    service.token = b"geheim"
    right = {"authorization": "Bearer geheim"}
    with triton.InferenceServerClient(address) as client:
        assert client.is_server_live() and client.is_server_ready()
        with pytest.raises(InferenceServerException, match="UNAUTHENTICATED"):
            client.get_model_metadata("model")
        assert client.get_model_metadata("model", headers=right).versions == [scorer.folder.digest]


def test_two_share_a_port(
    run: Callable[..., Running],
    serve: Callable[..., Service],
    scorer: Scorer,
    rows: list[dict[str, Any]],
) -> None:
    """And one that cannot be had is a mistake of the user."""
    services = [serve(), serve()]
    port = run(services[0]).port
    assert run(services[1], port).port == port
    message = typed(tensors(scorer, rows[:5]))
    for number in range(30):  # each over a connection of its own
        assert (
            len(scores_of(call(f"127.0.0.1:{port}", message, metadata=(("number", str(number)),))))
            == 5
        )
    until(lambda: all(f'route="/{NAME}/ModelInfer"' in counted(one) for one in services))
    with pytest.raises(
        UserError, match=r"192.0.2.1:1: cannot listen .*; choose another --grpc-port"
    ):
        asyncio.run(serve_grpc(services[0], "192.0.2.1", 1))


def test_what_was_accepted_is_answered_before_the_end(
    run: Callable[..., Running],
    service: Service,
    scorer: Scorer,
    rows: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running, (go, sizes) = run(service), held(service, monkeypatch)
    with grpc.insecure_channel(running.address) as channel:
        body = typed(tensors(scorer, rows[:5])).SerializeToString()
        answer = channel.unary_unary(f"/{NAME}/ModelInfer").future(body, timeout=60)
        until(lambda: sizes)
        stopping = asyncio.run_coroutine_threadsafe(running.server.stop(30), running.loop)
        assert not stopping.done()
        go.set()
        assert len(scores_of(messages.ModelInferResponse.FromString(answer.result()))) == 5
        stopping.result(30)


def test_a_swap_waits_for_answers(
    address: str, service: Service, models: Any, scorer: Scorer, rows: list[dict[str, Any]]
) -> None:
    """Each answer has the scores of the version that it names, and after the swap none is of the
    old one.
    """
    arrays = tensors(scorer, some := [row | {n: row[n] or "" for n in TEXTS} for row in rows[:5]])
    two = load(models / "two")
    want = {one.folder.digest: one.score(some)[:, 0] for one in (scorer, two)}
    stop, seen = threading.Event(), []

    def ask_always() -> None:
        with triton.InferenceServerClient(address) as client:
            while not stop.is_set():
                found = client.infer("model", inputs_of(arrays))
                version = found.get_response().model_version
                assert np.abs(found.as_numpy("label") - want[version]).max() <= CLOSE
                seen.append(version)

    thread = threading.Thread(target=ask_always)
    thread.start()
    until(lambda: seen)
    service.versions.flip(Model((str(models / "two"),)))
    at = len(seen)
    while len(seen) < at + 20:
        assert thread.is_alive()
    stop.set()
    thread.join()
    assert set(seen[at + 1 :]) == {two.folder.digest} and seen[0] == scorer.folder.digest
    assert json.loads(ask(service, "/health/ready").body)["version"] == two.folder.digest


@pytest.mark.parametrize("cases", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_fuzzed_messages(
    cases: int,
    run: Callable[..., Running],
    serve: Callable[..., Service],
    scorer: Scorer,
    rows: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Messages with bytes and fields changed are refused or scored, beside good ones that keep
    their scores.
    """
    draw, service = random.Random(cases), serve()
    good = typed(
        tensors(scorer, some := [row | {n: row[n] or "" for n in TEXTS} for row in rows[:3]])
    )
    want, refusals = (
        scorer.score(some)[:, 0],
        {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND},
    )
    as_bytes, seen = in_bytes(tensors(scorer, some)), Counter[Any]()
    with caplog.at_level(logging.WARNING), grpc.insecure_channel(run(service).address) as channel:
        infer = channel.unary_unary(f"/{NAME}/ModelInfer")
        for _ in range(cases // 10):
            bad = []
            for _ in range(10):
                message = messages.ModelInferRequest.FromString(
                    (good if draw.random() < 0.5 else as_bytes).SerializeToString()
                )
                one = draw.choice(message.inputs)
                mistake = draw.randrange(8)
                if mistake == 0:
                    one.shape[:] = draw.choice(
                        [[], [-1], [2**62], [2**62, 2**62], [0], [3, 1], [1], [3, 0], [2**63 - 1]]
                    )
                elif mistake == 1:
                    one.datatype = draw.choice(
                        ["INT64", "BYTES", "FP32", "BOOL", "UINT8", "FP16", "BF16", ""]
                    )
                elif mistake == 2:
                    one.name = draw.choice(
                        ["item", "", "user:null", ":lengths", "history", "tags:lengths", "x" * 5000]
                    )
                elif mistake == 3 and message.raw_input_contents:
                    number = draw.randrange(len(message.raw_input_contents))
                    message.raw_input_contents[number] = cut(
                        message.raw_input_contents[number], draw
                    )
                elif mistake == 4:
                    one.contents.int64_contents.append(draw.choice([0, -(2**63), 2**63 - 1]))
                elif mistake == 5:
                    one.contents.ClearField("int64_contents")
                data = message.SerializeToString()
                bad.append(cut(data, draw) if mistake > 5 else data)
            calls = [
                infer.future(data, timeout=60)
                for data in (good.SerializeToString(), *bad, good.SerializeToString())
            ]
            for number, one in enumerate(calls):
                if number in (0, 11):
                    found = scores_of(messages.ModelInferResponse.FromString(one.result()))
                    assert np.abs(found - want).max() <= CLOSE
                    continue
                seen[one.code()] += 1
                assert one.code() is grpc.StatusCode.OK or one.code() in refusals, (
                    one.code(),
                    one.details(),
                )
    assert (
        seen[grpc.StatusCode.OK] > cases / 20 and seen[grpc.StatusCode.INVALID_ARGUMENT] > cases / 5
    )
    assert not caplog.records
    until(lambda: service.held == 0 and service.version.held == 0)


def test_who_says_nothing_is_cut_off(
    run: Callable[..., Running],
    serve: Callable[..., Service],
    scorer: Scorer,
    rows: list[dict[str, Any]],
) -> None:
    """A connection without a word of HTTP/2, and a call whose message never comes."""
    address = run(serve(Limits(deadline_ms=60_000, read_s=0.5))).address
    with socket.create_connection(
        ("127.0.0.1", int(address.rpartition(":")[2])), timeout=20
    ) as silent:
        while silent.recv(1000):
            pass
    stop = threading.Event()
    with grpc.insecure_channel(address) as channel:
        never = channel.stream_unary(f"/{NAME}/ModelInfer").future(
            b"" for _ in iter(stop.wait, True)
        )
        assert (
            never.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            and "message: took longer than 0.5 s" in never.details()
        )
        stop.set()
    assert len(scores_of(call(address, typed(tensors(scorer, rows[:5]))))) == 5


def test_calls_without_a_message_keep_others_waiting_for_a_moment_only(
    run: Callable[..., Running],
    serve: Callable[..., Service],
    scorer: Scorer,
    rows: list[dict[str, Any]],
) -> None:
    """Two messages are read at a time. That many idle calls end together, and not two by two."""
    service = serve(Limits(deadline_ms=60_000, read_s=2, body_mb=4, held_mb=8))
    address, stop = run(service).address, threading.Event()
    with grpc.insecure_channel(address) as channel:
        start = channel.stream_unary(f"/{NAME}/ModelInfer").future
        idle = [start(b"" for _ in iter(stop.wait, True)) for _ in range(20)]
        with triton.InferenceServerClient(address) as client:
            assert client.is_server_live()
        time.sleep(1)
        deadline = Deadline(10)
        assert len(scores_of(call(address, typed(tensors(scorer, rows[:5]))))) == 5
        assert not deadline.over, deadline
        assert {one.code() for one in idle} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        stop.set()


class Deaf:
    """A client of HTTP/2 that calls and answers pings, and has no room for an answer."""

    def __init__(self, port: int, message: Any) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": f"/{NAME}/ModelInfer",
            ":authority": "x",
        }
        headers |= {"te": "trailers", "content-type": "application/grpc"}
        texts = ((name.encode(), value.encode()) for name, value in headers.items())
        # of HPACK
        block = b"".join(
            b"\0%c%b%c%b" % (len(name), name, len(value), value) for name, value in texts
        )
        data = message.SerializeToString()
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        # settings: streams begin with a window of 0 bytes
        self._send(4, 0, 0, struct.pack(">HI", 4, 0))
        self._send(1, 4, 1, block)
        self._send(0, 1, 1, struct.pack(">BI", 0, len(data)) + data)
        self.thread = threading.Thread(target=self._answer_pings)
        self.thread.start()

    def _send(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self._socket.sendall(
            struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload
        )

    def _answer_pings(self) -> None:
        with self._socket, self._socket.makefile("rb") as found:
            while head := found.read(9):
                payload = found.read(int.from_bytes(head[:3], "big"))
                if head[3] in (4, 6) and not head[4] & 1:  # settings and pings
                    self._send(head[3], 1, 0, payload if head[3] == 6 else b"")


def test_who_does_not_read_the_answer(
    run: Callable[..., Running],
    serve: Callable[..., Service],
    models: Any,
    scorer: Scorer,
    rows: list[dict[str, Any]],
) -> None:
    """Holds a swap for a moment, and the end for as long as it is given."""
    service = serve(Limits(deadline_ms=60_000, write_s=1))
    running, message = run(service), typed(tensors(scorer, rows[:5]))
    first = Deaf(running.port, message)
    until(lambda: service.version.held and service.metrics.stages["score"]._sum.get())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(service.versions.flip, Model((str(models / "two"),))).result(20)
    until(lambda: service.held == 0)
    assert first.thread.is_alive()  # it is not cut off while it answers pings
    second = Deaf(running.port, message)
    until(lambda: service.version.held)
    deadline = Deadline(20)
    running.do(running.server.stop(1))
    assert not deadline.over, deadline
    for deaf in (first, second):
        deaf.thread.join(20)
        assert not deaf.thread.is_alive()
    until(lambda: service.held == service.version.held == 0)
