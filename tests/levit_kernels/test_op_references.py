"""The references against SPEC.md's equations written once more, in NumPy, image by image and head by head."""

import numpy as np
import pytest
import torch
from op_cases import GATES, OPS, evaluate

from levit_kernels import use_backend
from levit_kernels.dkf_fuse import dkf_fuse_reference
from levit_kernels.latent_distance import latent_distance_reference


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gate_of(gates, b, k, h):
    if gates.ndim == 1:
        return gates[k]
    if gates.ndim == 2:
        return gates[k, h]
    return gates[b, k, h if gates.shape[2] > 1 else 0]


def expert_attention(patches, w_embed, b_embed, w_qkv, b_qkv, gates, slope):
    batch, length, _ = patches.shape
    experts, _, _, heads, depth = w_qkv.shape
    outputs = np.zeros((experts, batch, length, heads * depth))
    for k in range(experts):
        for b in range(batch):
            z = patches[b] @ w_embed[k] + b_embed[k]
            z = np.where(z > 0, z, slope * z)
            for h in range(heads):
                q, key, v = (z @ w_qkv[k, :, i, h] + b_qkv[k, i, h] for i in range(3))
                outputs[k, b, :, h * depth : (h + 1) * depth] = softmax(q @ key.T / np.sqrt(depth)) @ v
    return outputs if gates is None else dkf_fuse(outputs.transpose(1, 0, 2, 3), gates, None, heads)


def dkf_fuse(features, gates, index, heads):
    rows = range(len(features)) if index is None else index
    _, experts, length, width = features.shape
    out = np.zeros((len(rows), length, width))
    for b, row in enumerate(rows):
        for k in range(experts):
            for e in range(width):
                out[b, :, e] += gate_of(gates, b, k, e * heads // width) * features[row, k, :, e]
    return out


def distance(codes, query):
    return np.array(
        [np.mean([np.sqrt(((c - q) ** 2).sum()) for c, q in zip(code, query, strict=True)]) for code in codes]
    )


def encode(images, encoder, k):
    w1, b1, w2, b2, w_mu, b_mu, w_logsigma, b_logsigma = (x[k] for x in encoder)
    hidden = np.tanh(np.tanh(images @ w1 + b1) @ w2 + b2)
    return hidden @ w_mu + b_mu, np.clip(hidden @ w_logsigma + b_logsigma, -8, 4)


def expansion_distances(images, encoder, query, noise):
    codes = []
    for k in range(len(encoder[0])):
        mu, logsigma = encode(images, encoder, k)
        codes.append(mu if noise is None else mu + np.exp(logsigma) * noise[k])
    return distance(codes, query)


def elbo_loss(images, encoder, decoder, beta, noise):
    out = np.zeros((len(images), len(encoder[0])))
    for k in range(out.shape[1]):
        mu, logsigma = encode(images, encoder, k)
        w1, b1, w2, b2, w3, b3 = (x[k] for x in decoder)
        errors = []
        for eps in [np.zeros(mu.shape[1])] if noise is None else noise:
            z = mu + np.exp(logsigma) * eps
            restored = np.maximum(np.tanh(z @ w1 + b1) @ w2 + b2, 0) @ w3 + b3
            errors.append(((restored - images) ** 2).sum(1))
        kl = -0.5 * (1 + 2 * logsigma - mu**2 - np.exp(2 * logsigma)).sum(1)
        out[:, k] = np.mean(errors, 0) + beta * kl
    return out


def task_attention(tokens, patches, wq, wk, wv, wo, bo, heads, scale):
    (count, width), depth = tokens.shape, tokens.shape[1] // heads
    scale = 1 / np.sqrt(depth) if scale is None else scale
    out = np.zeros((len(patches), count, width))
    for b in range(len(patches)):
        for t in range(count):
            seen = np.stack([tokens[t], *patches[b]])
            mixed = []
            for h in range(heads):
                part = slice(h * depth, (h + 1) * depth)
                q, k, v = wq[part] @ tokens[t], seen @ wk[part].T, seen @ wv[part].T
                mixed.append(softmax(scale * (k @ q)) @ v)
            out[b, t] = wo @ np.concatenate(mixed) + bo
    return out


ORACLES = {
    "expert_attention": expert_attention,
    "dkf_fuse": dkf_fuse,
    "latent_distance": distance,
    "expansion_distances": expansion_distances,
    "elbo_loss": elbo_loss,
    "task_attention": task_attention,
}
CASES = [
    pytest.param(op, {**OPS[op].sizes[name], **({"gates": gates} if gates else {})}, id=f"{op}-{name}-{gates or ''}")
    for op in OPS
    for name in ("odd", "ones")
    for gates in (GATES[op == "dkf_fuse" :] if op in ("expert_attention", "dkf_fuse") else [None])
]


def to_numpy(x):
    if isinstance(x, list):
        return [to_numpy(y) for y in x]
    return x.numpy() if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("op, sizes", CASES)
def test_reference_is_the_equation(op, sizes):
    args = OPS[op].make(torch.Generator().manual_seed(3), **sizes)
    extra = [sizes["H"]] if op == "dkf_fuse" else []
    want = ORACLES[op](*map(to_numpy, args), *extra)
    got = OPS[op].reference(*args)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-11, atol=1e-12)


def test_log_sigma_is_clamped_at_both_ends():
    args = list(OPS["elbo_loss"].make(torch.Generator().manual_seed(0), **OPS["elbo_loss"].sizes["odd"]))
    args[1][7] = torch.linspace(-20, 20, args[1][7].numel(), dtype=torch.float64).view_as(args[1][7])
    want = elbo_loss(*map(to_numpy, args))
    np.testing.assert_allclose(OPS["elbo_loss"].reference(*args).numpy(), want, rtol=1e-11)
    np.testing.assert_allclose(OPS["elbo_loss"].function(*args).numpy(), want, rtol=1e-11)


@pytest.mark.parametrize("op", ["expansion_distances", "elbo_loss"])
def test_the_clamp_stops_gradients(op):
    args = OPS[op].make(torch.Generator().manual_seed(0), **OPS[op].sizes["odd"])
    args[1][7].copy_(torch.linspace(-20, 20, args[1][7].numel()).view_as(args[1][7]))
    grad = torch.randn_like(OPS[op].reference(*args))
    _, want = evaluate(OPS[op].reference, args, grad)
    assert (want[8] == 0).any() and (want[8] != 0).any()  # b_logsigma: clamped everywhere, and not
    with use_backend("torch"):
        _, got = evaluate(OPS[op].function, args, grad)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


def test_codes_that_coincide_have_distance_and_gradient_zero():
    codes = torch.zeros(2, 3, 4, dtype=torch.float64, requires_grad=True)
    latent_distance_reference(codes, torch.zeros(3, 4, dtype=torch.float64)).sum().backward()
    assert torch.equal(codes.grad, torch.zeros_like(codes))


def test_the_gradient_of_a_zero_gate_is_that_experts_output():
    features = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    gates = torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    dkf_fuse_reference(features, gates).sum().backward()
    torch.testing.assert_close(gates.grad, features.sum((0, 2, 3)))


def test_float16_runs_on_the_reference():
    for op in OPS.values():
        args = op.make(torch.Generator().manual_seed(1), **op.sizes["odd"])
        half = torch.utils._pytree.tree_map(
            lambda x: x.half() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, args
        )
        exact = op.reference(*args)
        assert (op.function(*half).double() - exact).norm() < 0.01 * exact.norm()
