"""How far from the float64 oracle a result may be: twice as far as plain torch in the same precision, plus a little."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass
class Measure:
    """The errors of plain torch, each the worst over several draws: of a few numbers, one draw may be exact by luck."""

    dtype: torch.dtype
    rms: float = 0.0
    worst: float = 0.0
    turn: float = 0.0
    bias: float = 0.0

    def include(self, plain: torch.Tensor, oracle: torch.Tensor) -> None:
        plain = plain.double()
        self.rms = max(self.rms, _rms(plain - oracle))
        self.worst = max(self.worst, _worst(plain - oracle))
        self.turn = max(self.turn, _turn(plain, oracle))
        self.bias = max(self.bias, abs(_bias(plain, oracle)))

    def allow(self, plain: float, little: float) -> float:
        """Plain float64 torch is its own oracle, so that only the little remains there: then it is not so little."""
        return 2 * plain + (16 if self.dtype == torch.float64 else 1) * little


def assert_close(what: str, got: torch.Tensor, oracle: torch.Tensor, measure: Measure) -> None:
    """`got` against `oracle` (float64) in root mean square and at the worst entry."""
    assert got.shape == oracle.shape, f"{what}: shape {list(got.shape)}, expected {list(oracle.shape)}"
    assert got.dtype == measure.dtype, f"{what}: {got.dtype}, expected {measure.dtype}"
    assert torch.equal(got.isnan(), oracle.isnan()), f"{what}: NaN in other places than the oracle"
    eps, error = torch.finfo(got.dtype).eps, got.double() - oracle
    for name, size, plain, allowance in (("rms", _rms, measure.rms, 4), ("worst", _worst, measure.worst, 16)):
        bound = measure.allow(plain, allowance * eps * size(oracle))
        assert size(error) <= bound, f"{what}: {name} error {size(error):.3g} > {bound:.3g} (plain torch {plain:.3g})"


def assert_unbiased(what: str, got: torch.Tensor, oracle: torch.Tensor, measure: Measure) -> None:
    """Direction and signed bias of a gradient: an error that shrinks or turns it hurts training."""
    if got.numel() < 16:
        return  # so few numbers have no direction that chance could not turn; assert_close holds them one by one
    eps, got = torch.finfo(got.dtype).eps, got.double()
    bound = measure.allow(measure.turn, 16 * eps**2) + 1e-14
    assert _turn(got, oracle) <= bound, f"{what}: 1 - cosine {_turn(got, oracle):.3g} > {bound:.3g}"
    bound = measure.allow(measure.bias, 4 * eps)
    assert abs(_bias(got, oracle)) <= bound, f"{what}: signed bias {_bias(got, oracle):.3g} > {bound:.3g}"


def _rms(x: torch.Tensor) -> float:
    return float(x.nan_to_num().square().mean().sqrt()) if x.numel() else 0.0


def _worst(x: torch.Tensor) -> float:
    return float(x.nan_to_num().abs().max()) if x.numel() else 0.0


def _turn(x: torch.Tensor, oracle: torch.Tensor) -> float:
    """1 - cosine, from the part of x across the oracle: exact where the cosine itself would round to one."""
    if not oracle.any():
        return 0.0
    along = oracle * ((x * oracle).sum() / oracle.square().sum())
    return float(0.5 * (x - along).square().sum() / x.square().sum().clamp(min=1e-300))


def _bias(x: torch.Tensor, oracle: torch.Tensor) -> float:
    return float(((x - oracle) * oracle.sign()).mean() / oracle.abs().mean()) if oracle.any() else 0.0


def assert_fuzzy(
    what: str,
    got: torch.Tensor,
    oracle: torch.Tensor,
    dtype: torch.dtype,
    scale: float = 0.1,
    plain: Callable[[], torch.Tensor] | None = None,
) -> None:
    """For random small cases, where plain torch's own error is too lucky a measure: eps of the coarsest argument.

    `scale` is how large the numbers are that are summed, which may cancel. `plain` gives what plain torch makes of the
    same numbers: where they are so badly conditioned that it is far off too, twice its error is allowed.
    """
    assert got.shape == oracle.shape, f"{what}: shape {list(got.shape)}, expected {list(oracle.shape)}"
    if got.numel():
        eps = max(torch.finfo(dtype).eps, torch.finfo(got.dtype).eps)
        error, bound = _worst(got.double() - oracle), 40 * eps * max(_worst(oracle), scale)
        if error > bound and plain is not None:
            bound = max(bound, 2 * _worst(plain().double() - oracle))
        assert error <= bound, f"{what}: error {error:.3g} > {bound:.3g}"
        assert not got.isnan().any(), f"{what}: NaN"
