"""The CUDA kernels of elbo_loss and expansion_distances, emulated, against the references in float64."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import pytest
import torch
from emulator import A100, TYPES, EmulatorError

from levit_kernels.elbo_loss import elbo_loss_reference
from levit_kernels.expansion_distances import expansion_distances_reference

PROCESSORS = {"mnist": 4, "odd": 1, "one": 1}  # few: one block of many warps; more: blocks of a warp each


class Layer(ctypes.Structure):
    _fields_ = [("weights", c_void_p), ("bias", c_void_p), ("inputs", c_int32), ("outputs", c_int32)]


class Call(ctypes.Structure):
    _fields_ = [
        ("images", c_void_p),
        ("layers", Layer * 7),
        *((name, c_void_p) for name in ("noise", "query", "out", "partial")),
        ("batch", c_int64),
        *((name, c_int32) for name in ("experts", "latent", "codes")),
        ("beta", c_float),
        *((name, c_int32) for name in ("type", "processors", "shared_bytes")),
    ]


def layers(experts, *shapes):
    return [x for n, m in shapes for x in (torch.randn(experts, n, m) / n**0.5, torch.randn(experts, m) * 0.1)]


SIZES = {  # B, K, F, h1, h2, L, g1, g2
    "mnist": (9, 2, 784, 200, 200, 50, 200, 200),
    "odd": (11, 2, 37, 19, 23, 5, 13, 67),
    "one": (1, 1, 1, 1, 1, 1, 1, 1),
}


def case(dtype, size):
    batch, experts, pixels, h1, h2, latent, g1, g2 = SIZES[size]
    encoder = layers(experts, (pixels, h1), (h1, h2), (h2, latent), (h2, latent))
    decoder = layers(experts, (latent, g1), (g1, g2), (g2, pixels))
    return torch.rand(batch, pixels).to(dtype), [x.to(dtype) for x in encoder], [x.to(dtype) for x in decoder]


def prepare(emulator, images, weights, noise, processors, shared_bytes=A100["shared_bytes"]):
    call = Call(emulator.upload(images))
    for i in range(0, len(weights), 2):
        w, b = weights[i : i + 2]
        call.layers[i // 2] = Layer(emulator.upload(w), emulator.upload(b), *w.shape[1:])
    call.noise, call.batch = emulator.upload(noise), len(images)
    call.experts, call.latent, call.codes = len(weights[0]), weights[4].shape[2], 1
    call.type, call.processors, call.shared_bytes = TYPES[images.dtype], processors, shared_bytes
    emulator.library.levit_expansion_distances_partials.restype = c_int64
    return call


def elbo(emulator, images, encoder, decoder, beta, noise, processors=1):
    call = prepare(emulator, images, encoder + decoder, noise, processors)
    call.codes, call.beta = 1 if noise is None else len(noise), beta
    shape = (call.batch, call.experts)
    call.out = emulator.allocate(shape, torch.float32)
    emulator.check(emulator.library.levit_elbo_loss(ctypes.byref(call), None))
    return emulator.download(call.out, shape, torch.float32)


def distances(emulator, images, encoder, query, noise, processors=1):
    call = prepare(emulator, images, encoder, noise, processors)
    call.query, call.out = emulator.upload(query), emulator.allocate((call.experts,), torch.float32)
    partials = emulator.library.levit_expansion_distances_partials(ctypes.byref(call))
    call.partial = emulator.allocate((call.experts, partials), torch.float32)
    emulator.check(emulator.library.levit_expansion_distances(ctypes.byref(call), None))
    return emulator.download(call.out, (call.experts,), torch.float32)


def widen(args):
    """The same arguments in float64."""
    return [
        [x.double() for x in a] if isinstance(a, list) else a.double() if isinstance(a, torch.Tensor) else a
        for a in args
    ]


def assert_accurate(out, reference, args):
    """At most twice the error of plain torch in the same precision."""
    expected = reference(*widen(args))
    allowed = 2 * (reference(*args).double() - expected).abs().max() + 1e-5 * expected.abs().max()
    assert (out.double() - expected).abs().max() <= allowed


@pytest.mark.parametrize("codes", [0, 1, 3], ids="{} codes".format)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_elbo_loss(emulator, size, dtype, codes):
    images, encoder, decoder = case(dtype, size)
    noise = torch.randn(codes, encoder[4].shape[2]).to(dtype) if codes else None
    args = (images, encoder, decoder, 0.5, noise)
    assert_accurate(elbo(emulator, *args, processors=PROCESSORS[size]), elbo_loss_reference, args)


@pytest.mark.parametrize("noisy", [True, False], ids=["sampled", "mean code"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_expansion_distances(emulator, size, dtype, noisy):
    images, encoder, _ = case(dtype, size)
    batch, experts, latent = len(images), len(encoder[0]), encoder[4].shape[2]
    noise = torch.randn(experts, batch, latent).to(dtype) if noisy else None
    args = (images, encoder, torch.randn(batch, latent).to(dtype), noise)
    out = distances(emulator, *args, processors=PROCESSORS[size])
    assert_accurate(out, expansion_distances_reference, args)


def test_many_small_blocks(emulator):
    images, encoder, decoder = case(torch.float32, "odd")
    args = (images, encoder, decoder, 0.5, None)
    assert_accurate(elbo(emulator, *args, processors=108), elbo_loss_reference, args)
    args = (images, encoder, torch.randn(11, 5), None)
    assert_accurate(distances(emulator, *args, processors=108), expansion_distances_reference, args)


def test_clamped_log_sigma_and_nan(emulator):
    images, encoder, decoder = case(torch.float32, "odd")
    encoder[7][:, 0], encoder[7][:, 1] = 100, -100
    args = (images, encoder, decoder, 0.5, torch.randn(2, 5))
    assert_accurate(elbo(emulator, *args), elbo_loss_reference, args)
    images[3, 2] = torch.nan
    out = elbo(emulator, *args)
    assert out[3].isnan().all() and not out[[*range(3), *range(4, 11)]].isnan().any()


def test_what_no_block_can_hold_is_refused(emulator):
    images, encoder, decoder = case(torch.float32, "mnist")
    assert emulator.library.levit_vae_fits(ctypes.byref(prepare(emulator, images, encoder + decoder, None, 1))) == 1
    call = prepare(emulator, images, encoder + decoder, None, 1, shared_bytes=16 << 10)
    assert emulator.library.levit_vae_fits(ctypes.byref(call)) == 0
    assert emulator.library.levit_elbo_loss(ctypes.byref(call), None) == -1


@pytest.mark.parametrize("seed", range(5))
def test_schedules(emulator, seed):
    emulator.schedule(seed)
    images, encoder, decoder = case(torch.float32, "odd")
    args = (images, encoder, decoder, 0.5, torch.randn(2, 5))
    assert_accurate(elbo(emulator, *args), elbo_loss_reference, args)
    args = (images, encoder, torch.randn(11, 5), torch.randn(2, 11, 5))
    assert_accurate(distances(emulator, *args), expansion_distances_reference, args)


def test_every_barrier_and_wait_is_needed(emulator):
    """Each is switched off in its turn: the emulator must object, or the numbers must be wrong."""
    images, encoder, decoder = case(torch.float32, "odd")
    of_elbo = (images, encoder, decoder, 0.5, torch.randn(2, 5))
    of_distances = (images, encoder, torch.randn(11, 5), torch.randn(2, 11, 5))
    runs = ((elbo, elbo_loss_reference, of_elbo), (distances, expansion_distances_reference, of_distances))
    for run, _, args in runs:
        run(emulator, *args)
    switches = emulator.switches("vae.cuh")
    assert len(switches) == 4
    for number, name in switches.items():
        emulator.switch_off(number)
        with pytest.raises((EmulatorError, AssertionError)):
            for run, reference, args in runs:
                assert_accurate(run(emulator, *args), reference, args)
            pytest.fail(f"nobody misses {name}", pytrace=False)
