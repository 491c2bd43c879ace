"""When units gather, let go and reduce: the run-time side of one construction context.

    forward of unit i      wait for its weights ─ start gathering i+1 ─ compute ─ let go
    backward of unit i     wait for its weights ─ start gathering i-1 ─ compute
        each gradient      into the unit's partial buffer
        the last of them   let the weights go ─ earlier reduction goes on ─ start reducing
    end of backward        everything rests, every reduction is over

Prefetch is one unit deep. A forward that runs inside backward is a recomputation: its unit is about
to be differentiated, so it neither prefetches nor lets go. Every rank runs the same program, so
that all of them issue the same collectives in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.autograd.graph import register_multi_grad_hook

from shoal.errors import ConfigError, WorkError
from shoal.fsdp.group import ParameterGroup
from shoal.fsdp.lanes import Lanes
from shoal.fsdp.order import unit_trees
from shoal.fsdp.reducing import Reducing
from shoal.fsdp.tensors import tensors_in
from shoal.fsdp.unit import Phase, Unit


class Schedule:
    """Drives the units that were made in one ``fully_shard_context``."""

    def __init__(self, device: torch.device, *, overlap: bool) -> None:
        self.device = device
        self.lanes = Lanes.on(device)
        self.is_last = True
        """Whether the present microbatch is the step's last; see ``microbatch``."""
        self._overlap = overlap
        self._finalized = False
        self._units: list[weakref.ref[Unit]] = []
        self._next: dict[Phase, weakref.WeakKeyDictionary[Unit, weakref.ref[Unit]]] = {}
        self._below: weakref.WeakKeyDictionary[Unit, list[weakref.ref[Unit]]] = (
            weakref.WeakKeyDictionary()
        )
        self._in_backward = False
        self._any_arrived = False
        self._reducing = Reducing(overlap=overlap)

    @property
    def units(self) -> list[Unit]:
        """Living units, in order of construction."""
        return [unit for reference in self._units if (unit := reference()) is not None]

    @property
    def in_backward(self) -> bool:
        """Whether a backward has begun and not come to its end, be it for an error."""
        return self._in_backward

    def register(self, unit: Unit) -> None:
        """Add a unit under construction."""
        if self._finalized:
            raise WorkError("The context is closed: shard every module inside one `with` block.")
        self._units.append(weakref.ref(unit))

    def finalize(self) -> None:
        """Fix names and orders; called once all units are made."""
        self._finalized = True
        trees = unit_trees(self.units)
        forward = [unit for tree in trees for unit in tree.forward()]
        backward = [unit for tree in reversed(trees) for unit in tree.backward()]
        for phase, order in ((Phase.FORWARD, forward), (Phase.BACKWARD, backward)):
            self._next[phase] = weakref.WeakKeyDictionary(
                {a: weakref.ref(b) for a, b in zip(order, order[1:], strict=False)}
            )
        for tree in trees:
            below = list(tree.forward())
            self._below[tree.unit] = [weakref.ref(unit) for unit in below]
            names = {id(module): name for name, module in tree.unit.module.named_modules()}
            for unit in below:
                unit.name = names[id(unit.module)] or unit.name

    def order(self, phase: Phase) -> list[str]:
        """Names of the units in the order of a phase, as it is expected to run."""
        following = self._next[phase]
        targets = {id(reference()) for reference in following.values()}
        unit = next((unit for unit in self.units if id(unit) not in targets), None)
        names = []
        while unit is not None:
            names.append(unit.name)
            reference = following.get(unit)
            unit = reference() if reference is not None else None
        return names

    def reset(self) -> None:
        """Come to rest after a failed backward; all gradients of the step are dropped."""
        for unit in self.units:
            unit.discard()
        self._end_backward()

    def before_forward(self, unit: Unit) -> None:
        """Have the weights of a unit in place."""
        if not self._finalized:
            raise WorkError(f"{unit.name} ran inside fully_shard_context: leave the block first.")
        if _inside_backward():
            if unit.phase is Phase.RESTING:
                unit.enter(Phase.BACKWARD)
            self._begin_backward()
            unit.open(Phase.BACKWARD)
            unit.turn(Phase.FORWARD)
            return
        if self._in_backward:
            raise WorkError(
                "An earlier backward failed before its end, so gradients are incomplete: call "
                "reset() on the sharding context to drop them and go on."
            )
        unit.enter(Phase.FORWARD)
        for group in unit.groups:
            group.follow_flags(self._arrival(unit, group))
        unit.open(Phase.FORWARD)
        unit.turn(Phase.FORWARD)
        self._prefetch_after(unit, Phase.FORWARD)

    def after_forward(self, unit: Unit, inputs: object, output: object) -> None:
        """Let the weights go and watch for the unit's backward."""
        self._leave_forward(unit)
        if torch.is_grad_enabled():
            self._watch(unit, inputs, output)

    def abort_forward(self, unit: Unit) -> None:
        """Let the weights go after an exception; a recomputation may end early by one."""
        self._leave_forward(unit)

    def _leave_forward(self, unit: Unit) -> None:
        if _inside_backward():
            if unit.phase is Phase.BACKWARD:
                unit.turn(Phase.BACKWARD)
            return
        unit.rest()
        for reference in self._below.get(unit, []):
            other = reference()
            if other is not None and other.phase is Phase.RESTING:
                other.rest()  # it was prefetched and then not called

    def _prefetch_after(self, unit: Unit, phase: Phase) -> None:
        reference = self._next[phase].get(unit)
        following = reference() if reference is not None else None
        if following is not None and self._overlap:
            following.prefetch(phase)

    def _watch(self, unit: Unit, inputs: object, output: object) -> None:
        outputs = list(tensors_in(output))
        if not outputs and output is not None and unit.num_trainable:
            raise ConfigError(
                f"output of {unit.name}",
                type(output).__name__,
                "no tensor can be seen in it, so its backward would go unnoticed",
                "Return tensors in mappings, sequences or dataclasses",
            )
        waits = False
        if unit.has_frozen:
            sources = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
            if sources:
                waits = True
                register_multi_grad_hook(sources, self._inputs_done(unit))
        hook = self._output_hook(unit, waits)
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(hook)

    def _output_hook(self, unit: Unit, waits: bool) -> Callable[[torch.Tensor], None]:
        """What runs when the gradient of an output of ``unit`` is there."""
        schedule, reference, generation = weakref.ref(self), weakref.ref(unit), unit.generation

        def hook(_: torch.Tensor) -> None:
            owner, unit = schedule(), reference()
            if owner is not None and unit is not None:
                owner._before_backward(unit, generation, waits)

        return hook

    def _before_backward(self, unit: Unit, generation: int, waits: bool) -> None:
        self._begin_backward()
        if unit.generation != generation:
            raise WorkError(
                f"The weights of {unit.name} changed between its forward and its backward."
            )
        unit.awaits_inputs |= waits
        if unit.phase is Phase.BACKWARD:
            return
        unit.enter(Phase.BACKWARD)
        unit.awaits_inputs = waits
        unit.open(Phase.BACKWARD)
        unit.turn(Phase.BACKWARD)
        self._prefetch_after(unit, Phase.BACKWARD)

    def _begin_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._finish_backward)

    def _arrival(self, unit: Unit, group: ParameterGroup) -> Callable[[int, torch.Tensor], None]:
        """What runs when backward has made the gradient of a parameter."""
        schedule, unit_reference, group_reference = map(weakref.ref, (self, unit, group))

        def arrive(index: int, gradient: torch.Tensor) -> None:
            owner, unit, group = schedule(), unit_reference(), group_reference()
            assert isinstance(owner, Schedule)
            assert isinstance(unit, Unit)
            assert isinstance(group, ParameterGroup)
            owner._arrive(unit, group, index, gradient)

        return arrive

    def _arrive(
        self, unit: Unit, group: ParameterGroup, index: int, gradient: torch.Tensor
    ) -> None:
        if unit.phase is not Phase.BACKWARD:
            raise WorkError(
                f"A gradient of {unit.name} came outside its backward: its weights were used by "
                "another module, or its output does not lead to the loss."
            )
        assert group.gradients is not None
        self._any_arrived = True
        group.gradients.collect(index, gradient, is_last=self.is_last)
        if unit.num_arrived == unit.num_trainable:
            self._gradients_done(unit)

    def _gradients_done(self, unit: Unit) -> None:
        if unit.awaits_inputs:
            unit.reduced = True
        else:
            unit.rest()
        self._reducing.advance()
        for group in unit.groups:
            self._reducing.start(group, is_last=self.is_last)

    def _inputs_done(self, unit: Unit) -> Callable[[object], None]:
        """What runs when backward has made the gradients of the inputs of ``unit``."""
        reference = weakref.ref(unit)

        def done(_: object) -> None:
            unit = reference()
            if unit is None or unit.phase is not Phase.BACKWARD:
                return
            unit.awaits_inputs = False
            if unit.reduced or not unit.num_trainable:
                unit.rest()

        return done

    def _finish_backward(self) -> None:
        """End of backward: called by autograd when the whole graph has run."""
        if self._any_arrived:
            self._check_complete()
        for unit in self.units:
            if unit.phase is not Phase.FORWARD:  # as when a forward differentiates inside itself
                unit.rest()
        self._reducing.finish()
        if self._any_arrived and self.is_last:
            for unit in self.units:
                for group in unit.groups:
                    if group.unfinished:
                        # Not reached by the last microbatch.
                        self._reducing.start(group, is_last=True)
        self._end_backward()

    def _check_complete(self) -> None:
        for unit in self.units:
            incomplete = unit.phase is Phase.BACKWARD and not unit.reduced
            if incomplete and unit.num_trainable:
                raise WorkError(
                    f"Backward reached unit {unit.name} but made no gradient for "
                    f"{', '.join(unit.missing)}: let the loss depend on every trainable parameter "
                    "of a unit, on every rank, or freeze it with requires_grad_(False)."
                )

    def _end_backward(self) -> None:
        self._reducing.finish()
        self._in_backward = False
        self._any_arrived = False


def _inside_backward() -> bool:
    """Whether autograd is running a graph on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)
