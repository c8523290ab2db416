"""LEViTConfig: every choice of a run in one frozen dataclass, and the presets of SPEC.md."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any, Literal

from levit.detector import limit_for


@dataclass(frozen=True)
class LEViTConfig:
    """One effective configuration: model, learner, stream and runtime.

    Build one with `LEViTConfig.preset("split-mnist", seed=3)`; any field can be overridden. A value that makes no
    sense raises `ValueError` naming the field, what was expected and what came.
    """

    # model
    image_size: int = 28
    """S: images are [C, S, S] (pixels)."""
    channels: int = 1
    """C: colour channels of an image."""
    patch_size: int = 7
    """P: side of a square patch (pixels); must divide image_size."""
    num_classes: int = 10
    """Classes over the whole stream; every expert's head predicts all of them."""
    embed_dim: int = 100
    """Q: width of a token."""
    num_heads: int = 3
    """H: attention heads."""
    head_dim: int | None = None
    """d: width of one head; None means embed_dim (full-width heads [C])."""
    expert: Literal["vit", "dnn"] = "vit"
    """What turns an image into features: a vision transformer, or an MLP of two hidden layers (N = 1)."""
    dnn_width: int = 200
    """E of expert `dnn`: width of both hidden layers [D]."""
    pos_embed: bool = False
    """Add a learned positional embedding to the tokens (off [C])."""
    out_proj: bool = False
    """Project the concatenated heads once more (off [C])."""
    fusion: Literal["sum", "concat"] = "sum"
    """Equation 8: the gated sum over all experts, or the own features beside the gated sum of the frozen ones."""
    gating: Literal["learned", "fixed", "none"] = "learned"
    """Dynamic knowledge fusion: learned softmax gates (DKF), constant 1/K (DKF-Fixed), or no transfer (No-DKF)."""
    gate_per: Literal["expert", "head"] = "expert"
    """One gate per expert, or one per expert and head (equation 7)."""
    head_hidden: tuple[int, ...] = (100,)
    """Hidden sizes of the classifier MLP."""
    vae: Literal["mlp", "conv"] = "mlp"
    """The VAE: an MLP over the pixels, or convolutions over the image at 32 x 32."""
    vae_hidden: tuple[int, int] = (200, 200)
    """Hidden sizes of the MLP VAE's encoder and decoder."""
    latent_dim: int = 50
    """L: width of a VAE code."""
    beta: float = 0.5
    """Weight of the KL term in the VAE loss [P]."""
    route_samples: int = 0
    """Routing averages the VAE loss over this many sampled codes; 0 takes the mean code (as published)."""
    routing: Literal["vae", "shared", "fused"] = "vae"
    """Who chooses an image's expert: its VAE loss (as published), a streaming LDA in a shared space, or both."""
    shared_filters: int = 100
    """Filters of the shared space (8 features each), for routing `shared` and `fused` and for method slda."""
    prior: Literal["none", "shared"] | None = "none"
    """What an expert's label rests on: its own logits, or those and the shared space's as a prior (`levit.routing`);
    None, the presets' choice: `shared` where routing keeps a shared space."""
    calibration: bool = False
    """Keep what predict needs to calibrate its confidence and to flag what no expert knows (`levit.examples`)."""

    # learner
    criterion: Literal["calibrated", "latent", "energy"] = "calibrated"
    """Expansion rule: `calibrated` (ours) has nothing to guess, see docs/expansion.md; as published are `latent`,
    equation 6 [P], and `energy`, which takes reconstruction errors [C]."""
    false_alarms_every: int = 1_000_000
    """Of rule `calibrated`: images between two false alarms, on average; fewer mean sooner detection."""
    gamma: float | None = None
    """Threshold of rule `latent`; None means 0.94 * sqrt(2 L) [D]."""
    energy_threshold: float | None = None
    """Threshold of rule `energy` (squared pixel error per image); there is no default to guess."""
    memory_size: int = 2000
    """M: capacity of the memory (images)."""
    train_batch: int = 64
    """Images drawn from the memory per update."""
    updates_per_batch: int = 3
    """Adam steps per batch of the stream."""
    learning_rate: float = 1e-3
    """Adam's learning rate (the paper's 1e-4 wants more updates than one pass allows [D])."""
    max_experts: int | None = None
    """No expansion beyond this many experts; None means no limit."""
    seed: int = 0
    """The one seed: expert initialisation, draws from the memory, codes, order of the stream."""

    # stream
    scenario: Literal["split", "permuted", "joined", "shuffled", "drifting"] = "split"
    """How the stream is made of the data (`levit.streams.scenarios`); the learner never sees where a part ends."""
    dataset: str = "mnist"
    """A data set's name, an .npz file or a folder of pictures; `joined` takes several, as in mnist+fashion."""
    classes_per_task: int = 2
    """Classes per experience of scenarios split, joined and drifting."""
    class_order: Literal["natural", "shuffled"] | tuple[int, ...] = "natural"
    """Order in which the classes come: 0, 1, 2, …, shuffled by the seed (joined: each data set by itself), or given."""
    permutations: int = 10
    """Experiences of scenario permuted: the images as they are, then under ever new permutations of the pixels."""
    drift: float = 1.0
    """Scenario drifting: length of a change, in experiences; 0 is a split."""
    shared_labels: bool = False
    """Scenario joined: class 0 of the second data set is label 0 too, not a class of its own."""
    batch_size: int = 10
    """b: images per batch of the stream."""

    # runtime
    cache: int | str = "auto"
    """Byte budget of the knowledge cache: `auto` (half of the free memory), a number of bytes, or `off`."""
    cache_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the cache keeps the frozen experts' features."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """`bf16` keeps the frozen experts' attention, their stored features and the MLP VAEs that route in bfloat16. On a
    CPU that multiplies pairs of such numbers it also rounds the factors of large products where the active expert
    learns and where codes are made. Sums, parameters, gradients and Adam's state are float32; the reference ignores
    it."""

    def __post_init__(self) -> None:
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", self.embed_dim)
        if self.prior is None:
            object.__setattr__(self, "prior", "none" if self.routing == "vae" else "shared")
        object.__setattr__(self, "head_hidden", tuple(self.head_hidden))
        object.__setattr__(self, "vae_hidden", tuple(self.vae_hidden))
        at_least_one = (
            "image_size channels patch_size num_classes embed_dim num_heads head_dim latent_dim memory_size "
            "train_batch updates_per_batch classes_per_task batch_size dnn_width permutations shared_filters"
        )
        for name in at_least_one.split():
            _expect(_is_int(value := getattr(self, name)) and value >= 1, name, "a whole number of at least 1", value)
        for name in ("head_hidden", "vae_hidden"):
            sizes = getattr(self, name)
            _expect(all(_is_int(s) and s >= 1 for s in sizes), name, "whole numbers of at least 1", sizes)
        _expect(len(self.vae_hidden) == 2, "vae_hidden", "two sizes", self.vae_hidden)
        _expect(
            _is_int(self.route_samples) and self.route_samples >= 0, "route_samples", "0 or more", self.route_samples
        )
        _expect(_is_int(self.seed) and 0 <= self.seed < 2**31, "seed", "0 to 2^31 - 1", self.seed)
        _expect(
            self.image_size % self.patch_size == 0,
            "patch_size",
            f"a divisor of image_size {self.image_size}",
            self.patch_size,
        )
        _expect(self.train_batch >= 2, "train_batch", "at least 2 (batch statistics)", self.train_batch)
        _expect(
            self.batch_size <= self.memory_size,
            "batch_size",
            f"at most memory_size {self.memory_size}",
            self.batch_size,
        )
        _expect(self.beta >= 0, "beta", "0 or more", self.beta)
        _expect(self.learning_rate > 0, "learning_rate", "more than 0", self.learning_rate)
        _expect(self.gamma is None or self.gamma > 0, "gamma", "more than 0, or None", self.gamma)
        limit = self.max_experts
        _expect(limit is None or (_is_int(limit) and limit >= 1), "max_experts", "at least 1, or None", limit)
        _choice(self, "expert", ("vit", "dnn"))
        _choice(self, "fusion", ("sum", "concat"))
        _choice(self, "vae", ("mlp", "conv"))
        _choice(self, "routing", ("vae", "shared", "fused"))
        _choice(self, "prior", ("none", "shared"))
        shared = self.prior == "none" or self.routing != "vae"
        _expect(shared, "prior", "'none', for routing 'vae', which keeps no shared space", self.prior)
        _expect(isinstance(self.calibration, bool), "calibration", "True or False", self.calibration)
        _choice(self, "gating", ("learned", "fixed", "none"))
        _choice(self, "gate_per", ("expert", "head"))
        heads = self.gate_per == "expert" or self.expert == "vit"
        _expect(heads, "gate_per", "'expert', for expert 'dnn'", self.gate_per)
        for name in ("pos_embed", "out_proj"):
            _expect(not getattr(self, name) or self.expert == "vit", name, "False, for expert 'dnn'", True)
        _choice(self, "criterion", ("calibrated", "latent", "energy"))
        alarms = self.false_alarms_every
        _expect(
            _is_int(alarms) and alarms >= 100 * self.batch_size, "false_alarms_every", "at least 100 batches", alarms
        )
        energy = self.energy_threshold
        _expect(energy is None or energy > 0, "energy_threshold", "more than 0, or None", energy)
        _expect(self.criterion != "energy" or energy, "energy_threshold", "a number, for criterion 'energy'", energy)
        _choice(self, "scenario", ("split", "permuted", "joined", "shuffled", "drifting"))
        _expect(self.drift >= 0, "drift", "0 or more", self.drift)
        order = self.class_order
        if not isinstance(order, str):
            object.__setattr__(self, "class_order", order := tuple(order))
        order_ok = order in ("natural", "shuffled") or (not isinstance(order, str) and all(map(_is_int, order)))
        _expect(order_ok, "class_order", "natural, shuffled or the classes in their order", order)
        _choice(self, "cache_dtype", ("fp32", "bf16"))
        _choice(self, "precision", ("fp32", "bf16"))
        packs = self.expert == "vit" and not self.pos_embed and not self.out_proj
        plain = "'fp32', for expert 'dnn' and with pos_embed or out_proj, which no kernel computes"
        _expect(self.precision == "fp32" or packs, "precision", plain, self.precision)
        cache_ok = self.cache in ("auto", "off") or (_is_int(self.cache) and self.cache >= 0)
        _expect(cache_ok, "cache", "'auto', 'off' or a number of bytes", self.cache)

    @classmethod
    def preset(cls, name: str, variant: str = "levit-dkf", **overrides: Any) -> LEViTConfig:
        """The preset `name` (see `PRESETS`) of a `variant` (see `VARIANTS`), with fields overridden.

        An unknown name raises `ValueError` that suggests the nearest.
        """
        unknown = set(overrides) - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            field = sorted(unknown)[0]
            near = difflib.get_close_matches(field, [f.name for f in dataclasses.fields(cls)], n=1, cutoff=0.0)
            raise ValueError(f"{field}: not a field of LEViTConfig. Did you mean {near[0]!r}?")
        return cls(**(_known("preset", name, PRESETS) | _known("variant", variant, VARIANTS) | overrides))

    @property
    def num_patches(self) -> int:
        """Patches per image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_tokens(self) -> int:
        """N: tokens (patches) per image; 1 where the expert is an MLP."""
        return self.num_patches if self.expert == "vit" else 1

    @property
    def patch_dim(self) -> int:
        """P²C: values per patch."""
        return self.patch_size**2 * self.channels

    @property
    def feature_dim(self) -> int:
        """E: width of an expert's features per token, H·d of its self-attention or the MLP's width."""
        return self.num_heads * self.head_dim if self.expert == "vit" else self.dnn_width

    @property
    def fused_dim(self) -> int:
        """Width per token of M̃, what the head sees: E, or 2·E where own and transferred features stand side by side."""
        return 2 * self.feature_dim if self.fusion == "concat" and self.gating != "none" else self.feature_dim

    @property
    def gates_per_expert(self) -> int:
        """Gates that one expert has: 1, or H where every head has its own."""
        return self.num_heads if self.gate_per == "head" and self.gating == "learned" else 1

    @property
    def expansion_threshold(self) -> float:
        """What the rule compares with: the limit of both charts of rule `calibrated`, `energy_threshold`, or γ.

        γ is the given one or 0.94·√(2L), just under the distance of two unit Gaussians [D].
        """
        if self.criterion == "calibrated":
            return limit_for(2 * self.false_alarms_every / self.batch_size)  # two charts share the false alarms
        if self.criterion == "energy":
            return self.energy_threshold
        return self.gamma if self.gamma is not None else 0.94 * (2 * self.latent_dim) ** 0.5

    def to_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON and checkpoints; `LEViTConfig(**d)` gives the same configuration back."""
        return {
            key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(self).items()
        }


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _expect(ok: bool, field: str, expected: str, got: object) -> None:
    if not ok:
        raise ValueError(f"{field}: expected {expected}, got {got!r}")


def _choice(cfg: LEViTConfig, field: str, allowed: tuple[str, ...]) -> None:
    _expect(getattr(cfg, field) in allowed, field, "one of " + ", ".join(allowed), getattr(cfg, field))


def _known(what: str, name: str, table: dict[str, dict[str, Any]]) -> dict[str, Any]:
    if name not in table:
        near = difflib.get_close_matches(name, table, n=1, cutoff=0.0)
        raise ValueError(f"{what}: expected one of {', '.join(table)}; got {name!r}. Did you mean {near[0]!r}?")
    return table[name]


# What routes best on each kind of stream; `--routing vae` is the published rule.
_ROUTED = dict(routing="fused", prior=None, calibration=True)
_MNIST = _ROUTED | dict(image_size=28, channels=1, patch_size=7, memory_size=2000, shared_filters=300)
# Decoders of convolutional VAEs never saw a mean code, so routing averages over samples (SPEC.md, inference [D]).
_COLOUR = _ROUTED | dict(
    image_size=32,
    channels=3,
    patch_size=8,
    head_hidden=(500, 200),
    vae="conv",
    latent_dim=200,
    route_samples=10,
    memory_size=1000,
    updates_per_batch=1,
    shared_filters=400,
)

PRESETS: dict[str, dict[str, Any]] = {
    "digits": _ROUTED
    | dict(
        dataset="digits",
        image_size=8,
        patch_size=2,
        embed_dim=32,
        num_heads=2,
        head_hidden=(64,),
        vae_hidden=(64, 64),
        latent_dim=16,
        memory_size=200,
        criterion="latent",  # an experience has 29 batches: too few for a chart to learn what is usual
    ),
    "split-mnist": _MNIST | dict(dataset="mnist", gamma=9.4),
    "split-fashion": _MNIST | dict(dataset="fashion", gamma=9.4),
    # Every expert sees every class here, so which class it is does not say which expert.
    "permuted-mnist": _MNIST | dict(dataset="mnist", scenario="permuted", routing="vae"),
    "split-mnist-fashion": _MNIST | dict(dataset="mnist+fashion", scenario="joined", num_classes=20),
    "split-cifar10": _COLOUR | dict(dataset="cifar10", gamma=19.95),
    "split-cifar100": _COLOUR
    | dict(dataset="cifar100", num_classes=100, classes_per_task=5, memory_size=5000, gamma=19.95),
    "split-mnist-svhn": _COLOUR | dict(dataset="mnist+svhn", scenario="joined", num_classes=20),
    "split-miniimagenet": _COLOUR
    | dict(
        dataset="miniimagenet", image_size=84, patch_size=12, num_classes=100, classes_per_task=5, memory_size=10000
    ),
}
"""The presets of SPEC.md, by name: fields that differ from LEViTConfig's defaults."""

VARIANTS: dict[str, dict[str, Any]] = {
    "levit-dkf": {},
    "levit-no-dkf": dict(gating="none"),
    "levit-dkf-fixed": dict(gating="fixed"),
    "levit-dnn": dict(expert="dnn"),
}
"""The variants of SPEC.md, by name: fields that differ from the preset's."""
