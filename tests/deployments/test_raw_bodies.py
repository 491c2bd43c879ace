"""Bodies and heads that no client library would send, over plain sockets."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from shoal.config import LimitSettings, ServeSettings
from tests.deployments.server import Served, serve

GOOD = {"model": "tiny", "prompt": "Hi", "max_tokens": 4, "temperature": 0}
JSON_TYPE = "Content-Type: application/json"


def _exchange(
    served: Served, *lines: str, body: bytes | Iterator[bytes] = b""
) -> tuple[int, bytes]:
    """Status and body of the answer to a request whose head is ``lines``."""
    with served.connect() as connection:
        head = ("\r\n".join([*lines, "Host: here", "Connection: close"]) + "\r\n\r\n").encode()
        connection.sendall(head + (body if isinstance(body, bytes) else b""))
        if not isinstance(body, bytes):
            _send_chunks(connection, body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    status, _, content = answer.partition(b"\r\n\r\n")
    return int(status.split()[1]), content


def _send_chunks(connection: socket.socket, pieces: Iterator[bytes]) -> None:
    try:
        for piece in pieces:
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        connection.sendall(b"0\r\n\r\n")
    except (BrokenPipeError, ConnectionResetError):
        pass  # the server may answer and close before it has all of it


def _post(
    served: Served, body: bytes, *headers: str, path: str = "/v1/completions"
) -> tuple[int, bytes]:
    length = f"Content-Length: {len(body)}"
    return _exchange(served, f"POST {path} HTTP/1.1", length, *headers, body=body)


def _assert_error(answer: tuple[int, bytes], status: int) -> None:
    assert answer[0] == status, answer
    error = json.loads(answer[1])["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]


def _assert_still_good(served: Served) -> None:
    status, content = _post(served, json.dumps(GOOD).encode(), JSON_TYPE)
    assert status == 200
    assert json.loads(content)["choices"][0]["text"] == "htsn"


FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_no_number_is_not_finite(served: Served, number: str) -> None:
    fields = [f'"{name}": {number}' for name in (*FLOATS, "seed", "max_tokens", "n", "logprobs")]
    fields.append(f'"logit_bias": {{"65": {number}}}')
    for field in fields:
        body = json.dumps(GOOD)[:-1] + f", {field}}}"
        _assert_error(_post(served, body.encode(), JSON_TYPE), 400)
    _assert_still_good(served)


BODIES = {
    "nothing": b"",
    "an array": b"[]",
    "a string": b'"prompt"',
    "a number": b"1",
    "null": b"null",
    "half": b'{"model": "tiny", "prompt": "Hi',
    "twice": b'{"model": "tiny", "prompt": "Hi"}{}',
    "a comma too many": b'{"model": "tiny", "prompt": "Hi",}',
    "single quotes": b"{'model': 'tiny', 'prompt': 'Hi'}",
    "a duplicate key": b'{"model": "tiny", "prompt": "Hi", "n": 1, "n": 2}',
    "a duplicate key below": b'{"model": "tiny", "prompt": "Hi", "logit_bias": {"1": 1, "1": 2}}',
    "a byte order mark": b'\xef\xbb\xbf{"model": "tiny", "prompt": "Hi"}',
    "UTF-16": '{"model": "tiny", "prompt": "Hi"}'.encode("utf-16"),
    "invalid UTF-8": b'{"model": "tiny", "prompt": "\xff\xfe"}',
    "an overlong slash": b'{"model": "tiny", "prompt": "\xc0\xaf"}',
    "a surrogate in UTF-8": b'{"model": "tiny", "prompt": "\xed\xa0\xbd"}',
    "a lone surrogate": rb'{"model": "tiny", "prompt": "\ud83d"}',
    "a lone low surrogate": rb'{"model": "tiny", "prompt": "\ude00 x"}',
    "a surrogate in stop": rb'{"model": "tiny", "prompt": "Hi", "stop": "\ud83d"}',
    "a surrogate in user": rb'{"model": "tiny", "prompt": "Hi", "user": "\ud83d"}',
    "a surrogate as key": rb'{"model": "tiny", "prompt": "Hi", "\ud83d": 1}',
    "a raw control character": b'{"model": "tiny", "prompt": "\x00"}',
    "many digits": b'{"model": "tiny", "prompt": "Hi", "n": ' + b"9" * 5000 + b"}",
    "deep arrays": b'{"model": "tiny", "prompt": ' + b"[" * 100_000,
    "deep objects": b'{"model": "tiny", "metadata": ' + b'{"a":' * 100_000,
    "a million lists": b'{"model": "tiny", "prompt": [' + b"[]," * 10**6 + b"[]]}",
    "half a million keys": b'{"model": "tiny", ' + b'"a":1,' * 500_000 + b'"a":1}',
    "many prompts": json.dumps({"model": "tiny", "prompt": ["x"] * 100_000}).encode(),
    "many stops": json.dumps({"model": "tiny", "prompt": "x", "stop": ["x"] * 10**5}).encode(),
    "nested in a bound": b'{"model": "tiny", "prompt": ' + b"[" * 150 + b"]" * 150 + b"}",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_what_is_no_json_object(served: Served, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        _assert_error(_post(served, body, JSON_TYPE, path=path), 400)
    _assert_still_good(served)


def test_a_null_character_is_a_character(served: Served) -> None:
    body = rb'{"model": "tiny", "prompt": "a\u0000b", "user": "\u0000", "stop": "\u0000"}'
    assert _post(served, body, JSON_TYPE)[0] == 200
    assert served.engine.requests[-1].prompt == (97, 0, 98)
    named = rb'{"model": "\u0000\ud83d\ude00", "prompt": "Hi"}'
    _assert_error(_post(served, named, JSON_TYPE), 404)


def test_a_text_may_hold_what_parts_are_made_of(served: Served) -> None:
    text = '[{"a\\\\": 1}]' * 10_000
    assert _post(served, json.dumps(GOOD | {"user": text}).encode(), JSON_TYPE)[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ("Content-Type: text/plain",),
        ("Content-Type: application/x-www-form-urlencoded",),
        ("Content-Type: multipart/form-data; boundary=x",),
        ("Content-Type: application/jsonp",),
        ("Content-Type:",),
        ("Content-Type: application/json; charset=latin-1",),
        (JSON_TYPE, "Content-Encoding: gzip"),
    ],
)
def test_other_content_types(served: Served, headers: tuple[str, ...]) -> None:
    _assert_error(_post(served, json.dumps(GOOD).encode(), *headers), 415)
    _assert_still_good(served)


def test_utf_8_may_be_named(served: Served) -> None:
    header = 'Content-Type: Application/JSON; charset="UTF-8"'
    assert _post(served, json.dumps(GOOD).encode(), header)[0] == 200


def test_twenty_megabytes(served: Served) -> None:
    body = json.dumps(GOOD | {"prompt": "x" * (20 * 2**20)}).encode()
    _assert_error(_post(served, body, JSON_TYPE), 413)
    _assert_still_good(served)


def test_a_client_that_asks_first_sends_nothing(served: Served) -> None:
    length = f"Content-Length: {20 * 2**20}"
    lines = ("POST /v1/completions HTTP/1.1", JSON_TYPE, length, "Expect: 100-continue")
    _assert_error(_exchange(served, *lines), 413)


def test_twenty_megabytes_in_chunks(served: Served) -> None:
    pieces = iter([b'{"model": "tiny", "prompt": "', *[b"x" * 2**20] * 20, b'"}'])
    lines = ("POST /v1/completions HTTP/1.1", JSON_TYPE, "Transfer-Encoding: chunked")
    _assert_error(_exchange(served, *lines, body=pieces), 413)
    _assert_still_good(served)


def test_a_body_in_small_chunks(served: Served) -> None:
    body = json.dumps(GOOD).encode()
    pieces = iter([body[place : place + 7] for place in range(0, len(body), 7)])
    lines = ("POST /v1/completions HTTP/1.1", JSON_TYPE, "Transfer-Encoding: chunked")
    assert _exchange(served, *lines, body=pieces)[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("PATCH", "/health", 405),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/nothing%00%ff", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/v1/models/other", 404),
        ("POST", "/v1/completions/", 404),
    ],
)
def test_paths_and_methods(served: Served, method: str, path: str, status: int) -> None:
    answer = _exchange(served, f"{method} {path} HTTP/1.1", "Content-Length: 0")
    _assert_error(answer, status)
    _assert_still_good(served)


@pytest.mark.parametrize("sent", [b"", b'{"model": "tiny"'])
def test_a_body_that_never_comes(sent: bytes) -> None:
    settings = ServeSettings(limits=LimitSettings(read_timeout_s=0.2))
    with serve(settings) as served:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{JSON_TYPE}\r\nContent-Length: 99\r\n"
        with served.connect() as connection:
            connection.sendall(head.encode() + b"\r\n" + sent)
            answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 408")
        _assert_still_good(served)
        served.assert_idle()
