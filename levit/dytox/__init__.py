"""DyTox, a vision transformer that grows by one task token per task ("Transformers for Continual Learning with DYnamic
TOken eXpansion", CVPR 2022), with its decoder in one pass for all tokens; and without tasks (`free.py`).
"""

from levit.dytox.config import DyToxConfig
from levit.dytox.free import FreeDyToxLearner
from levit.dytox.free_model import FreeDyTox
from levit.dytox.learner import DyToxLearner
from levit.dytox.model import DyTox

__all__ = ["DyTox", "DyToxConfig", "DyToxLearner", "FreeDyTox", "FreeDyToxLearner"]
