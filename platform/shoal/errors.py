"""The exceptions that Shoal raises on purpose.

    ShoalError
    ├── ConfigError        what the user wrote cannot work: field, value, remedy   (exit code 2)
    │   ├── ConfigErrors   several such mistakes, found together
    │   └── Misplaced      the machines that workers got do not do; others, or these later, may
    ├── WorkError          the work failed: disk, peer, damaged file               (exit code 1)
    │   ├── PeerLost       another rank is gone or silent; another attempt may help
    │   ├── Unavailable    a disk or a store does not answer well; another attempt may help
    │   └── Overloaded     no room for more at the moment; the same request may pass later
    └── EndedEarly         stopped as asked, or out of data                        (exit code 3)

A message is one sentence or two: what is wrong with which value, and what would fit. The command
line turns each kind into its exit code and prints the message without a traceback.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any


class ShoalError(Exception):
    """Base of every exception that Shoal raises on purpose."""

    exit_code = 1


class ConfigError(ShoalError):
    """The user's input is wrong; raised before any work starts.

    ``field`` is the dotted configuration key or command-line argument, ``value`` what the user
    gave, ``problem`` a clause that says why it cannot work, ``remedy`` an imperative that says
    what would, or a question.
    """

    exit_code = 2

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        self.field = field
        self.value = value
        self.problem = problem
        self.remedy = remedy
        end = "" if remedy.endswith("?") else "."
        super().__init__(f"{field} = {value!r}: {problem}. {remedy}{end}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.value, self.problem, self.remedy)


class ConfigErrors(ConfigError):
    """Several mistakes in the user's input, one to a line; the attributes are the first one's."""

    def __init__(self, problems: Sequence[ConfigError]) -> None:
        self.problems = tuple(problems)
        first = self.problems[0]
        super().__init__(first.field, first.value, first.problem, first.remedy)
        self.args = ("\n".join(str(problem) for problem in self.problems),)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)

    @staticmethod
    def raise_any(problems: Sequence[ConfigError]) -> None:
        """Raise what was found: nothing, the one mistake, or all of them in one exception."""
        if len(problems) == 1:
            raise problems[0]
        if problems:
            raise ConfigErrors(problems)


class Misplaced(ConfigError):
    """What the user asked for does not fit the machines that the workers got, as they are now.

    Others may do, or these once nobody else uses them. Before a run has begun nobody knows
    whether it ever fits, and the user's input counts as wrong.
    """


class WorkError(ShoalError):
    """The work failed for a reason outside the user's input, such as a full disk or a lost peer."""

    exit_code = 1


class PeerLost(WorkError):
    """Another rank is gone or does not answer: the consequence of a failure elsewhere."""


class Unavailable(WorkError):
    """What is wanted may well be there and whole, but its disk or store does not give it now.

    Or it does not take what is to be written.
    """


class Overloaded(WorkError):
    """There is no room for another request at the moment; the same one may pass later."""


class EndedEarly(ShoalError):
    """The run ended before its planned last step, as asked or because its data ran out."""

    exit_code = 3


_PASSING = (
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENOTCONN),
    *(errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET),
)
"""What a file system answers while its server, or a part of itself, is away."""


def disk_error(message: str, error: OSError) -> WorkError:
    """What to raise for a disk's answer: Unavailable where another attempt may get a better one."""
    kind = Unavailable if error.errno in _PASSING else WorkError
    return kind(message)
