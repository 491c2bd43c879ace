"""The places in a module tree where one parameter is registered."""

from __future__ import annotations

import weakref

from torch import nn

from shoal.errors import WorkError


class Slot:
    """One attribute of one module that holds a parameter; it does not keep the module alive."""

    def __init__(self, module: nn.Module, name: str, path: str) -> None:
        self._module = weakref.ref(module)
        self.name = name
        self.path = path
        """Name from the unit's module on."""
        # A class with its own __setattr__ (nn.RNNBase) keeps more than the registry up to date.
        self._plain = type(module).__setattr__ is nn.Module.__setattr__

    @property
    def module(self) -> nn.Module:
        """The module; it lives as long as anyone can ask."""
        module = self._module()
        assert module is not None
        return module

    @property
    def parameter(self) -> nn.Parameter:
        """What is registered there now."""
        parameter = self.module._parameters[self.name]
        assert parameter is not None
        return parameter

    def check(self, expected: nn.Parameter) -> None:
        """Raise ``WorkError`` if somebody else's tensor is there."""
        if self.module._parameters.get(self.name) is not expected:
            raise WorkError(
                f"Parameter {self.path} was replaced after it was sharded: load weights into the "
                "sharded parameters instead."
            )

    def swap(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Put ``new`` where ``old`` is, as by ``check``."""
        self.check(old)
        if self._plain:
            self.module._parameters[self.name] = new
        else:
            setattr(self.module, self.name, new)
