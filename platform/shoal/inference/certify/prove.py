"""Going through the conditions."""

from __future__ import annotations

from collections.abc import Callable

from shoal.inference.certify.conditions import CONDITIONS, Condition, Unproven
from shoal.inference.certify.laboratory import Laboratory
from shoal.inference.certify.proof import Finding, Proof
from shoal.inference.certify.subject import Subject
from shoal.ops.on_threads import on_threads


def prove(
    subject: Subject, *, quick: bool = False, report: Callable[[Finding], None] | None = None
) -> Proof:
    """Prove or refute that nothing but the request decides about the bits of its answer.

    ``quick`` tries a few chunk sizes in the place of all, and one order of arrival in the place of
    four; ``report`` is called after each condition. A refutation is no exception: it is in the
    proof, with the first case that differs.
    """
    lab = Laboratory(subject, quick=quick)
    kernels = lab.model.certify()
    findings = []
    with on_threads(1):
        for name, condition in CONDITIONS.items():
            findings.append(_find(lab, name, condition))
            if report is not None:
                report(findings[-1])
    return Proof(
        model=str(subject.folder),
        precision=lab.model.kind,
        kernels=kernels,
        findings=tuple(findings),
    )


def _find(lab: Laboratory, name: str, condition: Condition) -> Finding:
    """Go through the cases of a condition up to the first that differs."""
    num_cases = num_answers = 0
    difference = unproven = None
    try:
        for case in condition(lab):
            num_cases += 1
            for request in case.requests:
                num_answers += 1
                found = lab.alone(request).difference(case.traces[request.id])
                if found is not None:
                    difference = f"{request.id} {case.name}: {found}"
                    break
            if difference is not None:
                break
    except Unproven as error:
        unproven = str(error)
    return Finding(
        condition=name,
        num_cases=num_cases,
        num_answers=num_answers,
        difference=difference,
        unproven=unproven,
    )
