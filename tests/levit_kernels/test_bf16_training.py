"""Training with bf16=True: the equations in float64 with factors of products rounded to bfloat16 are its oracle."""

import math

import pytest
import test_expert_training as experts
import test_head_training as heads
import test_vae_codes as codes
import test_vae_training as vaes
import torch
from op_cases import run_with_vectors
from torch.overrides import TorchFunctionMode

from levit_kernels import use_backend
from levit_kernels.backends import cpu
from levit_kernels.expert_training import expert_training_loss
from levit_kernels.head_training import head_training_loss
from levit_kernels.vae_codes import vae_codes
from levit_kernels.vae_training import vae_training_loss

pytestmark = pytest.mark.skipif(cpu.unavailable() is not None, reason=f"native kernels: {cpu.unavailable()}")
HAS_DOTS = (
    torch.backends.cpu.get_cpu_capability() == "AVX512" and getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()
)
with_dots = pytest.mark.skipif(not HAS_DOTS, reason="this CPU has no dot product of bfloat16 pairs")

EXPERTS = experts.SIZES | {  # B, N, P, Q, H, d, K, hidden sizes, classes, gates per expert
    "folded-odd": (33, 5, 13, 17, 2, 15, 3, (11,), 5, 2),  # odd tokens, pixels, width and depth
    "long": (7, 49, 20, 24, 2, 21, 2, (9,), 3, 1),  # of an image's tokens no whole number of vectors
    "wide": (40, 2, 70, 65, 1, 64, 1, (35, 21), 40, 1),
}


def rounded(x):
    return x.float().bfloat16().to(x.dtype)


class RoundedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, bias=None):
        ctx.save_for_backward(a, b)
        return rounded(a) @ rounded(b) + (0 if bias is None else bias)

    @staticmethod
    def backward(ctx, grad):
        (a, b), grad = (rounded(x) for x in ctx.saved_tensors), rounded(grad)
        return grad @ b.T, a.T @ grad, grad.sum(0) if ctx.needs_input_grad[2:] == (True,) else None


