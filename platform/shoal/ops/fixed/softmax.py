"""Softmax in its three uses beside attention: log-probabilities, their normalizer, the router."""

from __future__ import annotations

import math
from typing import Any

import torch

from shoal.errors import ConfigError
from shoal.ops.fixed.arithmetic import broadcast, exponential, keep, larger, largest, total
from shoal.ops.fixed.kernel import kernel
from shoal.ops.fixed.lanes import device
from shoal.ops.fixed.memory import load, read_float, read_int, store, write_float, write_int

_BLOCK = 1024
"""Exponentials are added in fp32 within blocks of so many, and the blocks in fp64."""


def log_normalizer(logits: torch.Tensor) -> torch.Tensor:
    """``log(sum(exp(logits)))`` over the last dimension: ``[T, V]`` fp32 to ``[T]`` fp32."""
    logits = logits.contiguous()
    out = torch.empty(logits.shape[0], dtype=torch.float32)
    _log_softmax(logits.shape[0], logits.data_ptr(), logits.shape[1], out.data_ptr(), 0)
    return out


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """``logits - log_normalizer(logits)``, the logarithms of the softmax: ``[T, V]`` fp32."""
    logits = logits.contiguous()
    normalizer = torch.empty(logits.shape[0], dtype=torch.float32)
    out = torch.empty_like(logits)
    _log_softmax(
        logits.shape[0],
        *(logits.data_ptr(), logits.shape[1], normalizer.data_ptr(), out.data_ptr()),
    )
    return out


def route(
    scores: torch.Tensor, experts_per_token: int, *, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts from the router's ``scores`` ``[T, E]`` fp32.

    Returns the numbers of the most probable experts ``[T, k]`` int64 in increasing order, the lower
    number winning a tie, and their probabilities ``[T, k]`` fp32, with ``normalize`` divided by
    their sum.
    """
    scores = scores.contiguous()
    count, experts = scores.shape
    if not 0 < experts_per_token <= experts:
        raise ConfigError(
            "experts_per_token", experts_per_token, f"there are {experts} experts", "Take fewer"
        )
    choices = torch.empty(count, experts_per_token, dtype=torch.int64)
    weights = torch.empty(count, experts_per_token, dtype=torch.float32)
    probabilities = torch.empty(count, experts, dtype=torch.float32)
    per_task = max(1, 2048 // experts)
    _route(
        -(-count // per_task),
        *(scores.data_ptr(), count, experts, probabilities.data_ptr(), experts_per_token),
        *(choices.data_ptr(), weights.data_ptr(), int(normalize), per_task),
    )
    return choices, weights


@device
def _peak(row: Any, width: Any) -> Any:
    """The largest number of a row."""
    peak = broadcast(-math.inf)
    for start in range(0, width, 16):
        count = min(width - start, 16)
        peak = larger(keep(load(row + start * 4, count, 4), 0, count, -math.inf), peak)
    return largest(peak)


@device
def _log_of_sum(row: Any, width: Any, peak: Any) -> Any:
    """``log(sum(exp(row - peak)))`` in fp64."""
    result = 0.0
    for block in range(0, width, _BLOCK):
        sums = broadcast(0.0)
        for start in range(block, min(block + _BLOCK, width), 16):
            count = min(width - start, 16)
            value = exponential(load(row + start * 4, count, 4) - broadcast(peak))
            sums = sums + keep(value, 0, count, 0.0)
        result += total(sums)
    return math.log(result)


@kernel(4, "log_softmax")
def _log_softmax(task: Any, thread: Any, a: Any) -> None:
    logits, width, normalizers, out = a[0], a[1], a[2], a[3]
    row = logits + task * width * 4
    peak = _peak(row, width)
    write_float(normalizers + task * 4, peak + _log_of_sum(row, width, peak))
    if out:
        normalizer = broadcast(read_float(normalizers + task * 4))
        for start in range(0, width, 16):
            count = min(width - start, 16)
            value = load(row + start * 4, count, 4) - normalizer
            store(out + (task * width + start) * 4, value, count, 4)


@device
def _probabilities(row: Any, experts: Any, out: Any) -> None:
    peak = broadcast(_peak(row, experts))
    sums = broadcast(0.0)
    for start in range(0, experts, 16):
        count = min(experts - start, 16)
        value = exponential(load(row + start * 4, count, 4) - peak)
        sums = sums + keep(value, 0, count, 0.0)
        store(out + start * 4, value, count, 4)
    sums = broadcast(total(sums))
    for start in range(0, experts, 16):
        count = min(experts - start, 16)
        store(out + start * 4, load(out + start * 4, count, 4) / sums, count, 4)


@device
def _swap_down(choices: Any, weights: Any, place: Any) -> None:
    """Exchange the entries at ``place`` and before it."""
    expert, value = read_int(choices + place * 8), read_float(weights + place * 4)
    write_int(choices + place * 8, read_int(choices + place * 8 - 8))
    write_float(weights + place * 4, read_float(weights + place * 4 - 4))
    write_int(choices + place * 8 - 8, expert)
    write_float(weights + place * 4 - 4, value)


@device
def _choose(probabilities: Any, experts: Any, chosen: Any, choices: Any, weights: Any) -> None:
    """The ``chosen`` most probable experts, first by probability, then by number."""
    found = 0
    for expert in range(experts):
        value = read_float(probabilities + expert * 4)
        if found == chosen and not value > read_float(weights + chosen * 4 - 4):
            continue
        found = min(found + 1, chosen)
        place = found - 1
        write_int(choices + place * 8, expert)
        write_float(weights + place * 4, value)
        while place > 0 and value > read_float(weights + place * 4 - 4):
            _swap_down(choices, weights, place)
            place -= 1
    for end in range(1, chosen):
        place = end
        while place > 0 and read_int(choices + place * 8) < read_int(choices + place * 8 - 8):
            _swap_down(choices, weights, place)
            place -= 1


@kernel(9, "route")
def _route(task: Any, thread: Any, a: Any) -> None:
    scores, count, experts, probabilities, chosen, choices, weights, normalize, per_task = (
        *(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8]),
    )
    for row in range(task * per_task, min(count, (task + 1) * per_task)):
        line = probabilities + row * experts * 4
        first, last = row * chosen, (row + 1) * chosen
        _probabilities(scores + row * experts * 4, experts, line)
        _choose(line, experts, chosen, choices + first * 8, weights + first * 4)
        if normalize:
            sums = 0.0
            for place in range(first, last):
                sums += read_float(weights + place * 4)
            for place in range(first, last):
                write_float(weights + place * 4, read_float(weights + place * 4) / sums)
