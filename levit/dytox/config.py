"""DyToxConfig: every choice of a DyTox run in one frozen dataclass, and its presets.

[P] is DyTox's paper here, [C] its authors' public code, read for facts.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from levit.config import _choice, _expect, _is_int, _known
from levit.detector import limit_for


@dataclass(frozen=True)
class DyToxConfig:
    """Model, training and stream of DyTox; the defaults are those published for CIFAR [P], the rest is [C].

    A value that makes no sense raises `ValueError` naming the field, what was expected and what came.
    """

    scenario: ClassVar[str] = "class-incremental"

    # model
    image_size: int = 32
    """Images are [C, S, S] (pixels)."""
    channels: int = 3
    """C: colour channels of an image."""
    mean: tuple[float, ...] = (0.5071, 0.4867, 0.4408)
    """Of each colour, subtracted from images in [0, 1] before anything else."""
    std: tuple[float, ...] = (0.2675, 0.2565, 0.2761)
    """Of each colour, divided by after that."""
    patch_size: int = 4
    """Side of a square patch (pixels); must divide image_size."""
    embed_dim: int = 384
    """D: width of a token."""
    num_heads: int = 12
    """H: attention heads; must divide D."""
    depth: int = 5
    """L: self-attention blocks in front of the one task-attention block."""
    attention: Literal["gpsa", "mhsa"] = "gpsa"
    """Of the self-attention blocks: ConViT's gated positional attention, or plain multi-head attention."""
    locality_strength: float = 1.0
    """How sharply a new gpsa block looks at neighbours."""
    mlp_ratio: float = 4.0
    """Hidden width of the MLPs over D."""
    backbone: str | None = None
    """A timm model in the place of patch embedding and self-attention blocks, as in vit_small_patch16_224."""
    joint: bool = True
    """All task tokens in one pass of the decoder; False makes a pass per token. Changes speed only."""

    # training
    epochs: int = 500
    """Per task, over its images and the memory."""
    finetune_epochs: int = 20
    """Per task from the second on, over the balanced memory alone, with the encoder frozen."""
    warmup_epochs: int = 5
    """Epochs in which the learning rate rises linearly; then it falls as a cosine."""
    learning_rate: float = 5e-4
    """AdamW's, at its height."""
    finetune_learning_rate: float = 5e-5
    """AdamW's in the balanced fine-tuning."""
    weight_decay: float = 1e-6
    """AdamW's."""
    batch_size: int = 128
    """Images per update."""
    distillation: bool = True
    """Keep the old logits near those of the model as it was before the task, with weight old classes / all classes."""
    temperature: float = 1.0
    """Of the distillation."""
    divergence: float = 0.1
    """λ: weight of the loss of the divergence head; 0 does without the head."""
    freeze_old: bool = True
    """Old task tokens and heads stay as they are while a task is learned (but for the balanced fine-tuning)."""
    memory_size: int = 2000
    """Images kept for rehearsal, over all classes together; 0 keeps none."""
    rehearsal: Literal["herding", "random"] = "herding"
    """Which images of a class are kept: those whose mean embedding follows that of the class, or any."""
    augment: bool = True
    """Crop from a margin of an eighth, and mirror, at random."""
    mixup: float = 0.0
    """DyTox+: alpha of timm's MixUp; 0 is off."""
    seed: int = 0
    """The one seed: initialisation, order of the images, augmentation, order of the classes."""

    # task-free (method dytox-free)
    stream_batch: int = 10
    """Images that arrive at a time."""
    updates_per_batch: int = 1
    """Updates while they are there, each of batch_size images: these, and others of the memory."""
    false_alarms_every: int = 1_000_000
    """Images between two false alarms, on average; fewer mean sooner detection."""

    # stream
    dataset: str = "cifar100"
    """A data set's name, an .npz file or a folder of pictures."""
    num_classes: int = 100
    """Classes of the data set."""
    first_classes: int = 10
    """m of B-m Inc-n: classes of the first task."""
    classes_per_task: int = 10
    """n of B-m Inc-n: classes of every later task."""
    class_order: Literal["natural", "shuffled"] | tuple[int, ...] = "natural"
    """Order in which the classes come: 0, 1, 2, …, shuffled by the seed, or given."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", tuple(self.mean))
        object.__setattr__(self, "std", tuple(self.std))
        at_least_one = (
            "image_size channels patch_size embed_dim num_heads depth epochs batch_size num_classes first_classes "
            "classes_per_task stream_batch updates_per_batch"
        )
        for names, least in ((at_least_one, 1), ("finetune_epochs warmup_epochs memory_size", 0)):
            for name in names.split():
                value = getattr(self, name)
                _expect(_is_int(value) and value >= least, name, f"a whole number of at least {least}", value)
        size, heads = self.image_size, self.num_heads
        _expect(size % self.patch_size == 0, "patch_size", f"a divisor of image_size {size}", self.patch_size)
        _expect(self.embed_dim % heads == 0, "num_heads", f"a divisor of embed_dim {self.embed_dim}", heads)
        for name in ("mean", "std"):
            value = getattr(self, name)
            _expect(len(value) == self.channels, name, f"a number per channel ({self.channels})", value)
        _expect(min(self.std) > 0, "std", "numbers above 0", self.std)
        for name in ("mlp_ratio", "locality_strength", "learning_rate", "finetune_learning_rate", "temperature"):
            _expect(getattr(self, name) > 0, name, "more than 0", getattr(self, name))
        for name in ("weight_decay", "divergence", "mixup"):
            _expect(getattr(self, name) >= 0, name, "0 or more", getattr(self, name))
        alarms = self.false_alarms_every
        enough = _is_int(alarms) and alarms >= 100 * self.stream_batch
        _expect(enough, "false_alarms_every", "at least 100 stream batches", alarms)
        _expect(_is_int(self.seed) and 0 <= self.seed < 2**31, "seed", "0 to 2^31 - 1", self.seed)
        _choice(self, "attention", ("gpsa", "mhsa"))
        _choice(self, "rehearsal", ("herding", "random"))
        later = self.num_classes - self.first_classes
        fits = later >= 0 and later % self.classes_per_task == 0
        _expect(
            fits, "classes_per_task", f"a divisor of the {later} classes after the first task", self.classes_per_task
        )
        if not isinstance(self.class_order, str):
            object.__setattr__(self, "class_order", tuple(self.class_order))

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> DyToxConfig:
        """The preset `name` (see `PRESETS`) with fields overridden."""
        return cls(**(_known("preset", name, PRESETS) | overrides))

    @property
    def num_patches(self) -> int:
        """N: patches per image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def expansion_threshold(self) -> float:
        """The limit of the chart of method `dytox-free`."""
        return limit_for(self.false_alarms_every / self.stream_batch)

    def to_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON and checkpoints; `DyToxConfig(**d)` gives the same configuration back."""
        return {
            key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(self).items()
        }


PRESETS: dict[str, dict[str, Any]] = {
    "dytox-cifar10": dict(dataset="cifar10", num_classes=10, first_classes=2, classes_per_task=2),
    "dytox-cifar100": dict(dataset="cifar100"),
    "dytox-imagenet100": dict(
        dataset="imagenet100",
        image_size=224,
        patch_size=16,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    ),
}
"""By name: fields that differ from DyToxConfig's defaults."""
