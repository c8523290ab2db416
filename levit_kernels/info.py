"""`python -m levit_kernels.info`: what is installed, what this machine has, and who computes each op, and why."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator

import torch

from . import __version__, _vae, native
from .backends.registry import ENVIRONMENT, backends, choose, forced


def main() -> None:
    """Prints the report."""
    for title, lines in sections():
        print(title)
        for line in lines:
            print(f"  {line}")
        print()


def sections() -> Iterator[tuple[str, list[str]]]:
    """(title, lines) of the report."""
    yield "versions", _versions()
    yield "build", [f"{key}: {value}" for key, value in native.build_info().items()] + [native.available()[1]]
    yield "machine", _machine()
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    for device in devices:
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            yield f"ops on {device}, {str(dtype).removeprefix('torch.')}", _table(device, dtype)


def sample_arguments(device: str, dtype: torch.dtype) -> dict[str, tuple]:
    """Small valid arguments of every op, by which backends are asked whether they take it."""
    batch, length, pixels, experts, width, heads, depth, latent, hidden = 2, 4, 9, 3, 8, 2, 5, 6, 7
    sizes = {"K": experts, "F": pixels, "L": latent, "h1": hidden, "h2": hidden, "g1": hidden, "g2": hidden}

    def new(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=device, dtype=dtype)

    def weights(patterns: dict[str, str]) -> list[torch.Tensor]:
        return [new(*(sizes[letter] for letter in pattern.split())) for pattern in patterns.values()]

    encoder, decoder = weights(_vae.ENCODER), weights(_vae.DECODER)
    expert = (new(experts, pixels, width), new(experts, width))
    expert += (new(experts, width, 3, heads, depth), new(experts, 3, heads, depth))
    fold = (new(width, pixels), new(width), new(width), new(width))
    index = torch.zeros(batch, dtype=torch.int64, device=device)
    return {
        "expert_attention": (new(batch, length, pixels), *expert, None, 0.2),
        "dkf_fuse": (new(batch, experts, length, heads * depth), new(experts), index),
        "latent_distance": (new(experts, batch, latent), new(batch, latent)),
        "expansion_distances": (new(batch, pixels), encoder, new(batch, latent), new(experts, batch, latent)),
        "elbo_loss": (new(batch, pixels), encoder, decoder, 0.5, None),
        "vae_codes": (new(batch, pixels), encoder, new(experts, batch, latent)),
        "vae_training_loss": (
            new(batch, pixels),
            [x[0].mT if x.dim() == 3 else x[0] for x in (*encoder, *decoder)],
            0.5,
            new(batch, latent),
        ),
        "strided_conv": (new(batch, length, length, pixels), new(width, pixels, 3, 3), new(width)),
        "transposed_conv": (new(batch, length, length, width), new(width, pixels, 4, 4), new(pixels)),
        "head_training_loss": (new(batch, width), index, [new(hidden, width), new(hidden)], 0.2, 1e-5),
        "expert_training_loss": (
            new(batch, length, pixels),
            index,
            [*fold[:3], new(3 * heads * depth, width), new(3 * heads * depth)],
            [new(hidden, length * heads * depth), new(hidden)],
            heads,
            new(experts + 1),
            new(batch, experts, length, heads * depth),
            index,
            0.2,
            1e-5,
        ),
        "batch_norm_fold": (new(batch, pixels), *fold, (new(width), new(width), index[0]), 0.1, 1e-5),
        "position_noise": (index, index, latent, 0, dtype),
        "task_attention": (
            new(experts, width),
            new(batch, length, width),
            *(new(width, width) for _ in range(4)),
            new(width),
            heads,
            None,
        ),
    }


def _table(device: str, dtype: torch.dtype) -> list[str]:
    lines = []
    for op, args in sample_arguments(device, dtype).items():
        chosen = _attempt(lambda op=op, args=args: choose(op, args).name)
        lines.append(f"{op}: {chosen}")
        for backend in backends().values():
            reason = backend.reason_against(op, args)
            if reason is None:
                reason = ": ".join(filter(None, ["takes it", backend.explain(op, args)]))
            lines.append(f"  {backend.name:<10}{reason}")
    return lines


def _attempt(question: Callable[[], str]) -> str:
    """The answer, or the error that stands in its place (a forced backend that cannot run)."""
    try:
        return question()
    except (RuntimeError, ValueError) as error:
        return f"none ({error})"


def _versions() -> list[str]:
    return [
        f"levit_kernels {__version__}",
        f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}, HIP {torch.version.hip or 'none'}",
        f"Triton {_version('triton') or 'none'}",
        f"Python {platform.python_version()}, {platform.platform()}",
        f"{ENVIRONMENT}: {_attempt(lambda: str(forced() or 'not set'))}",
    ]


def _version(package: str) -> str | None:
    """Of an installed distribution; it is not imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _machine() -> list[str]:
    features = ("avx2", "avx512", "avx512_bf16", "avx512_vnni", "amx_tile")
    found = [name for name in features if getattr(torch.cpu, f"_is_{name}_supported", lambda: False)()]
    lines = [
        f"{platform.machine()}, torch uses {torch.backends.cpu.get_cpu_capability()}; has {', '.join(found) or 'none'}",
        f"{os.cpu_count()} logical CPUs, torch runs {torch.get_num_threads()} threads",
        f"oneDNN {'on' if torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled else 'off'}, "
        f"MKL {'on' if torch.backends.mkl.is_available() else 'off'}",
    ]
    if not torch.cuda.is_available():
        return [*lines, "no CUDA device"]
    for i in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(i)
        lines.append(f"cuda:{i} {device.name}, sm_{device.major}{device.minor}, {device.total_memory >> 20} MiB")
    return lines


if __name__ == "__main__":
    main()
