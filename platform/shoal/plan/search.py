"""Finds the layouts that take the least time of those that fit into memory.

Candidates come in families that differ in sharding alone. Families are looked at in the order of a
bound: the time of a step that never waits for weights or gradients. Once the best ones found take
less than the bound of the next family, no other can be better, and the rest is only counted. Of
those that are kept the whole plan is made in the end, so that their figures are those of
``make_plan``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from shoal.config import Config, ParallelSettings, ShardingSettings
from shoal.errors import ConfigError
from shoal.models import DecoderConfig
from shoal.plan.candidates import Candidate, Reasons, candidates
from shoal.plan.group import counted
from shoal.plan.links import LinkClass, sent_by_link
from shoal.plan.machine import Machine
from shoal.plan.make import layout_of, plan_without_saves
from shoal.plan.memory import moment_bytes
from shoal.plan.plan import Plan
from shoal.plan.precision import resolve_device
from shoal.plan.rates import Rates
from shoal.plan.refusals import check, check_domain
from shoal.plan.sheet import bytes_text
from shoal.plan.stage import Layout, StagePlan
from shoal.plan.step_time import StepTime

_RESERVE = 3

_NEVER = (float("inf"), 0)

Rank = tuple[float, int]
"""Seconds for a token, then bytes that leave domains: what is less is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found."""

    best: tuple[tuple[Candidate, Plan], ...]
    """Layouts that fit, the fastest first, with their plans."""

    num_candidates: int
    """Layouts that fit together, whether or not they fit into memory."""
    num_slower: int
    """Of these, what was not looked at, as its computing alone takes longer."""

    memory_bytes: int
    """Memory that a step may fill on each device."""
    reasons: Reasons
    """Why others were refused."""


def search(
    config: Config, machine: Machine, rates: Rates, *, memory_bytes: int, most: int
) -> Found:
    """The ``most`` fastest layouts of ``config`` on its workers.

    Everything but ``parallel``, ``sharding``, ``train.micro_batch``, ``train.recompute`` and an
    unset ``cluster.nvlink_domain`` stays as in ``config``. Times are compared for a token, so
    that ``train.global_batch`` may be unset.

    Raises:
        ConfigError: where something else than the layout speaks against the run, and where no
            layout fits.
    """
    decoder, _ = check(_plain(config), machine)
    reasons = Reasons()
    families = list(candidates(config, decoder, _domain(config, rates), reasons))
    searcher = _Searcher(
        config=config, decoder=decoder, machine=machine, rates=rates, memory_bytes=memory_bytes
    )
    # Some more than asked for: the whole plan may show that one does not fit after all.
    kept, num_looked_at = searcher.fastest(families, reasons, most + _RESERVE)
    plans = ((candidate, searcher.plan(candidate)) for candidate in kept)
    fitting = list(islice((p for p in plans if p[1].fullest.peak <= memory_bytes), most))
    number = sum(map(len, families))
    if not fitting:
        raise _nothing(config, number, reasons)
    fitting.sort(key=lambda pair: _rank(pair[1].time, pair[1].sent))
    return Found(
        best=tuple(fitting),
        num_candidates=number,
        num_slower=number - num_looked_at,
        memory_bytes=memory_bytes,
        reasons=reasons,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Searcher:
    """One search."""

    config: Config
    decoder: DecoderConfig
    machine: Machine
    rates: Rates
    memory_bytes: int

    def fastest(
        self, families: Sequence[Sequence[Candidate]], reasons: Reasons, most: int
    ) -> tuple[list[Candidate], int]:
        """The fastest that fit, and how many were looked at."""
        bounds = [self._bound(family[0]) for family in families]
        kept: list[tuple[Rank, int, Candidate]] = []
        num_looked_at = 0
        for number in sorted(range(len(families)), key=bounds.__getitem__):
            worst = kept[-1][0] if len(kept) == most else _NEVER
            if bounds[number] >= worst:
                break
            family = families[number]
            num_looked_at += len(family)
            if not self._holds_activations(family, reasons):
                continue
            for candidate in family:
                rank = self._look_at(candidate, worst, reasons)
                if rank is not None:
                    kept = sorted([*kept, (rank, number, candidate)], key=_first_two)[:most]
                    worst = kept[-1][0] if len(kept) == most else _NEVER
        return [candidate for *_, candidate in kept], num_looked_at

    def plan(self, candidate: Candidate) -> Plan:
        """The whole plan of a candidate."""
        config = candidate.apply(self.config)
        return plan_without_saves(
            config, self.decoder, candidate.topology, self.machine, self.rates
        )

    def _layout(self, candidate: Candidate) -> Layout:
        config = candidate.apply(self.config)
        return layout_of(config, self.decoder, candidate.topology, self.machine)

    def _bound(self, candidate: Candidate) -> Rank:
        """What no candidate of a family can be better than."""
        layout = self._layout(candidate)
        return _rank(self._time(layout, [layout.bare_stage(at) for at in _ends(layout)]))

    def _time(self, layout: Layout, stages: Sequence[StagePlan]) -> StepTime:
        device = resolve_device(self.config, self.machine)
        return StepTime.of(layout, stages, self.rates, device)

    def _holds_activations(self, family: Sequence[Candidate], reasons: Reasons) -> bool:
        """Whether memory would do if there were no parameters."""
        layout = self._layout(family[0])
        needed = max(layout.bare_stage(at).most_kept for at in _ends(layout))
        if needed > self.memory_bytes:
            problem = f"activations alone take {self._of_memory(needed)}"
            reasons.add(_too_much(family[0], problem), len(family), badness=needed)
        return needed <= self.memory_bytes

    def _of_memory(self, needed: int) -> str:
        return f"{bytes_text(needed)} of {bytes_text(self.memory_bytes)}"

    def _look_at(self, candidate: Candidate, worst: Rank, reasons: Reasons) -> Rank | None:
        """The candidate's rank, if that is better than ``worst`` and its memory does."""
        layout = self._layout(candidate)
        stages = [layout.stage(at) for at in _ends(layout)]
        sent = [sent_by_link(stage.traffic(), candidate.topology) for stage in stages]
        rank = _rank(self._time(layout, stages), sent)
        if rank >= worst:
            return None
        needed = max(map(_peak_bytes, stages))
        if needed > self.memory_bytes:
            problem = f"a step takes {self._of_memory(needed)}"
            reasons.add(_too_much(candidate, problem), badness=needed)
            return None
        return rank


