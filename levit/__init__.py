"""LEViT, the Lifelong Expansible Vision Transformer, made fast: online, task-free continual learning of images."""

from levit import reference
from levit.config import LEViTConfig
from levit.dytox import DyTox, DyToxConfig, DyToxLearner
from levit.learner import Event, Learner
from levit.model import LEViT

__all__ = ["DyTox", "DyToxConfig", "DyToxLearner", "Event", "LEViT", "LEViTConfig", "Learner", "reference"]
