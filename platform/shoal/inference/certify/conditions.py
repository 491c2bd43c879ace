"""The conditions that must not matter.

Each gives cases one by one: a name and what the requests were answered in it. A condition that did
not come about, because nobody was preempted say, raises ``Unproven``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import numpy as np

from shoal.inference.certify.laboratory import Laboratory
from shoal.inference.certify.subject import Subject
from shoal.inference.certify.trace import Trace, run
from shoal.inference.engine import Engine
from shoal.inference.request import Request
from shoal.inference.score import Scorer
from shoal.ops.on_threads import on_threads

BATCHES = (2, 3, 7, 8, 16, 17, 33)


class Unproven(Exception):
    """The condition did not come about, so that its answers prove nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Answers under one variant of a condition."""

    name: str
    requests: tuple[Request, ...]
    traces: Mapping[str, Trace]
    """By the request's id."""


Condition = Callable[[Laboratory], Iterator[Case]]


def _case(name: str, engine: Engine, arrivals: list[tuple[int, Request]]) -> Case:
    requests = tuple(request for _, request in arrivals)
    return Case(name=name, requests=requests, traces=run(engine, arrivals))


def batches(lab: Laboratory) -> Iterator[Case]:
    """Beside so many others that all come at once."""
    for size in BATCHES:
        company = [(0, request) for request in lab.company(size)]
        yield _case(f"in a batch of {size}", lab.engine(), company)


def arrivals(lab: Laboratory) -> Iterator[Case]:
    """Beside others that come before and after, in any order."""
    for number in range(1 if lab.quick else 4):
        generator = np.random.Generator(np.random.Philox(number))
        company = lab.company(16)
        order = generator.permutation(len(company))
        steps = generator.integers(0, 20, len(company))
        coming = [(int(step), company[at]) for step, at in zip(steps, order, strict=True)]
        yield _case(f"arrival in order {number}", lab.engine(max_running=9), coming)


def chunks(lab: Laboratory) -> Iterator[Case]:
    """The prompt computed in chunks of every size, alone and beside others."""
    request = lab.questions.scored
    longest = len(request.prompt)
    size = lab.questions.block_size
    some = (1, 2, 3, size - 1, size, size + 1, longest)
    for number in some if lab.quick else range(1, longest + 1):
        engine = lab.engine(max_running=1, max_step_tokens=number)
        yield _case(f"in chunks of {number}", engine, [(0, request)])
    for number in (5, 24, size + 3):
        engine = lab.engine(max_running=4, max_step_tokens=number)
        company = [(at, each) for at, each in enumerate([request, *lab.company(8)])]
        yield _case(f"in steps of {number} tokens", engine, company)


def prefix_cache(lab: Laboratory) -> Iterator[Case]:
    """With the beginning of the prompt in the cache, at the borders of blocks."""
    size = lab.questions.block_size
    for request in lab.questions.plain:
        if len(request.prompt) < size - 1:
            continue
        engine = lab.engine()
        yield _case(f"{request.id}, cache cold", engine, [(0, request)])
        yield _case(f"{request.id}, cache warm", engine, [(0, request)])
        hits = engine.stats().prefix_hit_tokens
        if len(request.prompt) > size and hits == 0:
            raise Unproven(f"no token of {request.id} was found in the cache")
        longer = _longer(request)
        if len(longer.prompt) + (longer.params.max_tokens or 0) <= engine.limits.context_length:
            yield _case(f"{longer.id}, beginning warm", engine, [(0, longer)])


def _longer(request: Request) -> Request:
    """``request`` with three more tokens, so that it shares the beginning only."""
    tail = request.prompt[2::-1]
    return replace(request, id=f"{request.id}-longer", prompt=request.prompt + tail)


def tight_pool(lab: Laboratory) -> Iterator[Case]:
    """Where the KV pool is too small for all, so that some give up their blocks and start over."""
    requests = lab.questions.long
    blocks = [-(-(len(r.prompt) + (r.params.max_tokens or 0)) // 16) for r in requests]
    for more in (1, 2, 4):
        engine = lab.engine(block_size=16, num_blocks=max(blocks) + more)
        yield _case(
            f"with {max(blocks) + more} blocks", engine, [(0, request) for request in requests]
        )
        if engine.stats().preempted == 0 and more == 1:
            raise Unproven("nobody was preempted")


def thread_counts(lab: Laboratory) -> Iterator[Case]:
    """On one thread and on two."""
    company = [(0, request) for request in (lab.questions.scored, *lab.company(8))]
    for number in (1, 2):
        with on_threads(number):
            yield _case(f"on {number} thread{'s' * (number > 1)}", lab.engine(), company)


def other_replica(lab: Laboratory) -> Iterator[Case]:
    """By another replica that has loaded the model for itself, while both are at work."""
    other = Laboratory(lab.subject, quick=lab.quick)
    ours, theirs = lab.engine(), other.engine()
    for request in lab.company(7):
        ours.add(request)
    ours.step()
    traces: dict[str, Trace] = {}
    company = other.company(5)
    for request in company:
        traces |= run(theirs, [(0, request)])
        ours.step()
    yield Case(name="by another replica", requests=tuple(company), traces=traces)


def restart(lab: Laboratory) -> Iterator[Case]:
    """By a process that has just started."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        traces = processes.submit(_answers_of_new_process, lab.subject, lab.quick).result()
    yield Case(name="after a restart", requests=tuple(lab.company(8)), traces=traces)


def _answers_of_new_process(subject: Subject, quick: bool) -> dict[str, Trace]:
    lab = Laboratory(subject, quick=quick)
    with on_threads(1):
        return run(lab.engine(), [(0, request) for request in lab.company(8)])


def training_forward(lab: Laboratory) -> Iterator[Case]:
    """Log-probabilities of the trainer's forward pass, for prompt and answer."""
    scorer = Scorer(lab.subject.load_decoder(), lab.model.kind)
    requests = (lab.questions.scored, *(r for r in lab.questions.plain if r.params.n == 1))
    answers = [lab.alone(request) for request in requests]
    lines = [
        (*request.prompt, *trace.tokens) for request, trace in zip(requests, answers, strict=True)
    ]
    traces = {}
    scored = scorer.score(enumerate(lines, 1))
    for request, trace, scores in zip(requests, answers, scored, strict=True):
        border = len(request.prompt) - 1
        prompt = scores[:border] if request.params.prompt_logprobs is not None else None
        traces[request.id] = Trace(
            tokens=trace.tokens, logprobs=scores[border:], prompt_logprobs=prompt
        )
    yield Case(name="by the training forward", requests=requests, traces=traces)


CONDITIONS: Mapping[str, Condition] = {
    "batches": batches,
    "arrivals": arrivals,
    "chunks": chunks,
    "prefix cache": prefix_cache,
    "tight pool": tight_pool,
    "threads": thread_counts,
    "replica": other_replica,
    "restart": restart,
    "training forward": training_forward,
}
