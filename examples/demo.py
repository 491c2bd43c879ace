"""The demo from weights to weights: import, train, export, and text from before and after.

Every step is a ``shoal`` command, printed as it starts, so that each can be repeated by hand. Steps
whose outcome exists are skipped and training resumes, so that a second start goes on where the
first one ended; ``--fresh`` starts over.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
MODEL = Path("runs/input/smollm2")
CORPUS = Path("runs/input/stdlib")
RUN = Path("runs/demo")
EXPORT = Path("runs/demo-export")


def main() -> int:
    """Run every step; 0 when the loss has fallen, else the exit code of the step that failed."""
    arguments = _parse()
    root: Path = arguments.root.resolve()
    try:
        _prepare(root, fresh=arguments.fresh)
        if not (root / MODEL).exists():
            _shoal(root, "import", "smollm2", str(MODEL))
        config = EXAMPLES / "demo.yaml"
        shown = config.relative_to(root) if config.is_relative_to(root) else config
        _shoal(root, "train", str(shown), "--set", f"train.steps={arguments.steps}")
        if not (root / EXPORT).exists():
            _shoal(root, "export", str(RUN), str(EXPORT))
        print("\nThe same prompts, continued before and after:", flush=True)
        _run(root, [sys.executable, str(EXAMPLES / "sample.py"), str(MODEL), str(EXPORT)])
    except subprocess.CalledProcessError as error:
        return error.returncode
    return _judge(root / RUN / "metrics.jsonl")


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


def _shoal(root: Path, *arguments: str) -> None:
    print(f"\n$ {shlex.join(('shoal', *arguments))}", flush=True)
    _run(root, [sys.executable, "-m", "shoal", *arguments])


def _run(root: Path, command: list[str]) -> None:
    process = subprocess.Popen(command, cwd=root)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        code = process.wait()  # Ctrl-C reached the command as well, which ends its workers first
    if code != 0:
        raise subprocess.CalledProcessError(code, command)


def _judge(metrics: Path) -> int:
    """Say how the loss went; 1 if it did not fall over a run long enough to tell."""
    losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    window = max(len(losses) // 4, 1)
    first, last = sum(losses[:window]) / window, sum(losses[-window:]) / window
    print(f"\nLoss over the first {window} steps {first:.3f}, over the last {window} {last:.3f}.")
    print(f"The fine-tuned model lies in {EXPORT}; transformers loads it.")
    return int(len(losses) >= 8 and last >= first)


if __name__ == "__main__":
    sys.exit(main())
