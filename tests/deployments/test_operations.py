"""What probes, dashboards and scrapers read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shoal.config import AuthSettings
from shoal.errors import ConfigError
from shoal_deployments.auth import ApiKeys
from shoal_deployments.engine_client import EngineUnavailable, ReplicaHealth
from tests.deployments.fake_engine import FakeEngine
from tests.deployments.server import Served, serve

KEYS_OF_STATS = {
    "busy_s",
    "running",
    "waiting",
    "kv_blocks_total",
    "kv_blocks_free",
    "finished",
    "cancelled",
    "migrated",
    "preempted",
    "prefix_hit_tokens",
    "certificate",
}


def _metrics(served: Served) -> dict[str, float]:
    """Samples by name and labels."""
    response = served.http.get("/metrics")
    own_frontend = served.http.get("/stats").json()["frontend"]
    assert response.headers["content-type"].startswith("text/plain")
    samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            # What a frontend counts is its own, what an engine counts is not.
            frontend = None if "shoal_engine_" in sample.name else own_frontend
            assert labels.pop("frontend", None) == frontend
            samples[f"{sample.name}{sorted(labels.items())}"] = sample.value
    return samples


def test_stats(served: Served) -> None:
    served.complete(n=2)
    stats = served.http.get("/stats").json()
    assert stats["model"] == "tiny"
    assert stats["frontend"]
    [replica] = stats["replicas"]
    assert replica.keys() >= KEYS_OF_STATS
    assert replica["finished"] >= 2
    assert replica["certificate"] == {"fingerprint": "fp1"}
    assert stats["health"] == [{"replica": "0", "progresses": True, "detail": ""}]


def test_metrics_count_answers_and_tokens(served: Served) -> None:
    before = _metrics(served)
    served.complete(prompt=["ab", "cd"], n=2, max_tokens=5)
    served.complete(n=0)
    served.http.get("/made/up")
    after = _metrics(served)

    def grown(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    path = ("path", "/v1/completions")
    assert grown(f"shoal_http_requests_total{[path, ('status', '200')]}") == 1
    assert grown(f"shoal_http_requests_total{[path, ('status', '400')]}") == 1
    other = ("path", "other")
    assert grown(f"shoal_http_requests_total{[other, ('status', '404')]}") == 1
    assert grown("shoal_prompt_tokens_total[]") == 4
    assert grown("shoal_generated_tokens_total[]") == 20
    assert grown("shoal_time_to_first_token_seconds_count[]") == 1
    assert grown("shoal_engine_finished_total[('replica', '0')]") == 4
    assert after["shoal_engine_running[('replica', '0')]"] == 0
    assert after["shoal_engine_busy_s[('replica', '0')]"] == 0
    assert after["shoal_requests_held[]"] == 0


def test_lost_engines_are_told_in_openai_form(served: Served) -> None:
    served.engine.refusal = EngineUnavailable("All engines are lost.")
    answer = served.http.get("/stats")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "All engines are lost."
    served.engine.refusal = None


def test_metrics_tell_of_an_outage(served: Served) -> None:
    """Without engines a scrape gets what the frontend counts itself, refusals among it."""
    served.engine.refusal = EngineUnavailable("All engines are lost.")
    assert served.complete().status_code == 503
    answer = served.http.get("/metrics")
    assert answer.status_code == 200
    samples = [
        sample
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    ]
    [refused] = [
        sample
        for sample in samples
        if sample.name == "shoal_http_requests_total"
        and (sample.labels["path"], sample.labels["status"]) == ("/v1/completions", "503")
    ]
    assert refused.value >= 1
    assert "shoal_requests_held" in {sample.name for sample in samples}
    assert not any("shoal_engine_" in sample.name for sample in samples)
    served.engine.refusal = None


class _Ailing(FakeEngine):
    """Two replicas, whose health is scripted."""

    def __init__(self) -> None:
        super().__init__()
        self.well = [True, True]
        self.has_other_weights = False
        self.answers = True

    async def health(self) -> Sequence[ReplicaHealth]:
        if not self.answers:
            await asyncio.sleep(60)
        wrong = "other weights" if self.has_other_weights else ""
        return [
            ReplicaHealth(replica=str(place), progresses=well, detail=wrong if well else "no step")
            for place, well in enumerate(self.well)
        ]


def test_health_is_of_the_engines_too() -> None:
    engine = _Ailing()
    with serve(engine=engine) as served:
        engine.well = [True, False]
        answer = served.http.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
        assert answer.json()["replicas"][1] == {
            "replica": "1",
            "progresses": False,
            "detail": "no step",
        }
        engine.well, engine.has_other_weights = [True, True], True
        answer = served.http.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
        engine.well = [False, False]
        assert served.http.get("/health").status_code == 503
        engine.answers = False
        answer = served.http.get("/health")
        assert answer.status_code == 503
        assert "did not answer" in answer.json()["problem"]


def test_a_mistake_of_ours_is_a_500_in_openai_form(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    async def submit(*arguments: object) -> None:
        raise RuntimeError("scripted")

    engine, taken = served.engine, served.engine.submit
    engine.submit = submit  # type: ignore[method-assign,assignment]
    try:
        with caplog.at_level(logging.ERROR):
            answer = served.complete()
            served.wait_until(lambda: "scripted" in caplog.text)
    finally:
        engine.submit = taken  # type: ignore[method-assign]
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "scripted" not in answer.text
    assert answer.headers["connection"] == "close"
    assert served.complete().status_code == 200


def test_a_path_cannot_forge_a_line_of_the_log(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        served.http.get("/v1/x%0a2026%20ERROR%20forged%0d%e2%80%a8%1b[2J" + "y" * 500)
        served.wait_until(lambda: "GET /v1/x" in caplog.text)
    # A line of the test before may come in meanwhile.
    lines = [each.getMessage() for each in caplog.records if each.module == "access_log"]
    [line] = [line for line in lines if "/v1/x" in line]
    assert line.startswith("GET /v1/x") and line.isprintable() and line.isascii()
    assert len(line) < 300


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEYS", "one, two ,")
    keys = ApiKeys.read(AuthSettings(keys_variable="SOME_KEYS"))
    assert len(keys) == 2
    assert keys.admits("Bearer two") and keys.admits("bearer one")
    for wrong in ("", "Bearer", "Bearer ", "two", "Bearer twox", "Bearer tw", "Basic two"):
        assert not keys.admits(wrong)
    assert not keys.admits("Bearer \udcff\xff")
    assert ApiKeys(()).admits("")


def test_keys_are_bytes_as_clients_send_them(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("\ufefffirst\nschlüssel-日本\n", encoding="utf-8")  # as some editors write it
    keys = ApiKeys.read(AuthSettings(keys_file=str(path)))
    assert keys.admits("Bearer first")
    assert keys.admits("Bearer " + "schlüssel-日本".encode().decode("latin-1"))
    assert not keys.admits("Bearer first\xa0")


@pytest.mark.parametrize("content", [None, "", "# none\n\n", b"\xff\xfe"])
def test_a_source_without_keys_is_refused(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    content: str | bytes | None,
) -> None:
    path = tmp_path_factory.mktemp("keys") / "keys"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match="serve.auth.keys_file"):
        ApiKeys.read(AuthSettings(keys_file=str(path)))
    monkeypatch.setenv("NO_KEYS", " , ")
    with pytest.raises(ConfigError, match="serve.auth.keys_variable"):
        ApiKeys.read(AuthSettings(keys_variable="NO_KEYS"))
