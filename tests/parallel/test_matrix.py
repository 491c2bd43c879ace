"""Every way to divide a step over ranks gives what one process does, and costs what was planned.

In nearly all cells plain SGD without clipping: Adam and clipping would hide a constant factor.
Weights are compared by how they changed, over three steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from itertools import cycle

import pytest
import torch
from rich.console import Console

from shoal.data import IGNORED
from shoal.training import ProgressLine, StepMetrics
from tests.parallel.matrix import (
    NUM_STEPS,
    PAIRS,
    Cell,
    Expected,
    Outcome,
    expected,
    sequences,
    train,
)
from tests.plan.measured import assert_as_planned
from tests.ranks import RankPool

EXCHANGES = ("gather", "ring")

EDGES = (-1e-6, 0.0, 1e-6)
"""A loss so near to the edge between two printed numbers may be printed as either."""

ROUNDING = NUM_STEPS * 2.0**-23
"""A change is the difference of two weights: this share of a weight is the most that rounding it
after every step, here and there, can take or add."""


def _one() -> Iterator[Cell]:
    """Groups of one rank, where a factor for each microbatch would show."""
    for pair, model in zip(("RR", "OO", "PP"), ("dense", "mixed", "mixture"), strict=True):
        yield Cell(ranks=1, dense=pair, experts=pair, model=model, microbatches=4)


def _data() -> Iterator[Cell]:
    """Data parallelism: every pair of levels, experts by another one than dense layers."""
    for ranks, domain in ((2, 2), (2, 1), (4, 2)):
        pairs = PAIRS if ranks > domain else ["RR", "RO", "RG", "RP"]
        models = cycle(["mixture", "untied", "shared"])
        for number, pair in enumerate(pairs):
            yield Cell(
                ranks=ranks,
                domain=domain,
                dense=pair,
                experts=pairs[::-1][number],
                model=next(models),
                microbatches=1 + 2 * (number % 2),
            )
    yield Cell(ranks=4, model="mixed", dense="RP", experts="RG", recompute="layer")
    yield Cell(ranks=4, domain=1, model="mixed", dense="PP", experts="OP", micro_batch=2)


def _experts() -> Iterator[Cell]:
    """Shared experts; with as many ranks as experts' groups have, their mesh is of size one."""
    for ranks, domain, degree in ((2, 2, 2), (4, 4, 2), (4, 2, 2), (4, 4, 4)):
        levels = [("RR", "RP"), ("OP", "GG"), ("PP", "RR"), ("OO", "OP")]
        models = cycle(["mixture", "mixed", "shared"])
        for number, (dense, experts) in enumerate(levels):
            yield Cell(
                ranks=ranks,
                domain=domain,
                expert=degree,
                dense=dense,
                experts=experts,
                model=next(models),
                microbatches=1 + 2 * (number % 2),
                recompute="layer" if number == 3 else "none",
            )


def _contexts() -> Iterator[Cell]:
    """Shared sequences, of odd lengths and of one token more than chunks; beside other ranks."""
    for exchange in EXCHANGES:
        for size in (2, 4):
            lengths = {"dense": 257, "packed": 65, "window": 65, "mixture": 65}
            for model, length in lengths.items():
                yield Cell(ranks=size, context=size, exchange=exchange, model=model, length=length)
            yield Cell(
                ranks=size,
                context=size,
                exchange=exchange,
                length=2 * size + 1,
                model="mixed",
                dense="RR",
                micro_batch=2,
            )
        for domain in (2, 4):
            for model, recompute in (("packed", "none"), ("mixture", "layer")):
                yield Cell(
                    ranks=4,
                    domain=domain,
                    context=2,
                    exchange=exchange,
                    model=model,
                    recompute=recompute,
                    dense="OP",
                    experts="PP",
                    length=33,
                )
        for size, degree in ((2, 2), (2, 4), (4, 2), (4, 4)):
            yield Cell(
                ranks=4,
                context=size,
                expert=degree,
                exchange=exchange,
                model="mixture",
                dense="OP",
                experts="RO",
                length=33,
            )
    yield Cell(ranks=2, context=2, expert=2, model="shared", length=33, microbatches=3)


