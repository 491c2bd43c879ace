"""Which tokens of which sequences the next step computes.

    engine                                   scheduler
      │── add(request) / abort(id) ───────────> │     any time, from the engine's one thread
      │── plan() ─────────────────────────────> │
      │ <───────────────────────── Step ────────│
      │   model, sampler: one token for each of step.sampled
      │── complete(step, tokens) ─────────────> │     or fail(step), if the model raised
      │ <──── sequences that went on ───────────│
      │── finish(sequence) ───────────────────> │     if a stop string was met
      └── and again

A step first gives one token to each sequence that decodes, then the rest of ``max_step_tokens``
to prompts under way, then to the head of the queue, all in the order of ``place``.

* **Blocks.** A sequence is admitted with blocks for all of its known tokens, those at the
  beginning shared with whoever computed them before; more come one by one as it decodes. If none
  is left, the running sequence that is last in the order gives up its own and queues again at its
  old place; it is a value, so it later computes its known tokens again and goes on as if nothing
  had happened.
* **No deadlock.** Every accepted request fits into the pool alone (``Limits.check``). The first
  running sequence is never preempted while others run, and alone it finds all blocks, because
  those that nobody holds can be evicted. So it gets at least one token a step until it is done. If
  nothing runs, the head of the queue is admitted. A step is empty only if there is nothing to do.
* **No starvation.** Nobody is admitted before the head of the queue, so it waits at most for those
  that run now, each of which ends (see above). How many later requests can go before it is
  bounded (``place_of``).
* **Determinism.** No clock, no random number, no order of a set: the same calls give the same
  steps.
"""

from __future__ import annotations

from collections.abc import Sequence as Series

from shoal.errors import ConfigError, Overloaded
from shoal.inference.limits import Limits
from shoal.inference.protocol import Stats
from shoal.inference.request import Request
from shoal.inference.scheduling.block_pool import BlockPool
from shoal.inference.scheduling.block_tables import BlockTables
from shoal.inference.scheduling.early_aborts import EarlyAborts
from shoal.inference.scheduling.order import InOrder, place_of
from shoal.inference.scheduling.sequence import FinishReason, Sequence, State
from shoal.inference.scheduling.step import Chunk, Step


