"""The command line's entry: which commands exist, and how each way to end becomes an exit code.

    0    done
    1    the work failed; its first cause is shown
    2    what the user wrote is wrong: one message with field, value and remedy
    3    ended early, as asked or because the data ran out
    130  interrupted by Ctrl-C
    129  its terminal was closed (SIGHUP), 143 told to end by SIGTERM, where a command does not
         count that as one of the others

Every command imports what it needs when it runs: torch takes seconds to load, and ``shoal --help``
or a refused file should not.
"""

from __future__ import annotations

import logging
import signal
import sys
import traceback
from contextlib import suppress
from typing import Annotated, NoReturn

import typer

from shoal.cli.commands import (
    bench,
    certify,
    checkpoint,
    export,
    generate,
    importing,
    plan,
    score,
    serve,
    train,
)
from shoal.endings import when_told_to_end
from shoal.errors import ConfigError, ShoalError

WORK_FAILED = 1
INTERRUPTED = 130

app = typer.Typer(
    name="shoal",
    help="Train and serve large language models on Ray, from one YAML file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("plan")(plan.plan)
app.command("train")(train.train)
app.command("export")(export.export)
app.command("import")(importing.import_)
app.command("generate")(generate.generate)
app.command("score")(score.score)
app.command("serve")(serve.serve)
app.command("certify")(certify.certify)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(bench.app, name="bench")


@app.callback()
def _configure(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log more, and show where an error arose.")
    ] = False,
) -> None:
    """Train and serve large language models on Ray, from one YAML file."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for package in ("shoal", "shoal_actors", "shoal_deployments"):
        logging.getLogger(package).setLevel(logging.DEBUG if verbose else logging.INFO)


def main() -> None:
    """Run the command in ``sys.argv`` and leave the process with its exit code."""
    try:
        with when_told_to_end(_leave):
            app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:  # the edge of the process: every failure becomes an exit code
        sys.exit(_report(error))


def _leave(number: signal.Signals) -> NoReturn:
    """Leave by SystemExit, so that what a command has begun is put away."""
    sys.exit(128 + number)


def _report(error: Exception) -> int:
    """Say on stderr what went wrong; the exit code that says it to scripts."""
    with suppress(OSError):  # where the terminal was closed nobody reads, and the code counts
        if not isinstance(error, ShoalError | OSError) or _is_verbose():
            traceback.print_exception(error)  # a fault of ours, or asked for: its place matters
        sys.stderr.write(f"{_message(error)}\n")
    return error.exit_code if isinstance(error, ShoalError) else WORK_FAILED


def _message(error: Exception) -> str:
    """What happened and, where work failed, the first cause unless the message holds it."""
    message = _named(error)
    if isinstance(error, ConfigError):
        return message
    first = error
    while isinstance(first.__cause__, Exception):
        first = first.__cause__
    return message if str(first) in message else f"{message}\nFirst cause: {_named(first)}"


def _named(error: Exception) -> str:
    return str(error) if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"


def _is_verbose() -> bool:
    return logging.getLogger("shoal").level == logging.DEBUG
