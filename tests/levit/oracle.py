"""LEViT's equations once more, in NumPy float64 and explicit loops, from a state_dict: nothing shared with levit."""

import numpy as np


def leaky_relu(x):
    return np.where(x > 0, x, 0.2 * x)


def standardise(x, mean, var, weight, bias):
    return (x - mean) / np.sqrt(var + 1e-5) * weight + bias


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def convolve(x, weight, bias):
    """3×3, stride 2, one pixel of zeros around: [B, C, S, S] → [B, O, S/2, S/2]."""
    padded, side = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))), x.shape[-1]
    out = bias[:, None, None]
    for row in range(3):
        for column in range(3):
            part = padded[:, :, row : row + side : 2, column : column + side : 2]
            out = out + np.einsum("bcij,oc->boij", part, weight[:, :, row, column], optimize=True)
    return out


def convolve_transposed(x, weight, bias):
    """4×4, stride 2, one pixel cut off around: [B, C, S, S] → [B, O, 2·S, 2·S]; weight is [C, O, 4, 4]."""
    side = x.shape[-1]
    out = np.zeros((len(x), weight.shape[1], 2 * side + 2, 2 * side + 2))
    for row in range(4):
        for column in range(4):
            part = np.einsum("bcij,co->boij", x, weight[:, :, row, column], optimize=True)
            out[:, :, row : row + 2 * side : 2, column : column + 2 * side : 2] += part
    return out[:, :, 1:-1, 1:-1] + bias[:, None, None]


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

    def has(self, k, name):
        return f"experts.{k}.{name}" in self.parameters

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
        """MHSA_k(z_k), or the MLP's output: [B, N, E]."""
        if self.cfg.expert == "dnn":
            x = images.reshape(len(images), -1)
            for layer in range(2):
                x = leaky_relu(x @ self(k, f"hidden.{layer}.weight").T + self(k, f"hidden.{layer}.bias"))
            return x[:, None]
        z = self.tokens(k, images, batch_statistics)
        if self.has(k, "position"):
            z = z + self(k, "position")
        attended = np.array([self.self_attention(k, one) for one in z])
        if self.has(k, "out_proj.weight"):
            attended = attended @ self(k, "out_proj.weight").T
        return attended

    def gates(self, k):
        """Equation 7, one column per head where heads have their own: [k + 1, 1 or H]; [k, ...] for fusion concat."""
        count = k + 1 if self.cfg.fusion == "sum" else k
        if self.cfg.gating == "fixed" or count == 0:
            return np.full((count, 1), 1 / max(count, 1))
        return softmax(self(k, "gates").reshape(count, -1).T).T

    def fused(self, k, images, batch_statistics=False):
        """Equation 8 (5 without transfer): [B, N, E or 2·E]; batch statistics concern expert k alone."""
        if self.cfg.gating == "none":
            return self.features(k, images, batch_statistics)
        total = 0 * self.features(k, images)
        for j, gate in enumerate(self.gates(k)):
            per_channel = np.repeat(gate, total.shape[-1] // len(gate))
            total = total + self.features(j, images, batch_statistics and j == k) * per_channel
        if self.cfg.fusion == "sum":
            return total
        return np.concatenate([self.features(k, images, batch_statistics), total], axis=-1)

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
        if self.cfg.vae == "conv":
            x = images
            for layer in range(4):
                x = leaky_relu(
                    convolve(x, self(k, f"vae.encoder.{layer}.weight"), self(k, f"vae.encoder.{layer}.bias"))
                )
            x = leaky_relu(x.reshape(len(x), -1) @ self(k, "vae.hidden.weight").T + self(k, "vae.hidden.bias"))
        else:
            x = images.reshape(len(images), -1)
            for layer in range(2):
                x = np.tanh(x @ self(k, f"vae.encoder.{layer}.weight").T + self(k, f"vae.encoder.{layer}.bias"))
        mu = x @ self(k, "vae.mu.weight").T + self(k, "vae.mu.bias")
        log_sigma = x @ self(k, "vae.log_sigma.weight").T + self(k, "vae.log_sigma.bias")
        return mu, np.exp(np.clip(log_sigma, -8, 4))

    def decode(self, k, codes):
        """Reconstructed pixels of codes [B, L]: [B, F]."""
        if self.cfg.vae == "conv":
            x = leaky_relu(codes @ self(k, "vae.from_code.weight").T + self(k, "vae.from_code.bias"))
            x = x.reshape(len(codes), -1, 2, 2)
            for layer in range(4):
                weight, bias = self(k, f"vae.decoder.{layer}.weight"), self(k, f"vae.decoder.{layer}.bias")
                x = convolve_transposed(leaky_relu(x) if layer else x, weight, bias)
            return x.reshape(len(codes), -1)
        x = np.tanh(codes @ self(k, "vae.decoder.0.weight").T + self(k, "vae.decoder.0.bias"))
        x = np.maximum(x @ self(k, "vae.decoder.1.weight").T + self(k, "vae.decoder.1.bias"), 0)
        return x @ self(k, "vae.decoder.2.weight").T + self(k, "vae.decoder.2.bias")

    def error(self, k, images, codes):
        """Σ (x̂ − x)² per image: [B]."""
        return ((self.decode(k, codes) - images.reshape(len(images), -1)) ** 2).sum(1)

    def vae_loss(self, k, images, noise):
        """Σ (x̂ − x)² + β·KL per image, noise [B, L]: [B]."""
        mu, sigma = self.encode(k, images)
        kl = 0.5 * (mu**2 + sigma**2 - 1 - np.log(sigma**2)).sum(1)
        return self.error(k, images, mu + sigma * noise) + self.cfg.beta * kl