def _stages() -> Iterator[Cell]:
    """Pipelines: fewer microbatches than stages, as many, more; tied tables on both ends."""
    models = cycle(["dense", "mixed", "mixture", "untied"])
    for ranks, stages in ((2, 2), (4, 4)):
        for virtual in (1, 2):
            for microbatches in (1, 3, 4):
                yield Cell(
                    ranks=ranks,
                    pipeline=stages,
                    virtual=virtual,
                    model=next(models),
                    microbatches=microbatches,
                )
    levels = cycle(["RR", "OO", "RG", "OP"])
    for domain in (1, 2, 4):
        for virtual in (1, 2):
            pair = next(levels)
            yield Cell(
                ranks=4,
                domain=domain,
                pipeline=2,
                virtual=virtual,
                dense=pair,
                experts=pair,
                model=next(models),
                microbatches=3,
                recompute="layer" if domain == 4 else "none",
                clip=0.5 if domain == 2 else None,
            )
    for virtual, (context, degree), exchange in (
        (1, (1, 2), "gather"),
        (2, (1, 2), "gather"),
        (1, (2, 1), "gather"),
        (2, (2, 1), "ring"),
        (1, (2, 2), "ring"),
        (2, (2, 2), "gather"),
    ):
        yield Cell(
            ranks=4,
            pipeline=2,
            virtual=virtual,
            context=context,
            expert=degree,
            exchange=exchange,
            dense="RO",
            model=next(models) if degree == 1 else "mixed",
            microbatches=3,
        )


def _three() -> Iterator[Cell]:
    """Numbers of ranks that are no power of two."""
    yield Cell(ranks=3, dense="OO", experts="PP", model="six", microbatches=3)
    yield Cell(ranks=3, domain=1, dense="GP", experts="RG", model="untied", length=29)
    yield Cell(ranks=3, expert=3, dense="RR", experts="OP", model="six", microbatches=3)
    yield Cell(ranks=3, pipeline=3, virtual=2, model="six", microbatches=5)
    for exchange in EXCHANGES:
        yield Cell(ranks=3, context=3, exchange=exchange, model="packed", length=29)


def _biased() -> Iterator[Cell]:
    """Experts balanced by a bias: tokens are counted over all that shares a layer in a step."""
    yield Cell(ranks=1, model="biased", microbatches=3)
    yield Cell(ranks=2, domain=1, dense="OP", experts="PP", model="biased", microbatches=3)
    yield Cell(ranks=2, context=2, expert=2, exchange="ring", model="biased", recompute="layer")
    yield Cell(ranks=4, domain=2, expert=2, dense="RO", experts="GG", model="biased")
    yield Cell(ranks=4, domain=2, context=2, dense="PP", experts="RP", model="biased", length=33)
    yield Cell(ranks=4, pipeline=2, virtual=2, model="biased", microbatches=3, recompute="layer")
    yield Cell(ranks=4, pipeline=4, model="biased", microbatches=3, optimizer="adamw")
    yield Cell(ranks=4, pipeline=2, context=2, expert=2, model="biased", clip=0.5)


def _six() -> Iterator[Cell]:
    """Six ranks in two or three domains, as stages, sequences and experts."""
    for number, (pipeline, domain, context, degree) in enumerate(
        [(1, 3, 3, 3), (1, 2, 2, 1), (1, 6, 6, 2), (2, 3, 1, 3), (2, 6, 3, 3), (3, 2, 2, 2)]
    ):
        yield Cell(
            ranks=6,
            domain=domain,
            pipeline=pipeline,
            virtual=1 + (number > 3),
            context=context,
            exchange=EXCHANGES[number % 2],
            expert=degree,
            dense=PAIRS[number],
            experts=PAIRS[-number],
            model="six",
            length=29,
            microbatches=3,
            recompute="layer" if number % 2 else "none",
        )


def _adamw() -> Iterator[Cell]:
    """Whose updates do not show the scale of gradients, but whether each is its own's."""
    yield Cell(ranks=2, domain=1, dense="RO", experts="PP", model="mixture", optimizer="adamw")
    yield Cell(ranks=4, domain=2, dense="OP", experts="RG", model="mixed", optimizer="adamw")
    yield Cell(ranks=4, expert=2, dense="RR", experts="OO", model="mixture", optimizer="adamw")
    yield Cell(ranks=4, pipeline=2, context=2, dense="RO", model="dense", optimizer="adamw")


