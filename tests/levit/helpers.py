"""Small models and images that the tests of levit share."""

import torch

import levit

VARIANTS = {
    "dkf": {},
    "dkf-per-head": {"gate_per": "head"},
    "dkf-fixed": {"gating": "fixed"},
    "no-dkf": {"gating": "none"},
    "concat": {"fusion": "concat"},
    "concat-per-head": {"fusion": "concat", "gate_per": "head"},
    "concat-fixed": {"fusion": "concat", "gating": "fixed"},
    "dnn": {"expert": "dnn", "dnn_width": 10, "head_hidden": ()},
    "dnn-concat": {"expert": "dnn", "dnn_width": 10, "head_hidden": (), "fusion": "concat"},
    "options": {"pos_embed": True, "out_proj": True},
    "energy": {"criterion": "energy", "energy_threshold": 26.0},
}
"""Every way to build an expert and to fuse, as overrides of `small_config`."""


def small_config(**overrides):
    """A model that is quick in float64, of sizes that no kernel likes: 9 tokens, odd widths, two hidden layers."""
    fields = dict(
        image_size=6,
        channels=3,
        patch_size=2,
        num_classes=5,
        embed_dim=7,
        num_heads=3,
        head_dim=5,
        head_hidden=(11, 9),
        vae_hidden=(13, 8),
        latent_dim=4,
        memory_size=20,
        train_batch=8,
        batch_size=4,
        updates_per_batch=2,
        criterion="latent",
        seed=3,
    )
    return levit.LEViTConfig(**(fields | overrides))


def build(kind, cfg, experts=1, dtype=torch.float64):
    """A model of `kind` with experts whose statistics, gates and weights are all away from their initial values."""
    model = kind(cfg).to(dtype)
    generator = torch.Generator().manual_seed(11)
    for k in range(experts):
        if k:
            model.add_expert()
        for name, tensor in (*model.active.named_parameters(), *model.active.named_buffers()):
            if tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=generator).to(dtype)
                with torch.no_grad():
                    tensor.add_(noise if "var" in name else 0.3 * (noise - 0.5))
    return model


def random_images(cfg, count, dtype=torch.float64, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, cfg.channels, cfg.image_size, cfg.image_size, generator=generator).to(dtype)


def random_labels(cfg, count, seed=6):
    return torch.randint(cfg.num_classes, (count,), generator=torch.Generator().manual_seed(seed))
