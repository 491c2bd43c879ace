"""Mistakes in the user's input as exceptions: alone, together, and across processes."""

from __future__ import annotations

import pickle

import pytest

from shoal.errors import ConfigError, ConfigErrors

ONE = ConfigError("a.b", 1, "is odd", "Use 2")
OTHER = ConfigError("c", "x", "is text", "Write a number")


def test_nothing_found_raises_nothing() -> None:
    ConfigErrors.raise_any([])


def test_one_mistake_is_raised_as_it_is() -> None:
    with pytest.raises(ConfigError) as caught:
        ConfigErrors.raise_any([ONE])
    assert caught.value is ONE


def test_several_come_together() -> None:
    with pytest.raises(ConfigErrors) as caught:
        ConfigErrors.raise_any([ONE, OTHER])
    assert str(caught.value) == "a.b = 1: is odd. Use 2.\nc = 'x': is text. Write a number."
    assert (caught.value.field, caught.value.exit_code) == ("a.b", 2)


@pytest.mark.parametrize("error", [ONE, ConfigErrors([ONE, OTHER])])
def test_mistakes_travel_between_processes(error: ConfigError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.remedy == error.remedy
