"""LEViT's equations once more, in NumPy float64 and explicit loops, from a state_dict: nothing shared with levit."""

import numpy as np


def leaky_relu(x):
    return np.where(x > 0, x, 0.2 * x)


def standardise(x, mean, var, weight, bias):
    return (x - mean) / np.sqrt(var + 1e-5) * weight + bias


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Oracle:
    """One model's parameters and what SPEC.md says to compute with them; images are [B, C, S, S] arrays."""

    def __init__(self, model):
        self.cfg = model.cfg
        self.num_experts = model.num_experts
        self.parameters = {key: value.detach().double().numpy() for key, value in model.state_dict().items()}

    def __call__(self, k, name):
        return self.parameters[f"experts.{k}.{name}"]

    def patches(self, image):
        """Equation 1 for one image [C, S, S]: [N, P²C]."""
        p, rows = self.cfg.patch_size, []
        for top in range(0, image.shape[1], p):
            for left in range(0, image.shape[2], p):
                rows.append(image[:, top : top + p, left : left + p].reshape(-1))
        return np.array(rows)

    def tokens(self, k, images, batch_statistics=False):
        """Equation 2: [B, N, Q]."""
        z = np.array([self.patches(image) for image in images]) @ self(k, "embed.weight").T + self(k, "embed.bias")
        mean, var = self(k, "norm.running_mean"), self(k, "norm.running_var")
        if batch_statistics:
            mean, var = z.mean((0, 1)), z.var((0, 1))
        return leaky_relu(standardise(z, mean, var, self(k, "norm.weight"), self(k, "norm.bias")))

    def self_attention(self, k, z):
        """Equations 3 and 4 for one image's tokens [N, Q]: [N, H·d]."""
        heads, width = self.cfg.num_heads, self.cfg.head_dim
        weight = self(k, "qkv.weight").reshape(3, heads, width, -1)
        bias = self(k, "qkv.bias").reshape(3, heads, width)
        outputs = []
        for h in range(heads):
            q, key, value = (z @ weight[i, h].T + bias[i, h] for i in range(3))
            outputs.append(softmax(q @ key.T / np.sqrt(width)) @ value)
        return np.concatenate(outputs, axis=1)

    def features(self, k, images, batch_statistics=False):
        """MHSA_k(z_k): [B, N, E]."""
        return np.array([self.self_attention(k, z) for z in self.tokens(k, images, batch_statistics)])

    def gates(self, k):
        """Equation 7, per expert and head: [k + 1, H]."""
        if self.cfg.gating == "fixed":
            return np.full((k + 1, self.cfg.num_heads), 1 / (k + 1))
        logits = self(k, "gates").reshape(k + 1, -1)
        return np.broadcast_to(softmax(logits.T).T, (k + 1, self.cfg.num_heads))

    def fused(self, k, images, batch_statistics=False):
        """Equation 8 (5 without transfer): [B, N, E]; batch statistics concern expert k alone."""
        if self.cfg.gating == "none":
            return self.features(k, images, batch_statistics)
        total = 0
        for j, gate in enumerate(self.gates(k)):
            total = total + self.features(j, images, batch_statistics and j == k) * np.repeat(gate, self.cfg.head_dim)
        return total

    def logits(self, k, images, batch_statistics=False):
        """Equation 9: [B, classes]."""
        x = self.fused(k, images, batch_statistics).reshape(len(images), -1)
        for layer in range(len(self.cfg.head_hidden)):
            x = x @ self(k, f"head.hidden.{layer}.weight").T + self(k, f"head.hidden.{layer}.bias")
            norm = f"head.norms.{layer}."
            mean, var = self(k, norm + "running_mean"), self(k, norm + "running_var")
            if batch_statistics:
                mean, var = x.mean(0), x.var(0)
            x = leaky_relu(standardise(x, mean, var, self(k, norm + "weight"), self(k, norm + "bias")))
        return x @ self(k, "head.out.weight").T + self(k, "head.out.bias")

    def encode(self, k, images):
        """μ and σ of the VAE's code: [B, L] each."""
        x = images.reshape(len(images), -1)
        for layer in range(2):
            x = np.tanh(x @ self(k, f"vae.encoder.{layer}.weight").T + self(k, f"vae.encoder.{layer}.bias"))
        mu = x @ self(k, "vae.mu.weight").T + self(k, "vae.mu.bias")
        log_sigma = x @ self(k, "vae.log_sigma.weight").T + self(k, "vae.log_sigma.bias")
        return mu, np.exp(np.clip(log_sigma, -8, 4))

    def vae_loss(self, k, images, noise):
        """Σ (x̂ − x)² + β·KL per image, noise [B, L]: [B]."""
        mu, sigma = self.encode(k, images)
        x = np.tanh((mu + sigma * noise) @ self(k, "vae.decoder.0.weight").T + self(k, "vae.decoder.0.bias"))
        x = np.maximum(x @ self(k, "vae.decoder.1.weight").T + self(k, "vae.decoder.1.bias"), 0)
        x = x @ self(k, "vae.decoder.2.weight").T + self(k, "vae.decoder.2.bias")
        kl = 0.5 * (mu**2 + sigma**2 - 1 - np.log(sigma**2)).sum(1)
        return ((x - images.reshape(len(images), -1)) ** 2).sum(1) + self.cfg.beta * kl