class Scheduler:
    """Continuous batching over one KV pool; ``end_ids`` are the model's end-of-text tokens."""

    def __init__(self, limits: Limits, end_ids: Series[int] = ()) -> None:
        self.limits = limits
        self._tables = BlockTables(limits)
        self._end_ids = frozenset(end_ids)
        self._requests: dict[str, tuple[Sequence, ...]] = {}
        self._waiting = InOrder()
        self._running = InOrder()
        self._aborted = EarlyAborts(limits.max_remembered_aborts)
        self._in_flight: Step | None = None
        self._num_arrivals = 0
        self._counts = dict.fromkeys(
            (
                "finished",
                "cancelled",
                "failed",
                "refused",
                "preempted",
                "prefix_hit_tokens",
                "computed_tokens",
                "generated_tokens",
                "steps",
            ),
            0,
        )

    @property
    def pool(self) -> BlockPool:
        """The bookkeeping of the KV pool, to look at."""
        return self._tables.pool

    @property
    def has_work(self) -> bool:
        """Whether ``plan`` has something to compute."""
        return bool(self._requests)

    def stats(self) -> Stats:
        """Sizes and counters at this moment."""
        return Stats(
            running=len(self._running),
            max_running=self.limits.max_running,
            waiting=len(self._waiting),
            kv_blocks_total=self.pool.num_blocks,
            kv_blocks_free=self.pool.num_available,
            kv_blocks_cached=self.pool.num_cached,
            **self._counts,
        )

    def add(self, request: Request) -> tuple[Sequence, ...]:
        """Queue ``request`` and give its choices.

        A request that was aborted before it came gives finished sequences. Raises ConfigError for
        one that can never be served (HTTP 400) and Overloaded for one that finds the queue full
        (429 or 503); neither leaves a trace.
        """
        was_aborted = self._aborted.take(request.id)
        try:
            max_tokens = self._check(request)
        except (ConfigError, Overloaded):
            self._counts["refused"] += 1
            raise
        place = (self._num_arrivals, request.params.priority)
        sequences = tuple(
            Sequence(
                request, index, max_tokens, place_of(*place, index, self.limits.priority_arrivals)
            )
            for index in range(request.params.n)
        )
        if was_aborted:
            for sequence in sequences:
                sequence.finish(FinishReason.ABORT)
            self._counts["cancelled"] += len(sequences)
            return sequences
        self._num_arrivals += 1
        self._requests[request.id] = sequences
        for sequence in sequences:
            self._waiting.add(sequence)
        return sequences

    def abort(self, request_id: str) -> tuple[Sequence, ...]:
        """End what is left of a request at once and give those sequences; their blocks are free.

        An id that is not under way is kept in mind, in case its request is still to come; the
        oldest of ``max_remembered_aborts`` such ids are forgotten.
        """
        sequences = self._requests.get(request_id)
        if sequences is None:
            self._aborted.note(request_id)
            return ()
        ended = tuple(sequence for sequence in sequences if not sequence.is_finished)
        for sequence in ended:
            self.finish(sequence, FinishReason.ABORT)
        return ended

    def finish(self, sequence: Sequence, reason: FinishReason = FinishReason.STOP) -> None:
        """End ``sequence`` now, for instance because its text met a stop string."""
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
        else:
            self._leave(sequence)
        sequence.finish(reason)
        self._settle(sequence)

    def plan(self) -> Step:
        """Decide about the next step, which has to be completed or failed before the next plan."""
        assert self._in_flight is None, "the step before is still under way"
        self._tables.begin_step()
        chunks: list[Chunk] = []
        budget = self.limits.max_step_tokens
        for sequence in [each for each in self._running if each.state is State.DECODING]:
            if sequence.state is State.DECODING and self._grow(sequence):
                chunks.append(self._chunk(sequence, 1))
                budget -= 1
        for sequence in self._running:
            if budget > 0 and sequence.state is State.PREFILLING:
                chunks.append(self._chunk(sequence, budget))
                budget -= chunks[-1].count
        while budget > 0 and (admitted := self._admit_head()) is not None:
            chunks.append(self._chunk(admitted, budget))
            budget -= chunks[-1].count
        step = Step(number=self._counts["steps"], chunks=tuple(chunks))
        if chunks:
            self._counts["steps"] += 1
            self._counts["computed_tokens"] += step.num_tokens
            self._in_flight = step
        return step

    def complete(self, step: Step, tokens: Series[int | None]) -> list[Sequence]:
        """Take the results of ``step``: ``tokens`` holds one for each of ``step.sampled``.

        None stands for a row whose logits were no numbers: its sequence ends as an error. Gives
        the sequences that got a token or ended, in the order of the step; one that was aborted
        meanwhile is not among them, and its token is dropped.
        """
        assert step is self._in_flight and len(tokens) == len(step.sampled)
        self._in_flight = None
        went_on: list[Sequence] = []
        results = iter(tokens)
        for chunk in step.chunks:
            token = next(results) if chunk.samples else None
            sequence = chunk.sequence
            if sequence.is_finished:
                continue
            self._tables.settle(sequence)
            sequence.num_scored = max(sequence.num_scored, chunk.scored.stop)
            sequence.advance(chunk.count)
            if chunk.samples:
                self._append(sequence, token)
                went_on.append(sequence)
            elif sequence.max_tokens == 0 and sequence.state is State.DECODING:
                self.finish(sequence, FinishReason.LENGTH)
                went_on.append(sequence)
        return went_on

    def fail(self, step: Step) -> list[Sequence]:
        """End all sequences of ``step`` as errors and forget what it would have computed."""
        assert step is self._in_flight
        self._in_flight = None
        ended = [chunk.sequence for chunk in step.chunks if not chunk.sequence.is_finished]
        for sequence in ended:
            self.finish(sequence, FinishReason.ERROR)
        self._tables.forget_step()
        return ended

    def _check(self, request: Request) -> int:
        """Most tokens of ``request``; refuses it, or the whole of its choices for want of room."""
        if request.id in self._requests:
            raise ConfigError("id", request.id, "a request of this id is under way", "Take another")
        max_tokens = self.limits.check(request)
        if len(self._waiting) + request.params.n > self.limits.max_waiting:
            raise Overloaded(
                f"{len(self._waiting)} of at most {self.limits.max_waiting} sequences wait already."
            )
        return max_tokens

    def _admit_head(self) -> Sequence | None:
        """Take the head of the queue in, if there is room for it and for those that run."""
        sequence = self._waiting.first
        if sequence is None or len(self._running) >= self.limits.max_running:
            return None
        # Without a block for each that runs, a step or two later one of them would be preempted.
        headroom = sum(self._tables.may_grow(other) for other in self._running)
        if not self._tables.admit(sequence, headroom):
            return None
        self._waiting.remove(sequence)
        self._counts["prefix_hit_tokens"] += sequence.num_computed
        self._running.add(sequence)
        return sequence

    def _grow(self, sequence: Sequence) -> bool:
        """Make sure of a block for the next token; False if ``sequence`` itself had to leave."""
        if self._tables.has_room(sequence):
            return True
        while self.pool.num_available == 0:
            victim = self._running.last
            self._preempt(victim)
            if victim is sequence:
                return False
        self._tables.grow(sequence)
        return True

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk:
        """The next at most ``budget`` tokens of ``sequence``."""
        start = sequence.num_computed
        stop = min(start + budget, len(sequence.tokens))
        scored = range(0)
        if sequence.is_scoring:
            scored = range(max(start, sequence.num_scored), min(stop, sequence.num_prompt - 1))
        return Chunk(
            sequence=sequence,
            start=start,
            count=stop - start,
            blocks=self._tables.fill(sequence, start, stop),
            samples=stop == len(sequence.tokens) and sequence.num_generated < sequence.max_tokens,
            scored=scored,
        )

    def _append(self, sequence: Sequence, token: int | None) -> None:
        if token is None:
            self.finish(sequence, FinishReason.ERROR)
            return
        self._counts["generated_tokens"] += 1
        sequence.append(token, self._end_ids)
        if sequence.is_finished:
            self._leave(sequence)
            self._settle(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.preempt()
        self._waiting.add(sequence)
        self._counts["preempted"] += 1

    def _leave(self, sequence: Sequence) -> None:
        """Take ``sequence`` out of the running ones and give its blocks back."""
        self._running.remove(sequence)
        self._tables.release(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """Count ``sequence``, which is finished, and drop its request if it was the last."""
        kinds = {FinishReason.ABORT: "cancelled", FinishReason.ERROR: "failed"}
        reason = sequence.finish_reason
        self._counts["finished" if reason is None else kinds.get(reason, "finished")] += 1
        if all(each.is_finished for each in self._requests[sequence.request.id]):
            del self._requests[sequence.request.id]