def _eight() -> Iterator[Cell]:
    """All that divides eight ranks, with levels, models and lengths in turn."""
    pairs, models = cycle(PAIRS), cycle(["mixture", "mixed", "shared"])
    exchanges, lengths = cycle(EXCHANGES), cycle([17, 33, 65])
    for pipeline in (1, 2, 4):
        for virtual in (1, 2) if pipeline > 1 else (1,):
            stage = 8 // pipeline
            for domain in (2, 4, 8):
                inner = min(stage, domain)
                for context in (1, 2, 4, 8):
                    for degree in (1, 2, 4, 8):
                        if inner % context or inner % degree:
                            continue
                        yield Cell(
                            ranks=8,
                            domain=domain,
                            pipeline=pipeline,
                            virtual=virtual,
                            context=context,
                            exchange=next(exchanges),
                            expert=degree,
                            dense=next(pairs),
                            experts=next(pairs),
                            model=next(models),
                            length=next(lengths),
                            microbatches=3 if pipeline > 1 else 2,
                        )


CELLS = [*_one(), *_data(), *_experts(), *_contexts(), *_stages(), *_three(), *_adamw(), *_biased()]
MORE = [*_six(), *_eight()]


@pytest.mark.parametrize(
    "cell",
    [*CELLS, *(pytest.param(cell, marks=pytest.mark.full) for cell in MORE)],
    ids=str,
)
def test_trains_as_one_process(ranks: RankPool, cell: Cell) -> None:
    outcomes = ranks.run(cell.ranks, train, cell)
    wanted = expected(
        cell.model,
        cell.num_layers,
        cell.length,
        cell.num_sequences,
        cell.clip,
        cell.optimizer,
    )
    _check_reports(cell, outcomes, wanted)
    _check_weights(outcomes, wanted)
    _check_biases(outcomes, wanted)
    for step in (0, NUM_STEPS - 1):
        assert_as_planned(cell.settings, [outcome.measured[step] for outcome in outcomes])


def _check_reports(cell: Cell, outcomes: list[Outcome], wanted: Expected) -> None:
    for step, made in enumerate(outcomes[0].steps):
        loss, norm, auxiliary = wanted.losses[step], wanted.norms[step], wanted.auxiliary[step]
        assert made.loss == pytest.approx(loss, rel=1e-5)
        assert made.grad_norm == pytest.approx(norm, rel=1e-6)
        assert (made.auxiliary_loss is None) == (auxiliary is None)
        if auxiliary is not None:
            assert made.auxiliary_loss == pytest.approx(auxiliary, rel=1e-5)
        assert _printed(made) in {_printed(replace(made, loss=loss * (1 + e))) for e in EDGES}
        batch = sequences(cell.model, cell.length, cell.num_sequences, step)
        num_labels = int((batch.labels != IGNORED).sum())
        assert (made.tokens, made.labels) == (batch.tokens.numel(), num_labels)
        for other in outcomes[1:]:
            found = other.steps[step]
            assert (found.loss, found.grad_norm) == (made.loss, made.grad_norm)
            assert found.auxiliary_loss == made.auxiliary_loss


def _printed(metrics: StepMetrics) -> str:
    """The user's line of a step."""
    console = Console(file=StringIO(), width=200)
    with console.capture() as capture, ProgressLine(console, num_steps=NUM_STEPS) as line:
        line.show(metrics)
    return capture.get()


def _check_biases(outcomes: list[Outcome], wanted: Expected) -> None:
    assert {name for outcome in outcomes for name in outcome.biases} == wanted.biases.keys()
    for outcome in outcomes:
        for name, bias in outcome.biases.items():
            assert bias.abs().max() > 0
            assert torch.equal(bias, wanted.biases[name]), name


def _check_weights(outcomes: list[Outcome], wanted: Expected) -> None:
    covered = dict.fromkeys(wanted.changes, 0)
    seen: dict[tuple[str, int, int], torch.Tensor] = {}
    for outcome in outcomes:
        for held in outcome.held:
            stop = held.row_start + len(held.change)
            change = wanted.changes[held.name][held.row_start : stop]
            weights = wanted.weights[held.name][held.row_start : stop]
            if len(change):
                tolerance = 1e-5 * wanted.changes[held.name].abs().max() + ROUNDING * weights.abs()
                assert bool(((held.change - change).abs() <= tolerance).all()), held.name
                same = seen.setdefault((held.name, held.row_start, stop), held.change)
                assert torch.equal(same, held.change), f"copies of {held.name} differ"
            covered[held.name] += held.change.numel() if held.is_primary else 0
    assert covered == {name: change.numel() for name, change in wanted.changes.items()}
