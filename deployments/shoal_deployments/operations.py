"""``/health``, ``/stats`` and ``/metrics``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from shoal_deployments.engine_client import EngineUnavailable, ReplicaHealth, ReplicaStats
from shoal_deployments.openai.service import Service

T = TypeVar("T")

DEADLINE_S = 2.0
"""How long the engines may take to say how they are."""


def operation_routes(service: Service) -> APIRouter:
    """Routes for probes, dashboards and scrapers."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        return await _health(service)

    @router.get("/stats")
    async def stats() -> dict[str, Any]:
        replicas = await _in_time(service.engine.stats())
        health = await _in_time(service.engine.health())
        return {
            "model": service.engine.card.name,
            "frontend": service.metrics.frontend,
            "held": service.admission.num_held,
            "replicas": [_plain(each) for each in replicas],
            "health": [asdict(each) for each in health],
        }

    @router.get("/metrics")
    async def metrics() -> Response:
        replicas: Sequence[ReplicaStats] = ()
        # The frontend's own numbers tell of an outage, and need no engine.
        with contextlib.suppress(EngineUnavailable):
            replicas = await _in_time(service.engine.stats())
        return Response(service.metrics.text(replicas), media_type=CONTENT_TYPE_LATEST)

    return router


async def _health(service: Service) -> Response:
    """Status 200 as long as one replica gets on, else 503: then no request would be answered."""
    replicas: Sequence[ReplicaHealth] = ()
    problem = ""
    try:
        replicas = await _in_time(service.engine.health())
    except EngineUnavailable as error:
        problem = str(error)
    num_well = sum(replica.progresses for replica in replicas)
    is_ok = num_well == len(replicas) and not any(replica.detail for replica in replicas)
    word = "failing" if num_well == 0 else "ok" if is_ok else "degraded"
    content: dict[str, Any] = {
        "status": word,
        "replicas": [asdict(replica) for replica in replicas],
    }
    if problem:
        content["problem"] = problem
    headers = {} if num_well else {"Retry-After": str(service.limits.retry_after_s)}
    return JSONResponse(content, 200 if num_well else 503, headers)


async def _in_time(answer: Awaitable[T]) -> T:
    """What the engines answer; EngineUnavailable where that takes too long."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            return await answer
    except TimeoutError:
        problem = f"The engines did not answer within {DEADLINE_S:g} seconds."
        raise EngineUnavailable(problem) from None


def _plain(replica: ReplicaStats) -> dict[str, Any]:
    journal = {} if replica.journal is None else asdict(replica.journal)
    return {
        "replica": replica.replica,
        **asdict(replica.stats),
        **{f"journal_{name}": value for name, value in journal.items()},
        "busy_s": replica.busy_s,
        "migrated": replica.migrated,
        "certificate": dict(replica.certificate),
    }
