"""How much the work needs at least: floating-point operations and bytes of memory traffic, counted from the sizes.

A multiply-add counts as two operations. Bytes count what cannot stay in a cache between two uses: each weight and each
stored feature once per pass over it. Both are per call, in fp32, and the same for every implementation: an
implementation that recomputes or rereads does not earn a better share of a ceiling by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from levit import LEViTConfig

FLOAT = 4
BACKWARD = 2  # gradients of inputs and of weights: each costs as much as the forward pass
ADAM_PASSES = 7  # reads parameter, gradient and two moments; writes parameter and two moments


@dataclass(frozen=True)
class Work:
    """Operations and bytes; adds up and scales."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __sub__(self, other: Work) -> Work:
        return Work(self.flops - other.flops, self.bytes - other.bytes)

    def __mul__(self, times: float) -> Work:
        return Work(self.flops * times, self.bytes * times)

    __rmul__ = __mul__

    def seconds(self, gflops: float, gbs: float) -> float:
        """The floor: operations at the peak, then bytes at the bandwidth (ceilings in GFLOP/s and GB/s)."""
        return self.flops / gflops / 1e9 + self.bytes / gbs / 1e9


def layers(*sizes: int) -> int:
    """Weights of a chain of linear layers."""
    return sum(a * b for a, b in zip(sizes, sizes[1:], strict=False))


def attention_weights(cfg: LEViTConfig) -> int:
    """Weights of one expert's patch embedding and its three maps (equations 2 and 3)."""
    return cfg.patch_dim * cfg.embed_dim + 3 * cfg.embed_dim * cfg.feature_dim


def attention_flops(cfg: LEViTConfig) -> int:
    """Equations 2-4 of one expert for one image."""
    tokens = cfg.num_patches
    return 2 * tokens * attention_weights(cfg) + 4 * tokens * tokens * cfg.feature_dim


def feature_bytes(cfg: LEViTConfig) -> int:
    """One expert's stored output for one image, fp32."""
    return cfg.num_patches * cfg.feature_dim * FLOAT


def encoder_weights(cfg: LEViTConfig) -> int:
    """Weights of one VAE's encoder, both its outputs included."""
    return layers(_pixels(cfg), *cfg.vae_hidden, 2 * cfg.latent_dim)


def vae_weights(cfg: LEViTConfig) -> int:
    """Weights of one VAE."""
    return encoder_weights(cfg) + layers(cfg.latent_dim, *cfg.vae_hidden, _pixels(cfg))


def head_weights(cfg: LEViTConfig) -> int:
    """Weights of one classifier."""
    return layers(cfg.num_patches * cfg.feature_dim, *cfg.head_hidden, cfg.num_classes)


def step(cfg: LEViTConfig, experts: int, updates: int, batch: int) -> Work:
    """One Algorithm 1 step with a full memory: `batch` new images enter it, `updates` updates, one check.

    Frozen features and codes are stored, so what K costs is reading them (the features twice: once to fuse, once for
    the gradient of the gates) and running the frozen experts on the new images.
    """
    frozen = experts - 1
    stored = batch * frozen * Work(flops=attention_flops(cfg) + 2 * encoder_weights(cfg))
    stored += frozen * Work(bytes=FLOAT * (attention_weights(cfg) + encoder_weights(cfg)))
    return updates * _update(cfg, frozen) + _check(cfg, frozen) + stored


def routed_inference(cfg: LEViTConfig, experts: int, routes: list[int]) -> Work:
    """Prediction for images with these routes: every VAE's loss, the experts up to the chosen one, one head each."""
    scores = experts * Work(2 * len(routes) * vae_weights(cfg), FLOAT * vae_weights(cfg))
    features = Work(
        sum(route + 1 for route in routes) * attention_flops(cfg),
        (max(routes) + 1) * FLOAT * attention_weights(cfg),
    )
    heads = Work(2 * len(routes) * head_weights(cfg), len(set(routes)) * FLOAT * head_weights(cfg))
    return scores + features + heads


def _update(cfg: LEViTConfig, frozen: int) -> Work:
    rows = cfg.train_batch
    weights = attention_weights(cfg) + head_weights(cfg) + vae_weights(cfg)
    forward = attention_flops(cfg) + 2 * (head_weights(cfg) + vae_weights(cfg))
    # Nobody needs the gradient of the images.
    saved = 2 * (cfg.num_patches * cfg.patch_dim * cfg.embed_dim + _pixels(cfg) * cfg.vae_hidden[0])
    own = Work(rows * ((1 + BACKWARD) * forward - saved), ADAM_PASSES * FLOAT * weights)
    per_feature = feature_bytes(cfg) / FLOAT
    return own + rows * frozen * Work(flops=2 * 2 * per_feature, bytes=2 * feature_bytes(cfg))


def _check(cfg: LEViTConfig, frozen: int) -> Work:
    """Only the active VAE draws anew: its codes of the whole memory, then their distance to the stored ones."""
    codes = cfg.memory_size * cfg.latent_dim
    active = Work(2 * cfg.memory_size * encoder_weights(cfg), cfg.memory_size * _pixels(cfg) * FLOAT)
    return active + frozen * Work(3 * codes, codes * FLOAT)


def _pixels(cfg: LEViTConfig) -> int:
    return cfg.channels * cfg.image_size**2
