"""How ``shoal serve`` ends while requests are under way."""

from __future__ import annotations

import threading
from pathlib import Path

import openai

from tests.deployments.running import NAME, Running, shoal_serve, wait_until

NUM_TOKENS = 1500
"""Of the answer that may end; the other one goes on for far longer."""


class _Stream:
    """An answer that a thread reads to its end, however it ends."""

    def __init__(self, running: Running, max_tokens: int) -> None:
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self._max_tokens = max_tokens
        self._client = openai.OpenAI(
            base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60
        )
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        wait_until(lambda: len(self.tokens) > 20, 30)

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._client.close()

    def _read(self) -> None:
        stream = self._client.completions.create(
            model=NAME,
            prompt="Go on",
            max_tokens=self._max_tokens,
            seed=11,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        try:
            for chunk in stream:
                [choice] = chunk.choices
                self.tokens.extend((choice.model_extra or {})["token_ids"])
                self.finish_reason = choice.finish_reason
        except (openai.APIError, OSError):
            return


def test_requests_under_way_end_first_and_a_second_signal_cuts_them_off(tmp_path: Path) -> None:
    with shoal_serve(tmp_path, "serve.drain_timeout_s=120", max_position_embeddings=65536) as run:
        endless = _Stream(run, 60_000)
        short = _Stream(run, NUM_TOKENS)
        run.process.terminate()
        wait_until(lambda: run.complete().status_code == 404, 30)
        short.join()
        assert (len(short.tokens), short.finish_reason) == (NUM_TOKENS, "length")
        wait_until(lambda: "Ending, once the requests under way" in run.process.output, 30)
        seen = len(endless.tokens)
        wait_until(lambda: len(endless.tokens) > seen, 30)
    endless.join()  # leaving the block gave the second signal
    assert endless.finish_reason is None
