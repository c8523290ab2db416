"""One expert's parameters: patch embedding, self-attention, classifier, gates and VAE. The equations use them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from levit.config import LEViTConfig
from levit.vae import NEGATIVE_SLOPE, build_vae
from levit_kernels.head_training import head_training_loss
from levit_kernels.move_statistics import move_statistics


class Expert(nn.Module):
    """The raw parameters of expert k; packed and folded weights are derived from these and never saved.

    - `embed` E_k, e_k of equation 2 (rows of `embed.weight` are tokens' channels), `norm` its batch norm over tokens;
    - `qkv` the maps of equation 3; outputs are ordered (query | key | value, head, channel);
    - `position` [N, Q] and `out_proj`, where the configuration asks for them;
    - in place of all these, where the expert is an MLP: its two layers `hidden`;
    - `head` the classifier of equations 5 and 9;
    - `gates` the logits a of equation 7, only where gating is learned: [k + 1] or [k + 1, H]; one fewer where the own
      features stand beside the gated ones (none for the first expert);
    - `vae`.
    """

    def __init__(self, cfg: LEViTConfig, k: int) -> None:
        super().__init__()
        if cfg.expert == "vit":
            self.embed = nn.Linear(cfg.patch_dim, cfg.embed_dim)
            self.norm = nn.BatchNorm1d(cfg.embed_dim)
            self.qkv = nn.Linear(cfg.embed_dim, 3 * cfg.feature_dim)
            if cfg.pos_embed:
                self.position = nn.Parameter(0.02 * torch.randn(cfg.num_tokens, cfg.embed_dim))
            if cfg.out_proj:
                self.out_proj = nn.Linear(cfg.feature_dim, cfg.feature_dim, bias=False)  # the head has one
        else:
            pixels, width = cfg.channels * cfg.image_size**2, cfg.dnn_width
            self.hidden = nn.ModuleList([nn.Linear(pixels, width), nn.Linear(width, width)])
        self.head = Head(cfg.num_tokens * cfg.fused_dim, cfg.head_hidden, cfg.num_classes)
        gated = k + 1 if cfg.fusion == "sum" else k
        if cfg.gating == "learned" and gated:
            shape = (gated,) if cfg.gate_per == "expert" else (gated, cfg.num_heads)
            self.gates = nn.Parameter(torch.zeros(shape))
        self.vae = build_vae(cfg)

    @classmethod
    def create(cls, cfg: LEViTConfig, k: int, like: Tensor | None = None) -> Expert:
        """Expert k, freshly initialised from (cfg.seed, k); the global RNG is left as it was.

        Args:
            cfg: configuration.
            k: 0-based number; decides the seed and how many gates there are.
            like: a tensor whose dtype and device the expert takes.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(cfg.seed * 1_000_003 + k)
            expert = cls(cfg, k)
        return expert if like is None else expert.to(like.device, like.dtype)

    def attention_parameters(self) -> list[Tensor]:
        """As `levit_kernels.expert_training` takes them."""
        return [self.embed.weight, self.norm.weight, self.norm.bias, self.qkv.weight, self.qkv.bias]

    def freeze(self) -> None:
        """Frozen for good: no gradients, evaluation mode."""
        self.requires_grad_(False)
        self.eval()


class Head(nn.Module):
    """The classifier: (Linear → batch norm → LeakyReLU) per hidden size, then Linear (equation 5)."""

    def __init__(self, inputs: int, hidden: tuple[int, ...], classes: int) -> None:
        super().__init__()
        sizes = [inputs, *hidden]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False))
        self.norms = nn.ModuleList(nn.BatchNorm1d(b) for b in hidden)
        self.out = nn.Linear(sizes[-1], classes)

    def forward(self, fused: Tensor, batch_statistics: bool = False) -> Tensor:
        """M̃ [B, N, E], flattened row-major → logits [B, classes]."""
        x = fused.flatten(1)
        for linear, norm in self.layers():
            x = nn.functional.leaky_relu(linear_norm(linear, norm, x, batch_statistics), NEGATIVE_SLOPE)
        return self.out(x)

    def training_loss(self, fused: Tensor, labels: Tensor, bf16: bool = False) -> Tensor:
        """Mean cross-entropy of the images with a label, [B, N, E] and [B] → scalar, as `forward` has it with batch
        statistics. The running ones move.
        """
        epsilon = self.norms[0].eps if len(self.norms) else 1e-5
        loss, *statistics = head_training_loss(
            fused.flatten(1), labels, self.training_weights(), NEGATIVE_SLOPE, epsilon, bf16
        )
        move_running(list(self.layers()), statistics, [len(fused)] * len(self.norms))
        return loss

    def training_weights(self) -> list[Tensor]:
        """As `levit_kernels.head_training` takes them."""
        hidden = [w for linear, norm in self.layers() for w in (linear.weight, norm.weight, norm.bias)]
        return [*hidden, self.out.weight, self.out.bias]

    def layers(self) -> Iterator[tuple[nn.Linear, nn.BatchNorm1d]]:
        """The hidden layers, each with its batch norm."""
        return zip(self.hidden, self.norms, strict=True)


def move_running(
    layers: Sequence[tuple[nn.Linear, nn.BatchNorm1d]], statistics: Sequence[Tensor], rows: Sequence[int]
) -> None:
    """All layers' running statistics towards those of a batch: layer by layer mean, which knows of no bias, and biased
    variance of so many rows.
    """
    if layers:
        norms = [norm for _, norm in layers]
        buffers = [(x.running_mean, x.running_var, x.num_batches_tracked) for x in norms]
        biases = [linear.bias for linear, _ in layers]
        move_statistics(*zip(*buffers, strict=True), biases, statistics, rows, norms[0].momentum)


def linear_norm(linear: nn.Linear, norm: nn.BatchNorm1d, x: Tensor, batch_statistics: bool) -> Tensor:
    """BN(x·W + b) over rows, [rows, in] → [rows, out]; the mode is an argument, not `.training`.

    With batch statistics the running ones move, and b gets no gradient: the batch mean takes b out again, so its exact
    gradient is zero, and Adam would scale the rounding errors in its place up to full steps.
    """
    if batch_statistics:
        norm.num_batches_tracked.add_(1)
    embedded = nn.functional.linear(x, linear.weight, linear.bias.detach() if batch_statistics else linear.bias)
    return nn.functional.batch_norm(
        embedded, norm.running_mean, norm.running_var, norm.weight, norm.bias, batch_statistics, norm.momentum, norm.eps
    )
