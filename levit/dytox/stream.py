"""The class-incremental stream of a DyTox run."""

from __future__ import annotations

import numpy as np

from levit.dytox.config import DyToxConfig
from levit.streams import Dataset, Stream, scenarios


def task_stream(
    cfg: DyToxConfig,
    data: Dataset,
    limit: int | None = None,
    test_limit: int | None = None,
    batch_size: int | None = None,
) -> Stream:
    """B-m Inc-n over a data set; the learner is told classes by the order of their arrival, from 0 on.

    batch_size: of the stream's batches, which task-free methods see; None takes the configuration's.
    `ValueError` where the data are not what the configuration says.
    """
    got = dict(channels=data.image_shape[0], image_size=data.image_shape[1], num_classes=data.num_classes)
    for field, value in got.items():
        if getattr(cfg, field) != value:
            raise ValueError(
                f"{field}: the configuration says {getattr(cfg, field)}, data set {data.name} has {value}; "
                f"pass --{field.replace('_', '-')} {value}"
            )
    random = np.random.RandomState(cfg.seed)
    groups = cfg.first_classes, cfg.classes_per_task, cfg.class_order
    plan = scenarios.class_incremental(data, random, *groups, limit)
    plan = scenarios.limited_tests(plan, np.random.RandomState(cfg.seed), test_limit)
    arrival = np.empty(data.num_classes, dtype=np.int64)
    arrival[plan.class_order] = np.arange(data.num_classes)
    return Stream(data, plan, batch_size=batch_size or cfg.batch_size, labels=arrival, seed=cfg.seed)
