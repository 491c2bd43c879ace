"""The demo from weights to an answer: import, train, export, compare, serve, ask.

Every step is a command, printed as it starts, so that each can be repeated by hand. Steps whose
outcome exists are skipped and training resumes, so that a second start goes on where the first one
ended; ``--fresh`` starts over. Whatever it starts ends with it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

from command import SHOAL, run, server

EXAMPLES = Path(__file__).resolve().parent
MODEL = Path("runs/input/smollm2")
CORPUS = Path("runs/input/stdlib")
RUN = Path("runs/demo")
EXPORT = Path("runs/demo-export")
QUESTION = "What is the capital of France?"


def main() -> int:
    """Run every step; 0 when the loss has fallen, else the exit code of the step that failed."""
    arguments = _parse()
    root: Path = arguments.root.resolve()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        _prepare(root, fresh=arguments.fresh)
        _make(root, arguments.steps)
        _show(root)
    except subprocess.CalledProcessError as error:
        return error.returncode
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return _judge(root / RUN / "metrics.jsonl")


def _make(root: Path, steps: int) -> None:
    """Import, train, export."""
    if not (root / MODEL).exists():
        run([*SHOAL, "import", "smollm2", str(MODEL)], root)
    config = EXAMPLES / "demo.yaml"
    shown = config.relative_to(root) if config.is_relative_to(root) else config
    run([*SHOAL, "train", str(shown), "--set", f"train.steps={steps}"], root)
    if not (root / EXPORT).exists():
        run([*SHOAL, "export", str(RUN), str(EXPORT)], root)


def _show(root: Path) -> None:
    """Compare with the model before, then serve and ask."""
    print("\nThe same prompts, continued before and after:", flush=True)
    run([sys.executable, str(EXAMPLES / "sample.py"), str(MODEL), str(EXPORT)], root)
    print("\nThe fine-tuned model behind OpenAI's endpoints:", flush=True)
    with server([*SHOAL, "serve", str(EXPORT), "--set", "serve.port=0"], root) as url:
        run([sys.executable, str(EXAMPLES / "ask.py"), url, QUESTION], root)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--root", type=Path, default=Path(), help="folder that holds runs/")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--fresh", action="store_true", help="remove an earlier demo run first")
    return parser.parse_args()


def _prepare(root: Path, *, fresh: bool) -> None:
    """Put the corpus in place, and earlier outcomes out of the way."""
    if fresh:
        for outcome in (RUN, EXPORT):
            if (root / outcome).exists():
                print(f"Removing {outcome} of an earlier demo", flush=True)
                shutil.rmtree(root / outcome)
    corpus = root / CORPUS
    corpus.parent.mkdir(parents=True, exist_ok=True)
    corpus.unlink(missing_ok=True)
    corpus.symlink_to(sysconfig.get_path("stdlib"), target_is_directory=True)


def _judge(metrics: Path) -> int:
    """Say how the loss went; 1 if it did not fall over a run long enough to tell."""
    losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    window = max(len(losses) // 4, 1)
    first, last = sum(losses[:window]) / window, sum(losses[-window:]) / window
    means = f"each the mean of {window} of the {len(losses)} steps"
    print(f"\nLoss at the start {first:.3f}, at the end {last:.3f}, {means}.")
    print(f"The fine-tuned model lies in {EXPORT}; transformers loads it, make serve serves it.")
    return int(len(losses) >= 8 and last >= first)


if __name__ == "__main__":
    sys.exit(main())
