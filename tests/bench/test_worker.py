"""Processes that answer lines of JSON: what they say, what they log, and how they end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shoal.bench.worker import worker
from shoal.errors import WorkError

SCRIPT = """
import json, sys
from shoal.bench.worker import say
say("ready")
for line in sys.stdin:
    number = json.loads(line)["number"]
    if number == 3:
        sys.exit("three is too much")
    print("somebody's log")
    say({"twice": 2 * number})
"""


def test_questions_are_answered_until_the_worker_ends(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    with worker("multiplier", [sys.executable, "-c", SCRIPT], log) as multiplier:
        assert multiplier.ask(number=1) == {"twice": 2}
        multiplier.tell(number=2)
        assert multiplier.answer() == {"twice": 4}
        for number in (3, 4):  # of which it hears the first only
            with pytest.raises(WorkError, match="The multiplier ended .*\nthree is too much"):
                multiplier.ask(number=number)


def test_the_environment_is_laid_over_our_own(tmp_path: Path) -> None:
    script = "import os; print('@\"ready\"'); print('@' + os.environ['NUMBER'], flush=True)"
    command = [sys.executable, "-c", script]
    with worker("teller", command, tmp_path / "log", {"NUMBER": "7"}) as teller:
        assert teller.answer() == 7
