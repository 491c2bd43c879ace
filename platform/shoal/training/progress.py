"""The progress line: step, loss, tokens per second, time left."""

from __future__ import annotations

from rich.console import Console
from rich.live import Live
from rich.text import Text

from shoal.training.metrics import StepMetrics
from shoal.training.pace import Pace

PLAIN_INTERVAL_S = 10.0
"""Least seconds between two plain lines; the first and the last step always get theirs."""


class ProgressLine:
    """Shows the steps of a run: rewritten in place on a terminal, plain lines elsewhere.

    A context manager; other output of the same console goes above the line.
    """

    def __init__(self, console: Console, *, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._pace = Pace(num_steps)
        self._live: Live | None = None
        self._seconds_since_line = 0.0
        self._is_first = True

    def __enter__(self) -> ProgressLine:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, metrics: StepMetrics) -> None:
        """Show one more step."""
        self._pace.count(metrics)
        line = self._text(metrics)
        if self._live is not None:
            self._live.update(Text(line), refresh=True)
            return
        self._seconds_since_line += metrics.step_seconds
        is_last = metrics.step == self._num_steps
        if self._is_first or is_last or self._seconds_since_line >= PLAIN_INTERVAL_S:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            self._seconds_since_line = 0.0
            self._is_first = False

    def _text(self, metrics: StepMetrics) -> str:
        left_s = self._pace.left_s
        assert left_s is not None, "a step was counted"
        return (
            f"step {metrics.step}/{self._num_steps}  loss {metrics.loss:.4f}"
            f"  {metrics.tokens_per_second:,.0f} tokens/s  {format_duration(left_s)} left"
        )


def format_duration(seconds: float) -> str:
    """``1:02:03`` or ``02:03``."""
    minutes, whole_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole_s:02}" if hours else f"{minutes:02}:{whole_s:02}"