class RoundedProducts(TorchFunctionMode):
    """Every `@` rounds its factors, there and back."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        call = RoundedProduct.apply if func is torch.Tensor.matmul else func
        return call(*args, **(kwargs or {}))


def expert_oracle(of):
    """`test_expert_training.exact` with batch norm folded into the embedding, queries and keys folded where the kernel
    does it, and rounded factors in all products but those with attention.
    """
    leaves = [x.detach().double().requires_grad_() for x in of.leaves]
    w_embed, gain, shift, w_qkv, b_qkv = leaves[:5]
    head, gates = leaves[5 : 5 + len(of.head)], None if of.gates is None else leaves[-1]
    product = RoundedProduct.apply
    batch, length, x = *of.patches.shape[:2], of.patches.double().flatten(0, 1)
    mean, variance = x.mean(0) @ w_embed.T, (x @ w_embed.T).var(0, correction=0)
    statistics, scale = [mean.detach(), variance.detach()], gain / torch.sqrt(variance + 1e-5)
    z = product(x, (w_embed * scale[:, None]).T, shift - mean * scale)
    z = torch.where(z > 0, z, 0.2 * z)
    (wq, wk, wv), (bq, bk, bv) = w_qkv.unflatten(0, (3, of.heads, -1)), b_qkv.unflatten(0, (3, of.heads, -1))
    depth, width = wq.shape[1:]
    folds = 2 * depth > width and len(x) * (2 * depth - width) > width * depth and 2 * wq.numel() >= 16
    outputs = []
    for h in range(of.heads):
        if folds:
            q, k = product(z, product(wk[h].T, wq[h]).T, bq[h] @ wk[h]), z
        else:
            q, k = product(z, wq[h].T, bq[h]), product(z, wk[h].T, bk[h])
        v = product(z, wv[h].T, bv[h])
        q, k, v = (y.unflatten(0, (batch, length)) for y in (q, k, v))
        own = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(depth), -1) @ v
        if gates is not None:
            gate = gates if gates.dim() == 1 else gates[:, h]
            own = own * gate[-1]
            for j in range(len(gates) - 1):
                own = own + gate[j] * of.features[of.index, j].double().unflatten(-1, (of.heads, -1))[:, :, h]
        outputs.append(own)
    with RoundedProducts():
        loss, others = heads.formula(torch.cat(outputs, -1).flatten(1), of.labels, head)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    if len(head) > 2:
        gradients[4][2 * len(b_qkv) // 3 :] = 0
    return [loss.detach(), *gradients, *statistics, *others]


def expert(name, dtype=torch.float32):
    of = experts.Arguments(name, dtype)
    args = (of.patches, of.labels, of.attention, of.head, of.heads, of.gates, of.features, of.index)
    return lambda bf16: outcome(expert_training_loss(*args, bf16=bf16), of.leaves), lambda: expert_oracle(of)


def head(name, dtype=torch.float32):
    features, labels, weights = heads.arguments(name, dtype)

    def oracle():
        with RoundedProducts():
            loss, gradients, statistics = heads.exact(features, labels, weights)
        return [loss, *gradients, *statistics]

    leaves = [features, *weights]
    return lambda bf16: outcome(head_training_loss(features, labels, weights, bf16=bf16), leaves), oracle


def vae(name, dtype=torch.float32):
    images, weights, beta, noise = vaes.arguments(name, dtype)

    def oracle():
        with RoundedProducts():
            loss, gradients = vaes.exact(images, weights, beta, noise)
        return [loss, *gradients]

    return lambda bf16: outcome([vae_training_loss(images, weights, beta, noise, bf16)], weights), oracle


def code(name, dtype=torch.float32):
    images, encoder, noise = codes.arguments(name, dtype)

    def oracle():
        halves = [rounded(x.double()) if x.dim() == 3 else x.double() for x in encoder]
        return [rounded_codes(images.double(), halves, noise.double())]

    return lambda bf16: [vae_codes(images, encoder, noise, bf16)], oracle


def rounded_codes(images, encoder, noise):
    w1, b1, w2, b2, w_mu, b_mu, w_ls, b_ls = encoder
    x = torch.tanh(rounded(images) @ w1 + b1[:, None])
    x = rounded(torch.tanh(rounded(x) @ w2 + b2[:, None]))
    return x @ w_mu + b_mu[:, None] + (x @ w_ls + b_ls[:, None]).clamp(-8, 4).exp() * noise


def outcome(found, leaves):
    loss, *statistics = found
    return [loss.detach(), *torch.autograd.grad(loss, leaves), *statistics]


experts.SIZES.update(EXPERTS)
CASES = {
    f"{make.__name__}-{name}": (make, name)
    for make, names in ((expert, EXPERTS), (head, heads.SIZES), (vae, vaes.SIZES), (code, codes.SIZES))
    for name in names
}


def assert_ignored(case, dtype=torch.float32):
    make, name = CASES[case]
    compute, _ = make(name, dtype)
    assert all(map(torch.equal, compute(True), compute(False)))


@with_dots
@pytest.mark.parametrize("case", CASES)
def test_factors_are_rounded_and_nothing_else(case):
    """Float32 may round a number that lies in the middle of two in bfloat16 to the other one, which then spreads: among
    many numbers it happens. Without any rounding the mean error of an expert is 3e-3 and more.
    """
    make, name = CASES[case]
    compute, oracle = make(name)
    each, mean = (2e-2, 2.5e-3) if case in ("expert-mnist", "expert-cifar", "expert-wide") else (1e-3, 3e-4)
    errors = []
    for one, other in zip(compute(True), oracle(), strict=True):
        assert one.dtype == torch.float32 and one.shape == other.shape
        errors.append(float((one.double() - other).norm() / (other.norm() + 1e-3)))
    assert max(errors) <= each and sum(errors) <= mean * len(errors), errors


@with_dots
@pytest.mark.parametrize("case", [f"{make}-{name}" for make in ("expert", "head", "vae") for name in ("mnist", "odd")])
def test_the_same_bits_for_any_number_of_threads(case):
    make, name = CASES[case]
    before, seen = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            seen.append(make(name)[0](True))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for other in seen[1:] for x, y in zip(seen[0], other, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_float64_knows_no_rounding(case):
    assert_ignored(case, torch.float64)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("case", [case for case in CASES if "odd" in case])
def test_a_backend_without_such_products_ignores_it(case, backend):
    with use_backend(backend):
        assert_ignored(case)


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_a_cpu_without_the_instruction_ignores_it(capability):
    run_with_vectors(capability, "from test_bf16_training import *\nfor case in CASES:\n    assert_ignored(case)")
