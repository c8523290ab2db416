"""The CUDA kernels of elbo_loss and expansion_distances, emulated, against the references in float64."""

import pytest
import torch
from emulator import DTYPES, EmulatorError

from levit_kernels.cuda import vae as cuda
from levit_kernels.elbo_loss import elbo_loss_reference
from levit_kernels.expansion_distances import expansion_distances_reference

PROCESSORS = {"mnist": 4, "odd": 1, "one": 1}  # few: one block of many warps; more: blocks of a warp each


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
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_elbo_loss(emulator, size, dtype, codes):
    emulator.processors = PROCESSORS[size]
    images, encoder, decoder = case(dtype, size)
    noise = torch.randn(codes, encoder[4].shape[2]).to(dtype) if codes else None
    args = (images, encoder, decoder, 0.5, noise)
    assert_accurate(cuda.elbo_loss(*args), elbo_loss_reference, args)


@pytest.mark.parametrize("noisy", [True, False], ids=["sampled", "mean code"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_expansion_distances(emulator, size, dtype, noisy):
    emulator.processors = PROCESSORS[size]
    images, encoder, _ = case(dtype, size)
    batch, experts, latent = len(images), len(encoder[0]), encoder[4].shape[2]
    noise = torch.randn(experts, batch, latent).to(dtype) if noisy else None
    args = (images, encoder, torch.randn(batch, latent).to(dtype), noise)
    out = cuda.expansion_distances(*args)
    assert_accurate(out, expansion_distances_reference, args)


def test_many_small_blocks(emulator):
    emulator.processors = 108
    images, encoder, decoder = case(torch.float32, "odd")
    args = (images, encoder, decoder, 0.5, None)
    assert_accurate(cuda.elbo_loss(*args), elbo_loss_reference, args)
    args = (images, encoder, torch.randn(11, 5), None)
    assert_accurate(cuda.expansion_distances(*args), expansion_distances_reference, args)


def test_clamped_log_sigma_and_nan(emulator):
    images, encoder, decoder = case(torch.float32, "odd")
    encoder[7][:, 0], encoder[7][:, 1] = 100, -100
    args = (images, encoder, decoder, 0.5, torch.randn(2, 5))
    assert_accurate(cuda.elbo_loss(*args), elbo_loss_reference, args)
    images[3, 2] = torch.nan
    out = cuda.elbo_loss(*args)
    assert out[3].isnan().all() and not out[[*range(3), *range(4, 11)]].isnan().any()


def test_what_no_block_can_hold_is_refused(emulator):
    images, encoder, decoder = case(torch.float32, "mnist")
    args = (images, encoder, decoder, 0.5, None)
    assert cuda.refuse("elbo_loss", args) is None
    emulator.shared_bytes = 16 << 10
    assert cuda.refuse("elbo_loss", args) == "no block can hold layers of 200, 200, 50, 50, 200, 200, 784"
    with pytest.raises(RuntimeError, match="no block can hold these sizes"):
        cuda.elbo_loss(*args)


@pytest.mark.parametrize("seed", range(5))
def test_schedules(emulator, seed):
    emulator.schedule(seed)
    images, encoder, decoder = case(torch.float32, "odd")
    args = (images, encoder, decoder, 0.5, torch.randn(2, 5))
    assert_accurate(cuda.elbo_loss(*args), elbo_loss_reference, args)
    args = (images, encoder, torch.randn(11, 5), torch.randn(2, 11, 5))
    assert_accurate(cuda.expansion_distances(*args), expansion_distances_reference, args)


def test_every_barrier_and_wait_is_needed(emulator):
    """Each is switched off in its turn: the emulator must object, or the numbers must be wrong."""
    images, encoder, decoder = case(torch.float32, "odd")
    of_elbo = (images, encoder, decoder, 0.5, torch.randn(2, 5))
    of_distances = (images, encoder, torch.randn(11, 5), torch.randn(2, 11, 5))
    runs = (
        (cuda.elbo_loss, elbo_loss_reference, of_elbo),
        (cuda.expansion_distances, expansion_distances_reference, of_distances),
    )
    for run, _, args in runs:
        run(*args)
    switches = emulator.switches("vae.cuh")
    assert len(switches) == 4
    for number, name in switches.items():
        emulator.switch_off(number)
        with pytest.raises((EmulatorError, AssertionError)):
            for run, reference, args in runs:
                assert_accurate(run(*args), reference, args)
            pytest.fail(f"nobody misses {name}", pytrace=False)
