"""Requests drawn from the OpenAPI document, and spoiled ones: never a 5xx, never a hurt engine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx2
import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from shoal.config import ServeSettings
from shoal_deployments.http_app import build_http_app
from tests.deployments.bodies import PATHS, bodies, spoiled
from tests.deployments.fake_engine import FakeEngine
from tests.deployments.server import Served, events, serve

RUN = settings(
    max_examples=100,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@cache
def _document() -> dict[str, Any]:
    engine = FakeEngine()
    document: dict[str, Any] = build_http_app(engine, engine.tokenizer, ServeSettings()).openapi()
    return document


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Served]:
    """One server for all examples."""
    with serve() as server:
        yield server


@pytest.mark.parametrize("path", PATHS)
@RUN
@given(data=st.data())
def test_requests_by_the_schema(fuzzed: Served, path: str, data: st.DataObject) -> None:
    body = data.draw(bodies(path, _document(), "tiny"))
    response = fuzzed.http.post(path, json=body)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code == 200:
        _assert_answer(response, is_stream=bool(body.get("stream")))
    else:
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert len(error["message"]) < 2000
    good = fuzzed.complete(temperature=0)
    assert (good.status_code, good.json()["choices"][0]["text"]) == (200, "htsn")


def _assert_answer(response: httpx2.Response, *, is_stream: bool) -> None:
    """A whole answer, or a stream with its end."""
    if is_stream:
        got = events(response)
        assert got.index("[DONE]") == len(got) - 1
        assert all("error" not in event for event in got[:-1])
    else:
        assert all(choice["finish_reason"] for choice in response.json()["choices"])


@settings(RUN, max_examples=50)
@given(body=st.binary(max_size=60), path=st.sampled_from(PATHS))
def test_any_bytes(fuzzed: Served, body: bytes, path: str) -> None:
    headers = {"Content-Type": "application/json"}
    response = fuzzed.http.post(path, content=body, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


@settings(RUN, max_examples=50)
@given(data=st.data(), path=st.sampled_from(PATHS))
def test_cut_and_spoiled_json(fuzzed: Served, data: st.DataObject, path: str) -> None:
    text = data.draw(spoiled(path, _document(), "tiny"))
    headers = {"Content-Type": "application/json"}
    response = fuzzed.http.post(path, content=text, headers=headers)
    assert response.status_code in (200, 400, 404), response.text


def test_nothing_is_left(fuzzed: Served) -> None:
    assert fuzzed.http.get("/health").json()["status"] == "ok"
    fuzzed.assert_idle()
