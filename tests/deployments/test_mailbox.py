"""The queue between the engines and one client."""

from __future__ import annotations

import asyncio

import pytest

from shoal.errors import WorkError
from shoal.inference import Output
from shoal_deployments.mailbox import Mailbox, SlowReader


def _output(*tokens: int) -> Output:
    return Output(request_id="a", choice=0, token_ids=tokens)


def test_a_slow_reader_gets_all_at_once() -> None:
    async def scene() -> None:
        mailbox = Mailbox(10)
        mailbox.put([_output(1)])
        mailbox.put([_output(2), _output(3)])
        assert await mailbox.take() == [_output(1), _output(2), _output(3)]
        waiting = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        mailbox.put([])
        mailbox.put([_output(4)])
        assert await waiting == [_output(4)]

    asyncio.run(scene())


def test_the_bound_counts_unread_tokens() -> None:
    async def scene() -> None:
        mailbox = Mailbox(4)
        for _ in range(3):
            mailbox.put([_output(1, 2, 3, 4)])
            assert len(await mailbox.take()) == 1
        mailbox.put([_output(1, 2, 3, 4)])
        mailbox.put([_output(5)])
        mailbox.put([_output(6)])
        for _ in range(2):
            with pytest.raises(SlowReader, match="More than 4 tokens"):
                await mailbox.take()

    asyncio.run(scene())


def test_what_came_before_a_failure_is_read_first() -> None:
    async def scene() -> None:
        mailbox = Mailbox(10)
        mailbox.put([_output(1)])
        mailbox.fail(WorkError("first"))
        mailbox.fail(WorkError("second"))
        mailbox.put([_output(2)])
        assert await mailbox.take() == [_output(1)]
        with pytest.raises(WorkError, match="first"):
            await mailbox.take()

    asyncio.run(scene())


def test_a_closed_mailbox_keeps_nothing() -> None:
    async def scene() -> None:
        mailbox = Mailbox(10)
        mailbox.close()
        mailbox.put([_output(*range(100))])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await mailbox.take()

    asyncio.run(scene())
