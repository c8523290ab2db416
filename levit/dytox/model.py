"""DyTox: an encoder shared by all tasks, a decoder asked once per task token, and a classifier per task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from levit.dytox.blocks import GPSA, MHSA, STD, Block, TaskBlock, initialise
from levit.dytox.config import DyToxConfig
from levit.dytox.official import listed, official_config, saved_classes
from levit.routing import Prediction


class Classifier(nn.Module):
    """LayerNorm and a linear layer: [B, D] → [B, classes]."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[B, D] → [B, classes]."""
        return self.head(self.norm(x))


class PatchEmbed(nn.Module):
    """Non-overlapping patches, row by row: [B, C, S, S] → [B, N, D]."""

    def __init__(self, channels: int, patch: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, patch, patch)

    def forward(self, images: Tensor) -> Tensor:
        """[B, C, S, S] → [B, N, D]."""
        return self.proj(images).flatten(2).transpose(1, 2)


class DyTox(nn.Module):
    """Starts without a task; `add_task` gives it a token and a classifier for each.

    Args:
        cfg: the configuration. Weights depend on its seed alone.

    Class c of the outputs is the c-th class that was added. The model has no batch statistics and no dropout: it
    computes the same in training and evaluation.
    """

    def __init__(self, cfg: DyToxConfig) -> None:
        super().__init__()
        self.cfg = cfg
        dim = cfg.embed_dim
        if cfg.backbone is None:
            self.patch_embed = PatchEmbed(cfg.channels, cfg.patch_size, dim)
            self.pos_embed = nn.Parameter(torch.zeros(1, cfg.num_patches, dim))
            self.sabs = nn.ModuleList([_block(cfg) for _ in range(cfg.depth)])
        else:
            self.backbone = _timm_backbone(cfg)
        self.tabs = nn.ModuleList([TaskBlock(dim, cfg.num_heads, cfg.mlp_ratio)])
        self.task_tokens = nn.ParameterList()
        self.head = nn.ModuleList()
        self.head_div: Classifier | None = None
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(getattr(cfg, name)).view(-1, 1, 1), persistent=False)
        self._initialise(torch.Generator().manual_seed(cfg.seed))

    @property
    def num_tasks(self) -> int:
        """T: task tokens."""
        return len(self.task_tokens)

    @property
    def num_experts(self) -> int:
        """T, under the name by which runs and reports count what a model grows by."""
        return self.num_tasks

    @property
    def classes_per_task(self) -> list[int]:
        """Classes of each task."""
        return [head.head.out_features for head in self.head]

    def add_task(self, num_classes: int) -> None:
        """A new token, and a classifier of `num_classes` ≥ 1 classes; from the second task on a divergence head too.

        The divergence head of the task before is replaced.
        """
        if not isinstance(num_classes, int) or isinstance(num_classes, bool) or num_classes < 1:
            raise ValueError(f"num_classes: expected a whole number of at least 1, got {num_classes!r}")
        generator = torch.Generator().manual_seed(self.cfg.seed * 1000003 + self.num_tasks + 1)
        like, dim = self.tabs[0].norm1.weight, self.cfg.embed_dim
        token = nn.init.trunc_normal_(torch.empty(1, 1, dim), std=STD, generator=generator)
        self.task_tokens.append(nn.Parameter(token.to(like)))
        self.head.append(new_classifier(dim, num_classes, generator).to(like))
        if self.num_tasks > 1 and self.cfg.divergence:
            self.head_div = new_classifier(dim, num_classes + 1, generator).to(like)

    def forward(self, images: Tensor) -> Tensor:
        """images [B, C, S, S], uint8 or in [0, 1] → logits [B, classes]; their sigmoids are the outputs."""
        return self._classify(self.embeddings(images))

    def probabilities(self, images: Tensor) -> Tensor:
        """images [B, C, S, S] → [B, classes], each class by itself between 0 and 1 (sigmoids)."""
        return torch.sigmoid(self(images))

    def training_outputs(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits as `forward`'s, and of the divergence head [B, 1 + classes of the last task]: "old", then each new."""
        embeddings = self.embeddings(images)
        divergence = None if self.head_div is None else self.head_div(embeddings[:, -1])
        return self._classify(embeddings), divergence

    def route(self, images: Tensor) -> Tensor:
        """The task whose class has the largest logit: [B] int64."""
        return self.answer(images)[1]

    def answer(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """What `forward` and `route` say of images [B, C, S, S]."""
        logits = self(images)
        return logits, self._task_of_output()[logits.argmax(1)]

    @torch.no_grad()
    def predict(self, images: Tensor) -> Prediction:
        """Label, its task, its sigmoid value (not calibrated); every image counts as known: [B, C, S, S] → [B] each."""
        confidence, label = self(images).sigmoid().max(1)
        known = torch.ones_like(label, dtype=torch.bool)
        return Prediction(label, self._task_of_output()[label], confidence, known)

    def embeddings(self, images: Tensor) -> Tensor:
        """images [B, C, S, S] → what the decoder says for each task token, [B, T, D]."""
        if not self.num_tasks:
            raise RuntimeError("DyTox: no task yet; call add_task(num_classes) first")
        tokens = torch.cat(list(self.task_tokens)).squeeze(1)
        return self.tabs[0](tokens, self.encode(images), self.cfg.joint)

    def encode(self, images: Tensor) -> Tensor:
        """images [B, C, S, S] → patches [B, N, D]."""
        images = (self.check_images(images) - self.mean) / self.std
        if self.cfg.backbone is not None:
            return self.backbone.forward_features(images)[:, self.backbone.num_prefix_tokens :]
        x = self.patch_embed(images) + self.pos_embed
        for block in self.sabs:
            x = block(x)
        return x

    def encoder_parameters(self) -> list[nn.Parameter]:
        """Those of everything in front of the decoder."""
        own = [*self.tabs.parameters(), *self.task_tokens, *self.head.parameters()]
        own += [] if self.head_div is None else self.head_div.parameters()
        known = {id(parameter) for parameter in own}
        return [parameter for parameter in self.parameters() if id(parameter) not in known]

    def check_images(self, images: Tensor) -> Tensor:
        """The images in the model's dtype ([0, 255] uint8 becomes [0, 1]), or `TypeError`/`ValueError`."""
        c, s, like = self.cfg.channels, self.cfg.image_size, self.mean
        if not isinstance(images, Tensor):
            raise TypeError(f"images: expected a tensor, got {type(images).__name__}")
        if images.dim() != 4 or images.shape[1:] != (c, s, s):
            raise ValueError(f"images: expected [B, {c}, {s}, {s}], got {list(images.shape)}")
        if images.device != like.device:
            raise ValueError(f"images: expected on {like.device}, as the model, got {images.device}")
        if images.dtype == torch.uint8:
            return images.to(like.dtype) / 255
        if images.dtype != like.dtype:
            raise TypeError(f"images: expected {like.dtype} or torch.uint8, got {images.dtype}")
        return images

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's, but the model takes on the saved tasks, more or fewer. `strict` is always on.

        Raises:
            ValueError: keys that are missing or do not belong (all listed), or shapes that differ; nothing was changed.
        """
        classes, divergence = saved_classes(state)
        expected = self._expected_shapes(classes, divergence)
        missing, extra = sorted(set(expected) - set(state)), sorted(set(state) - set(expected))
        if missing or extra:
            raise ValueError(f"state_dict: missing keys: {listed(missing)}; keys that do not belong: {listed(extra)}")
        for key, shape in expected.items():
            if state[key].shape != shape:
                raise ValueError(f"state_dict: {key}: expected {list(shape)}, got {list(state[key].shape)}")
        self.task_tokens, self.head, self.head_div = nn.ParameterList(), nn.ModuleList(), None
        for count in classes:
            self.add_task(count)
        like, dim = self.tabs[0].norm1.weight, self.cfg.embed_dim
        self.head_div = None if divergence is None else Classifier(dim, divergence).to(like)
        return super().load_state_dict(state, True, assign)

    @classmethod
    def from_official(cls, state: Mapping[str, Tensor], **overrides: Any) -> DyTox:
        """A model from a state_dict of the public implementation; sizes, heads and tasks are read off its tensors.

        Args:
            state: the state_dict itself.
            overrides: fields of the configuration beside those, as `seed` or `joint`.

        Raises:
            ValueError: keys that are missing or do not belong, listed; or an override that the tensors contradict.
        """
        model = cls(official_config(state, **overrides))
        model.load_state_dict(state)
        return model

    def _expected_shapes(self, classes: list[int], divergence: int | None) -> dict[str, tuple[int, ...]]:
        dim = self.cfg.embed_dim
        grown = ("task_tokens.", "head.", "head_div.")
        shapes = {key: tuple(x.shape) for key, x in self.state_dict().items() if not key.startswith(grown)}
        heads = {f"head.{t}": count for t, count in enumerate(classes)}
        heads |= {} if divergence is None else {"head_div": divergence}
        shapes |= {f"task_tokens.{t}": (1, 1, dim) for t in range(len(classes))}
        for name, count in heads.items():
            shapes |= {f"{name}.norm.weight": (dim,), f"{name}.norm.bias": (dim,)}
            shapes |= {f"{name}.head.weight": (count, dim), f"{name}.head.bias": (count,)}
        return shapes

    def _task_of_output(self) -> Tensor:
        return torch.repeat_interleave(torch.tensor(self.classes_per_task, device=self.mean.device))

    def _classify(self, embeddings: Tensor) -> Tensor:
        return torch.cat([head(x) for head, x in zip(self.head, embeddings.unbind(1), strict=True)], 1)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        initialise(self.tabs, generator)
        if self.cfg.backbone is not None:
            return
        bound = self.patch_embed.proj.weight[0].numel() ** -0.5
        for parameter in self.patch_embed.parameters():
            parameter.uniform_(-bound, bound, generator=generator)
        nn.init.trunc_normal_(self.pos_embed, std=STD, generator=generator)
        initialise(self.sabs, generator)
        for block in self.sabs:
            if isinstance(block.attn, GPSA):
                block.attn.start_locally(self.cfg.locality_strength)


def _block(cfg: DyToxConfig) -> Block:
    if cfg.attention == "gpsa":
        attention = GPSA(cfg.embed_dim, cfg.num_heads, cfg.image_size // cfg.patch_size)
    else:
        attention = MHSA(cfg.embed_dim, cfg.num_heads)
    return Block(attention, cfg.embed_dim, cfg.mlp_ratio)


def new_classifier(dim: int, classes: int, generator: torch.Generator) -> Classifier:
    """With weights drawn from the generator, on the CPU."""
    classifier, bound = Classifier(dim, classes), dim**-0.5
    with torch.no_grad():
        for parameter in classifier.head.parameters():
            parameter.uniform_(-bound, bound, generator=generator)
    return classifier


def _timm_backbone(cfg: DyToxConfig) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise ValueError(f"backbone: {cfg.backbone!r} needs timm, which is not installed (pip install timm)") from error
    if cfg.backbone not in timm.list_models():
        raise ValueError(f"backbone: timm has no model {cfg.backbone!r}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cfg.seed)
        try:
            model = timm.create_model(cfg.backbone, num_classes=0, in_chans=cfg.channels, img_size=cfg.image_size)
        except TypeError as error:
            raise ValueError(f"backbone: {cfg.backbone!r} is no vision transformer of one image size") from error
    if not hasattr(model, "num_prefix_tokens"):
        raise ValueError(f"backbone: expected a vision transformer, {cfg.backbone!r} has no tokens")
    if model.num_features != cfg.embed_dim:
        got = f"{cfg.embed_dim}; {cfg.backbone!r} is {model.num_features} wide"
        raise ValueError(f"embed_dim: expected that of the backbone, got {got}")
    return model
