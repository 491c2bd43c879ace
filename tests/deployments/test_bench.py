"""The comparison of server and engine: all parts run, and the report adds up."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from shoal.data.tokenizer import load_tokenizer
from shoal.errors import ConfigError, WorkError
from shoal_deployments.bench import (
    FirstTokens,
    Pauses,
    ServeBenchSetup,
    ServeCase,
    ServeReport,
    bench_serve,
)
from shoal_deployments.bench.client import Stream, host_and_port, num_tokens, run
from shoal_deployments.bench.server import address_in, serving
from shoal_deployments.bench.words import text_of, write_words
from shoal_deployments.serving import ready_line
from tests.models.tiny import TINY

WAY = "Serve's proxy"


def test_engine_and_server_are_timed_in_turns() -> None:
    setup = ServeBenchSetup(
        model={**TINY["qwen3_moe"], "vocab_size": 400},
        ways={WAY: {}},
        streams=(1, 3),
        new_tokens=4,
        rounds=2,
        first_tokens=2,
        long_prompt_tokens=3000,
        stream_tokens=20,
    )
    report = bench_serve(overrides=("serve.precision=fp32",), setup=setup)
    assert [(case.way, case.streams) for case in report.cases] == [(WAY, 1), (WAY, 3)]
    for case in report.cases:
        assert len(case.alone_s) == len(case.http_s) == 2
        assert min(*case.alone_s, *case.http_s, case.ratio) > 0
    (first,), (pause,) = report.first_tokens, report.pauses
    assert len(first.alone_s) == len(first.http_s) == 2 and min(first.http_s) > 0
    assert len(pause.alone_s) == len(pause.beside_s) == 2
    assert "fp32, greedy; engine threads: 1" in report.text()
    assert json.loads(json.dumps(report.json()))["cases"][0]["ratio"] == report.cases[0].ratio


def test_the_report_takes_ratios_within_a_round() -> None:
    case = ServeCase(
        way=WAY, streams=2, new_tokens=5, alone_s=(1.0, 2.0, 4.0), http_s=(2.0, 2.5, 4.0)
    )
    assert (case.alone_tokens_per_s, case.http_tokens_per_s, case.ratio) == (5.0, 4.0, 0.8)
    first = FirstTokens(way=WAY, alone_s=(0.01, 0.02, 0.03), http_s=(0.04, 0.03, 0.02))
    pause = Pauses(way=WAY, prompt_tokens=1000, alone_s=(0.01,), beside_s=(0.05,))
    report = ServeReport(model="a model", cases=(case,), first_tokens=(first,), pauses=(pause,))
    blocks = [block.splitlines() for block in report.text().split("\n\n")]
    assert blocks[0] == ["a model"]
    assert blocks[1][-1].split()[-5:] == ["5", "tokens/s", "4", "tokens/s", "0.80"]
    assert blocks[2][-1].split()[-6:] == ["20", "ms", "30", "ms", "10", "ms"]
    assert "1,000 tokens" in blocks[3][0] and blocks[3][-1].split()[-4:] == ["10", "ms", "50", "ms"]


def _body(*events: str) -> bytes:
    pieces = [f"data: {event}\n\n".encode() for event in events]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def test_the_client_counts_complete_streams_only() -> None:
    usage = '{"usage":{"completion_tokens":7}}'
    assert num_tokens(_body('{"text":"a"}', usage, "[DONE]")) == 7
    assert num_tokens(_body('{"text":"a"}', usage)) == 0


def test_the_client_shows_how_an_incomplete_stream_ended() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = head + _body('{"text":"a"}', '{"error":"the engine was lost"}')

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        stream = Stream(f"127.0.0.1:{listener.getsockname()[1]}", "m", [1], 4)
        assert run([stream]) > 0
        server.join(10)
    result = stream.result()
    assert (result["status"], result["tokens"]) == (200, 0)
    assert "the engine was lost" in str(result["end"])


def test_each_word_is_one_token(tmp_path: Path) -> None:
    write_words(tmp_path, 20_000)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.vocab_size == 20_000
    text = text_of(100)
    tokens = tokenizer.encode(text)
    assert len(tokens) == 100 and tokenizer.decode(tokens) == text


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_clients_connect_where_the_server_says_that_it_is(host: str) -> None:
    log = "Waiting for the engines\n"
    assert address_in(log) is None
    address = address_in(f"{log}{ready_line(host, 8000)}\n")
    assert address is not None and host_and_port(address) == (host, 8000)


@pytest.mark.parametrize("key", ["keys_file", "keys_variable"])
def test_keys_are_refused_before_anything_is_started(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"serve\.auth\.{key} = 'KEYS': .* send no key"):
        bench_serve(overrides=(f"serve.auth.{key}=KEYS",))


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    server = serving(tmp_path / "nothing", (), {}, tmp_path / "server.log")
    with pytest.raises(WorkError, match="nothing"), server:
        raise AssertionError("it has started")
