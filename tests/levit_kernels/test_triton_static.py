"""What Triton's compiler emits for GPUs that are not here: nothing spilled, matrix units where products are."""

import dataclasses
from collections import Counter

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from levit_kernels._published_calls import CALLS, DTYPES
from levit_kernels.triton import static
from levit_kernels.triton._static_targets import TARGETS
from levit_kernels.triton.expert_attention import pieces, useful_share

QUICK = list({call.op: call for call in reversed(CALLS)}.values())  # the first of every op


def gate(call, targets, dtypes):
    found = list(static.measure([call], targets, dtypes))
    assert found and not [f"{x.kernel} {x.size} {x.dtype} {x.target}: {x.failure}" for x in found if x.failure]


@pytest.mark.timeout(900)  # some seconds per kernel on a core of its own
@pytest.mark.parametrize("call", QUICK, ids=lambda call: call.op)
def test_default_configurations(call):
    gate(call, ["sm_90"], ["bf16"])


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.op} {call.size}")
def test_default_configurations_everywhere(call, target):
    gate(call, [target], list(DTYPES))


def test_useful_share_of_expert_attention_at_the_cifar_size():
    patches = torch.empty(256, 16, 192, dtype=torch.bfloat16, device="meta")
    w_qkv = torch.empty(32, 100, 3, 3, 100, device="meta")
    assert useful_share(patches, w_qkv) >= 0.65


def test_the_gate_sees_spills_and_products_without_matrix_units():
    fine = static.Resources("k", "s", "d", "sm_90", 4, 64, 0, 0, 1.0, Counter(HMMA=3, STG=1), 0.1, True, ())
    assert fine.failure is None and fine.matrix_instructions == 3
    assert dataclasses.replace(fine, spilled=8).failure == "8 bytes of registers spilled"
    assert "matrix units" in dataclasses.replace(fine, instructions=Counter(FFMA=9)).failure


def test_pieces_hold_a_width_with_little_padding():
    for width in range(1, 257):
        parts = pieces(width)
        assert sum(parts) >= width and all(p == 0 or (p >= 16 and p & (p - 1) == 0) for p in parts)
        assert sum(parts) == -(-width // 16) * 16 or sum(parts) < 1.15 * width + 16
    assert pieces(100) == (64, 32, 16)