def _ends(layout: Layout) -> list[int]:
    """The stages that matter: the first holds most in flight, the last makes the loss; and one
    between, as of those alike."""
    last = layout.stages.num_stages - 1
    return sorted({0, min(1, last), last})


def _rank(time: StepTime | None, sent: Sequence[dict[LinkClass, int]] = ()) -> Rank:
    assert time is not None, "there are rates"
    return 1 / time.tokens_per_s, max((one["outside"] for one in sent), default=0)


def _first_two(item: tuple[Rank, int, Candidate]) -> tuple[Rank, int]:
    return item[:2]


def _peak_bytes(stage: StagePlan) -> int:
    """Bytes of the stage's first rank at the fullest moment."""
    places = {"dense": (0, 0), "expert": (0, 0)}
    moments = sum(
        count * moment_bytes((group,), places, stage.optimizer, stage.precision)
        for group, count in counted(stage.every_group)
    )
    return sum(stage.num_bytes.values()) + moments


def _too_much(candidate: Candidate, problem: str) -> ConfigError:
    return ConfigError("memory", candidate.words, problem, "Shard more")


def _plain(config: Config) -> Config:
    """The run without any layout, for what else may speak against it."""
    return config.model_copy(
        update={
            "parallel": ParallelSettings(),
            "sharding": ShardingSettings(),
            "cluster": config.cluster.model_copy(update={"nvlink_domain": None}),
            "train": config.train.model_copy(update={"global_batch": None, "micro_batch": 1}),
        }
    )


def _domain(config: Config, rates: Rates) -> int | None:
    """Ranks of a domain: as configured, or the most that fast links join and that divide all."""
    if config.cluster.nvlink_domain is not None:
        check_domain(config, rates)
        return config.cluster.nvlink_domain
    workers = config.cluster.workers
    if rates.domain is None or workers <= rates.domain:
        return None
    return max(size for size in range(1, rates.domain + 1) if workers % size == 0)


def _nothing(config: Config, num_candidates: int, reasons: Reasons) -> ConfigError:
    workers = config.cluster.workers
    examples = "; ".join(reasons.examples.values())
    if not num_candidates:
        remedy = "Use another number of workers, or another train.global_batch"
        return ConfigError("cluster.workers", workers, f"no layout fits: {examples}", remedy)
    problem = f"none of {num_candidates} layouts that fit together fits into memory: {examples}"
    remedy = "Use more workers, less of train.global_batch or data.seq_len, or more --memory"
    return ConfigError("cluster.workers", workers, problem, remedy)
