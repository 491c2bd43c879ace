"""What a proof found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shoal.ops.fixed.certify import Certificate


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One condition."""

    condition: str

    num_cases: int
    """Cases until the first that differed, or all."""

    num_answers: int
    """Answers that were compared in them."""

    difference: str | None = None
    """The first case with other bits, in words."""

    unproven: str | None = None
    """Why the condition proves nothing, where it did not come about."""

    @property
    def holds(self) -> bool:
        """Whether the condition came about and changed no bit."""
        return self.difference is None and self.unproven is None

    def __str__(self) -> str:
        count = f"{self.num_answers} answers in {self.num_cases} cases"
        if self.difference is not None:
            return f"{self.condition}: DIFFERS, {self.difference}"
        if self.unproven is not None:
            return f"{self.condition}: UNPROVEN, {self.unproven}"
        return f"{self.condition}: the same bits in {count}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """All conditions for one model on this machine."""

    model: str
    precision: str
    kernels: Certificate
    findings: tuple[Finding, ...]

    @property
    def holds(self) -> bool:
        """Whether the same bits came out everywhere."""
        return self.kernels.passed and all(finding.holds for finding in self.findings)

    @property
    def first_difference(self) -> str | None:
        """The first case that refutes the promise."""
        failures = [*self.kernels.failures, *(str(f) for f in self.findings if not f.holds)]
        return failures[0] if failures else None

    def as_dict(self) -> Mapping[str, Any]:
        """Plain values for JSON."""
        return {
            "model": self.model,
            "precision": self.precision,
            "holds": self.holds,
            "first_difference": self.first_difference,
            "fingerprint": self.kernels.fingerprint,
            "kernels": asdict(self.kernels),
            "conditions": [asdict(finding) for finding in self.findings],
        }
