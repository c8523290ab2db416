"""A small DyTox, its tasks, and its equations once more in NumPy."""

import math

import numpy as np
import torch

from levit import DyTox, DyToxConfig


def small(**overrides):
    """Sizes that are quick in float64: 16 patches, 4 heads of width 3."""
    fields = dict(
        image_size=8,
        patch_size=2,
        embed_dim=12,
        num_heads=4,
        depth=2,
        mlp_ratio=2.0,
        num_classes=7,
        first_classes=3,
        classes_per_task=2,
        epochs=2,
        finetune_epochs=1,
        warmup_epochs=1,
        batch_size=8,
        learning_rate=1e-2,
        finetune_learning_rate=1e-2,
        memory_size=20,
        seed=3,
    )
    return DyToxConfig(**(fields | overrides))


def build(classes=(3, 2), cfg=None, dtype=torch.float64):
    """A model with tasks of these sizes, all weights away from their initial values."""
    model = DyTox(cfg or small()).to(dtype)
    for count in classes:
        model.add_task(count)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return model


def random_images(count, dtype=torch.float64, seed=5, size=8):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )


def task(old, new, count=12, seed=0):
    """Images and labels of a task with `new` classes after `old` ones, each class at least once."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.arange(new), torch.randint(new, (count - new,), generator=generator)]) + old
    return torch.randint(256, (count, 3, 8, 8), generator=generator, dtype=torch.uint8), labels


def images_of(labels, generator):
    """Noise, and a bright corner in a colour: every label from 0 to 7 has its own."""
    images = 0.3 * torch.rand(len(labels), 3, 8, 8, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = label % 2, label // 2
        image[label % 3, 4 * row : 4 * row + 4, 2 * column : 2 * column + 2] += 0.6
    return images


def batches(labels, count, seed=0, size=8):
    """`count` batches of these labels."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        drawn = torch.tensor(labels)[torch.randint(len(labels), (size,), generator=generator)]
        yield images_of(drawn, generator), drawn


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Oracle:
    """DyTox image by image, head by head and token by token, from a state_dict."""

    def __init__(self, model):
        self.cfg = model.cfg
        self.state = {key: value.double().numpy() for key, value in model.state_dict().items()}
        self.tasks = model.num_tasks

    def linear(self, name, x):
        bias = self.state.get(f"{name}.bias", 0)
        return x @ self.state[f"{name}.weight"].T + bias

    def norm(self, name, x):
        mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / np.sqrt(var + 1e-5) * self.state[f"{name}.weight"] + self.state[f"{name}.bias"]

    def mlp(self, name, x):
        hidden = self.linear(f"{name}.fc1", x)
        hidden = 0.5 * hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
        return self.linear(f"{name}.fc2", hidden)

    def gpsa(self, name, x):
        """x [N, D] of one image."""
        (count, width), heads = x.shape, self.cfg.num_heads
        depth, side = width // heads, math.isqrt(count)
        qk, v = self.linear(f"{name}.qk", x), self.linear(f"{name}.v", x)
        offsets = np.array([[(j % side - i % side, j // side - i // side) for j in range(count)] for i in range(count)])
        square = (offsets**2).sum(-1, keepdims=True)
        position = self.linear(f"{name}.pos_proj", np.concatenate([offsets, square], -1))
        mixed = []
        for h in range(heads):
            part = slice(h * depth, (h + 1) * depth)
            q, k = qk[:, part], qk[:, width:][:, part]
            gate = 1 / (1 + np.exp(-self.state[f"{name}.gating_param"][h]))
            attention = (1 - gate) * softmax(q @ k.T / np.sqrt(depth)) + gate * softmax(position[..., h])
            mixed.append((attention / attention.sum(-1, keepdims=True)) @ v[:, part])
        return self.linear(f"{name}.proj", np.concatenate(mixed, 1))

    def mhsa(self, name, x):
        width, heads = x.shape[1], self.cfg.num_heads
        qkv, depth = self.linear(f"{name}.qkv", x), width // heads
        mixed = []
        for h in range(heads):
            q, k, v = (qkv[:, i * width + h * depth : i * width + (h + 1) * depth] for i in range(3))
            mixed.append(softmax(q @ k.T / np.sqrt(depth)) @ v)
        return self.linear(f"{name}.proj", np.concatenate(mixed, 1))

    def task_attention(self, token, patches):
        seen = np.concatenate([token[None], patches])
        q, k, v = (self.linear(f"tabs.0.attn.{n}", x) for n, x in (("q", token), ("k", seen), ("v", seen)))
        depth, mixed = len(token) // self.cfg.num_heads, []
        for h in range(self.cfg.num_heads):
            part = slice(h * depth, (h + 1) * depth)
            mixed.append(softmax(k[:, part] @ q[part] / np.sqrt(depth)) @ v[:, part])
        return self.linear("tabs.0.attn.proj", np.concatenate(mixed))

    def encode(self, image):
        """[C, S, S] in [0, 1] -> [N, D]."""
        cfg, p = self.cfg, self.cfg.patch_size
        mean, std = (np.float32(x).astype(float)[:, None, None] for x in (cfg.mean, cfg.std))  # made in float32
        image = (image - mean) / std
        weight, bias = self.state["patch_embed.proj.weight"], self.state["patch_embed.proj.bias"]
        side = cfg.image_size // p
        parts = [image[:, i * p : (i + 1) * p, j * p : (j + 1) * p] for i in range(side) for j in range(side)]
        x = np.array([(weight * part).sum((1, 2, 3)) for part in parts]) + bias + self.state["pos_embed"][0]
        for i in range(cfg.depth):
            attend = self.gpsa if cfg.attention == "gpsa" else self.mhsa
            x = x + attend(f"sabs.{i}.attn", self.norm(f"sabs.{i}.norm1", x))
            x = x + self.mlp(f"sabs.{i}.mlp", self.norm(f"sabs.{i}.norm2", x))
        return x

    def embedding(self, token, patches):
        normed = self.norm("tabs.0.norm1", np.concatenate([token[None], patches]))
        token = token + self.task_attention(normed[0], normed[1:])
        return token + self.mlp("tabs.0.mlp", self.norm("tabs.0.norm2", token))

    def embeddings(self, image):
        patches = self.encode(image)
        return [self.embedding(self.state[f"task_tokens.{t}"][0, 0], patches) for t in range(self.tasks)]

    def classifier(self, name, x):
        return self.linear(f"{name}.head", self.norm(f"{name}.norm", x))

    def logits(self, image):
        return np.concatenate([self.classifier(f"head.{t}", x) for t, x in enumerate(self.embeddings(image))])

    def divergence(self, image):
        return self.classifier("head_div", self.embeddings(image)[-1])
