"""A scheduler with a toy model behind it, and what must be true of the two after every event."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from shoal.inference import (
    ROOT_HASH,
    FinishReason,
    Limits,
    Request,
    SamplingParams,
    Scheduler,
    Sequence,
    State,
    Step,
    child_hash,
)
from tests.inference.toy_model import ToyModel

VOCAB = 5
END = 4

Trace = list[tuple[str, int, int, int, tuple[int, ...], bool, range]]


def limits(*, prefix_cache: bool = True, **changes: int) -> Limits:
    """Tight limits; ``changes`` replace some."""
    sizes = {
        "vocab_size": VOCAB,
        "context_length": 24,
        "num_blocks": 8,
        "block_size": 2,
        "max_running": 4,
        "max_step_tokens": 6,
        "max_waiting": 8,
        "priority_arrivals": 3,
    }
    return Limits(prefix_cache=prefix_cache, **(sizes | changes))


def request(name: str, *prompt: int, **params: object) -> Request:
    """A request; ``ignore_eos`` unless said otherwise, so that its length is known."""
    return Request(
        id=name,
        prompt=prompt,
        params=SamplingParams(**({"ignore_eos": True} | params)),  # type: ignore[arg-type]
    )


@dataclass(kw_only=True)
class World:
    """Scheduler and model, with what was seen of them."""

    limits: Limits
    scheduler: Scheduler = field(init=False)
    model: ToyModel = field(init=False)
    live: dict[str, tuple[Sequence, ...]] = field(default_factory=dict)
    scored: dict[str, list[int]] = field(default_factory=dict)
    trace: list[Trace] = field(default_factory=list)
    prefixes: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    """What each name of a full block that ever was computed stands for."""

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits, (END,))
        self.model = ToyModel(self.limits.num_blocks, self.limits.block_size, VOCAB)

    def add(self, new: Request) -> tuple[Sequence, ...]:
        """Add a request and keep an eye on its sequences."""
        sequences = self.scheduler.add(new)
        self.live[new.id] = sequences
        self.scored[new.id] = []
        self.check()
        return sequences

    def abort(self, name: str) -> None:
        """Abort a request: nothing of it is left."""
        self.scheduler.abort(name)
        for sequence in self.live.get(name, ()):
            assert sequence.is_finished and not sequence.blocks

    def step(
        self, *, abort_meanwhile: str | None = None, broken_row: bool = False
    ) -> list[Sequence]:
        """Plan, compute, complete; optionally abort a request while it is computed."""
        step = self.plan()
        if not step.chunks:
            return []
        tokens, scored = self.model.compute(step)
        before = {id(chunk.sequence): list(chunk.sequence.tokens) for chunk in step.chunks}
        self._check_results(step, tokens, scored)
        if abort_meanwhile is not None:
            self.abort(abort_meanwhile)
        results: list[int | None] = [*tokens]
        if broken_row and results:
            results[-1] = None
        went_on = self.scheduler.complete(step, results)
        for sequence in went_on:
            assert sequence.tokens[: len(before[id(sequence)])] == before[id(sequence)]
        self.check()
        return went_on

    def plan(self) -> Step:
        """Plan a step and check its shape."""
        queue = [each for each in self._sequences if each.state is State.WAITING]
        step = self.scheduler.plan()
        self.trace.append(
            [
                (
                    *(chunk.sequence.request.id, chunk.sequence.index, chunk.start, chunk.count),
                    *(chunk.blocks, chunk.samples, chunk.scored),
                )
                for chunk in step.chunks
            ]
        )
        assert bool(step.chunks) == self.scheduler.has_work, "a step is empty only without work"
        assert step.num_tokens <= self.limits.max_step_tokens
        admitted = [each.place for each in queue if each.state is not State.WAITING]
        waiting = [each.place for each in self._sequences if each.state is State.WAITING]
        assert not admitted or not waiting or max(admitted) < min(waiting), "somebody jumped"
        assert len({id(chunk.sequence) for chunk in step.chunks}) == len(step.chunks)
        for chunk in step.chunks:
            assert chunk.start == chunk.sequence.num_computed and chunk.count >= 1
            assert len(chunk.blocks) == self.limits.num_blocks_for(chunk.stop)
            assert chunk.samples == (
                chunk.stop == len(chunk.sequence.tokens) and chunk.sequence.max_tokens > 0
            )
        return step

    def fail(self) -> None:
        """Plan a step that fails while it is computed; the pool holds garbage where it wrote."""
        step = self.plan()
        if not step.chunks:
            return
        ended = self.scheduler.fail(step)
        assert {id(each) for each in ended} == {id(chunk.sequence) for chunk in step.chunks}
        assert all(each.finish_reason is FinishReason.ERROR for each in ended)
        self.check()

    def drain(self) -> None:
        """Run until nothing is left: everything ends, within the steps of the guarantee."""
        steps = sum(
            each.num_prompt + each.max_tokens + 1
            for each in self._sequences
            if not each.is_finished
        )
        while self.scheduler.has_work:
            assert steps > 0, "somebody waits for ever"
            steps -= 1
            self.step()
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.kv_blocks_free == stats.kv_blocks_total

    @property
    def _sequences(self) -> list[Sequence]:
        return [each for group in self.live.values() for each in group]

    def check(self) -> None:
        """Everything that must hold between two events."""
        sequences = self._sequences
        holders = Counter(block for each in sequences for block in each.blocks)
        pool = self.scheduler.pool
        for block in range(pool.num_blocks):
            assert pool._holders[block] == holders[block], f"block {block} leaked or lost"
        assert len(holders) + pool.num_available == pool.num_blocks
        for each in sequences:
            self._check_sequence(each)
        self._check_names()
        stats = self.scheduler.stats()
        assert self.limits.prefix_cache or stats.kv_blocks_cached == 0
        states = Counter(each.state for each in sequences)
        assert stats.waiting == states[State.WAITING]
        assert stats.running == states[State.PREFILLING] + states[State.DECODING]
        assert stats.running <= self.limits.max_running
        reasons = Counter(each.finish_reason for each in sequences)
        assert stats.cancelled == reasons[FinishReason.ABORT]
        assert stats.failed == reasons[FinishReason.ERROR]
        assert stats.finished == reasons[FinishReason.STOP] + reasons[FinishReason.LENGTH]

    def _check_sequence(self, sequence: Sequence) -> None:
        """Its blocks are its own or shared by right: they hold exactly its tokens."""
        size, params = self.limits.block_size, sequence.request.params
        assert sequence.num_generated <= sequence.max_tokens
        if not params.ignore_eos:
            may_end = sequence.generated[params.min_tokens :]
            assert END not in may_end[:-1]
            assert (sequence.stop_token == END) == (may_end[-1:] == [END])
            assert sequence.is_finished or END not in may_end
        assert len(set(sequence.blocks)) == len(sequence.blocks)
        assert not sequence.twins
        if sequence.state in (State.WAITING, State.FINISHED):
            assert not sequence.blocks
            return
        assert sequence.num_computed < len(sequence.tokens)
        for at in range(sequence.num_computed // size):
            prefix = tuple(sequence.tokens[: (at + 1) * size])
            assert self.model.holds(sequence.blocks[at], prefix)
            name = self._name(prefix)
            self.prefixes[name] = prefix
            assert self.scheduler.pool.find(name) == sequence.blocks[at], "two blocks, one content"

    def _check_names(self) -> None:
        """Whoever is found by name holds what the name says, and so does its parent."""
        pool, size = self.scheduler.pool, self.limits.block_size
        found = {name: pool.find(name) for name in self.prefixes}
        for name, block in found.items():
            if block is None:
                continue
            prefix = self.prefixes[name]
            assert self.model.holds(block, prefix)
            if len(prefix) > size:
                assert found[self._name(prefix[:-size])] is not None, "a block without its parent"

    def _name(self, prefix: tuple[int, ...]) -> bytes:
        name, size = ROOT_HASH, self.limits.block_size
        for start in range(0, len(prefix), size):
            name = child_hash(name, prefix[start : start + size])
        return name

    def _check_results(
        self, step: Step, tokens: list[int], scored: dict[str, list[tuple[int, bytes]]]
    ) -> None:
        """The blocks that the step was given led to the right results."""
        for chunk, token in zip(step.sampled, tokens, strict=True):
            assert token == self.model.expected_token(chunk.sequence.tokens)
        for name, rows in scored.items():
            prompt = self.live[name][0].request.prompt
            for position, digest in rows:
                assert digest == self.model.expected_digest(prompt[: position + 1])
                assert position == len(self.scored[name]), "a row is missing or comes twice"
                self.scored[name].append(position)
