"""Certification: what holds is certified, what does not is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch

from shoal.ops.fixed import PackedExperts, PackedLinear, probes
from shoal.ops.fixed.certify import ROW_COUNTS, certify_kernels
from shoal.ops.fixed.probes import Probe, hard_rows
from shoal.ops.on_threads import on_threads

BF16 = torch.bfloat16


def small_model() -> list[Probe]:
    generator = torch.Generator().manual_seed(0)
    linear = PackedLinear.pack(torch.randn(70, 66, generator=generator), kind="bf16")
    experts = PackedExperts.pack(
        torch.randn(4 * 2 * 40, 66, generator=generator),
        torch.randn(4 * 66, 40, generator=generator),
        4,
        kind="bf16",
    )
    return [
        probes.linear_probe(linear, BF16),
        probes.experts_probe(experts, 2, BF16),
        probes.attention_probe(4, 2, 16, 16, BF16),
        probes.attention_probe(4, 2, 16, 16, BF16, window=20),
        probes.norm_probe(66, BF16),
        probes.swiglu_probe(40, BF16),
        probes.place_heads_probe(4, 2, 16, BF16, normalizes=True),
        probes.add_norm_probe(66, BF16),
        probes.take_rows_probe(66, BF16),
        probes.widened_probe(66, BF16),
        probes.clamped_probe(66, BF16, 0.5),
        probes.add_gated_probe(66, BF16),
        probes.log_softmax_probe(257),
        probes.route_probe(4, 2),
        probes.linear_probe(linear, BF16),
    ]


def products() -> list[Probe]:
    """Those of the above that multiply bf16 numbers, but for the experts."""
    return [small_model()[index] for index in (0, 2)]


def split_in_two(weight: torch.Tensor) -> Probe:
    """A linear layer that takes K in two halves for small batches: the order depends on them."""
    rows = hard_rows(probes.NUM_ROWS, weight.shape[1], torch.float32)
    whole = PackedLinear.pack(weight, kind="fp32")
    half = weight.shape[1] // 2
    left, right = (PackedLinear.pack(x, kind="fp32") for x in weight.split(half, dim=1))

    def compute(chosen: torch.Tensor) -> torch.Tensor:
        x = rows[chosen]
        if len(chosen) < 16:
            return left(x[:, :half]) + right(x[:, half:])
        return whole(x)

    return Probe(name="linear split in two", compute=compute)


def test_the_kernels_of_a_model_pass() -> None:
    certificate = certify_kernels(small_model())
    assert certificate.passed and certificate.failures == ()
    assert [kernel.name for kernel in certificate.kernels] == [
        "linear bf16 70x66",
        "experts bf16 4x66x40",
        "attention bf16 4/2 heads of 16",
        "attention bf16 4/2 heads of 16, window 20",
        "rms_norm bf16 66",
        "swiglu bf16 40",
        "place_heads bf16 4/2 heads of 16, normalized",
        "add_rms_norm bf16 66",
        "take_rows bf16 66",
        "widened bf16 66",
        "clamped bf16 66",
        "add_gated bf16 66",
        "log_softmax fp32 257",
        "route fp32 4 top 2",
    ]
    assert all(kernel.row_counts == ROW_COUNTS for kernel in certificate.kernels)
    assert certificate.threads == (1, 2) or torch.get_num_threads() > 2


def test_a_kernel_whose_order_depends_on_the_rows_is_named() -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    good = probes.linear_probe(PackedLinear.pack(weight, kind="fp32"), torch.float32)
    certificate = certify_kernels([good, split_in_two(weight)])
    assert not certificate.passed
    assert [kernel.passed for kernel in certificate.kernels] == [True, False]
    (failure,) = certificate.failures
    assert failure.startswith("linear split in two: row ")
    assert "in a batch of 1, alone, 1 thread(s)" in failure


def test_a_kernel_that_is_wrong_on_several_threads_only_is_named() -> None:
    rows = hard_rows(probes.NUM_ROWS, 8, torch.float32)
    probe = Probe(
        name="unsteady", compute=lambda chosen: rows[chosen] + (torch.get_num_threads() > 1)
    )
    (failure,) = certify_kernels([probe]).failures
    assert "2 thread(s)" in failure


def test_a_kernel_that_lets_a_neighbour_in_is_named() -> None:
    rows = hard_rows(probes.NUM_ROWS, 8, torch.float32)
    probe = Probe(name="leaky", compute=lambda chosen: rows[chosen] + rows[chosen].roll(1, 0) * 0)
    assert not certify_kernels([probe]).passed


def test_the_number_of_threads_is_left_as_it_was() -> None:
    for number in (1, 2):
        with on_threads(number):
            certify_kernels(small_model()[4:5])
            assert torch.get_num_threads() == number


def test_the_fingerprint_is_that_of_the_bits() -> None:
    first = certify_kernels(small_model()).fingerprint
    assert len(first) == 16
    assert certify_kernels(small_model()).fingerprint == first
    assert certify_kernels(small_model()[:-4]).fingerprint != first


SCRIPT = """
import json
from tests.ops.fixed.test_certify import products
from shoal.ops.fixed.certify import certify_kernels
certificate = certify_kernels(products())
print(json.dumps([certificate.passed, certificate.bf16_products, certificate.fingerprint]))
"""


def test_a_cpu_without_bf16_products_keeps_the_promise_and_is_told_apart() -> None:
    environment = {**os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    passed, bf16_products, fingerprint = json.loads(done.stdout)
    assert passed and not bf16_products
    here = certify_kernels(products())
    assert not here.bf16_products or here.fingerprint != fingerprint
