"""Scenarios: the order in which a stream shows the images of a data set, once each and with its changes hidden.

- `split`: groups of classes, one after another.
- `class_incremental`: the same with a first group of its own size.
- `joined`: the same over several data sets, all classes of one before those of the next.
- `drifting`: groups of classes that fade into each other.
- `permuted`: all images, again and again, each time under another permutation of the pixels.
- `shuffled`: all images in one random order: nothing changes, the ceiling of what the others can reach.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from levit.streams.dataset import Dataset

ClassOrder = str | Sequence[int]
"""`natural` (0, 1, 2, …), `shuffled` (within each of the data sets joined), or every class once."""


@dataclass(frozen=True)
class Plan:
    """What a scenario makes of a data set. All of it but the order of the rows is for the evaluator alone."""

    rows: np.ndarray
    """[n] rows of the training images, in the order of the stream."""
    experience: np.ndarray
    """[n] the 0-based experience that each of them belongs to."""
    experiences: list[tuple[int, ...]]
    """The classes of each experience."""
    test_rows: np.ndarray
    """[m] rows of the test images."""
    test_experience: np.ndarray
    """[m] whose test image each is."""
    permutations: np.ndarray | None = None
    """[experiences, S·S] which pixel comes to each place; None where pixels stay."""

    @property
    def ends(self) -> list[int]:
        """Position (images seen) at which each experience ends: as many images as it and all before it have.

        Where experiences fade into each other that is the middle of the change.
        """
        return np.cumsum(np.bincount(self.experience, minlength=len(self.experiences))).tolist()

    @property
    def class_order(self) -> list[int]:
        """Every class once, as they first belong to an experience."""
        return list(dict.fromkeys(label for group in self.experiences for label in group))


def split(
    data: Dataset,
    random: np.random.RandomState,
    classes_per_task: int = 2,
    class_order: ClassOrder = "natural",
    limit: int | None = None,
) -> Plan:
    """Groups of `classes_per_task` classes one after another, shuffled within.

    Args:
        data: the data set.
        random: decides the order. RandomState alone promises the same numbers in every version of numpy.
        classes_per_task: must divide the classes of the data set, or of each that was joined.
        class_order: see `ClassOrder`.
        limit: keep this many images, of each experience in proportion; None keeps all.
    """
    for classes in data.part_sizes:
        if classes % classes_per_task:
            raise ValueError(f"classes_per_task: expected a divisor of {classes} classes, got {classes_per_task}")
    order = _order(class_order, data.part_sizes, random)
    groups = [tuple(order[i : i + classes_per_task]) for i in range(0, len(order), classes_per_task)]
    parts = [random.permutation(np.flatnonzero(np.isin(data.train_labels, group))) for group in groups]
    return _grouped(data, groups, _limited(parts, limit))


def class_incremental(
    data: Dataset,
    random: np.random.RandomState,
    first_classes: int,
    classes_per_task: int,
    class_order: ClassOrder = "natural",
    limit: int | None = None,
) -> Plan:
    """B-m Inc-n: `first_classes` classes, then groups of `classes_per_task`. The other arguments as `split`'s."""
    later = data.num_classes - first_classes
    if later < 0 or later % classes_per_task:
        raise ValueError(f"classes_per_task: expected a divisor of {later} classes, got {classes_per_task}")
    order = _order(class_order, data.part_sizes, random)
    starts = [0, *range(first_classes, data.num_classes, classes_per_task), data.num_classes]
    groups = [tuple(order[a:b]) for a, b in zip(starts, starts[1:], strict=False)]
    parts = [random.permutation(np.flatnonzero(np.isin(data.train_labels, group))) for group in groups]
    return _grouped(data, groups, _limited(parts, limit))


def drifting(
    data: Dataset,
    random: np.random.RandomState,
    classes_per_task: int = 2,
    class_order: ClassOrder = "natural",
    drift: float = 1.0,
    limit: int | None = None,
) -> Plan:
    """The experiences of `split`, fading into each other.

    Each image of experience e (0-based) is given the time e + u + drift·(v − ½), with u and v uniform in [0, 1), and
    the images come in the order of their times. So around each border, over `drift` experiences, the share of the old
    classes falls linearly while that of the new ones rises; with drift = 1 there is no moment without a change, with
    drift = 0 this is `split`. Arguments as `split`'s.
    """
    plan = split(data, random, classes_per_task, class_order, limit)
    count = len(plan.rows)
    times = plan.experience + random.random_sample(count) + drift * (random.random_sample(count) - 0.5)
    order = np.argsort(times, kind="stable")
    return dataclasses.replace(plan, rows=plan.rows[order], experience=plan.experience[order])


def permuted(data: Dataset, random: np.random.RandomState, permutations: int = 10, limit: int | None = None) -> Plan:
    """All images `permutations` times over, first as they are, then each time under a permutation of the pixels.

    A permutation moves pixels with all their colours. Every experience has all classes, and the whole test set under
    its permutation. Arguments as `split`'s.
    """
    classes, pixels = range(data.num_classes), data.image_shape[1] ** 2
    orders = [np.arange(pixels), *(random.permutation(pixels) for _ in range(permutations - 1))]
    parts = _limited([random.permutation(len(data.train_labels)) for _ in orders], limit)
    tested = len(data.test_labels)
    return Plan(
        rows=np.concatenate(parts),
        experience=np.repeat(np.arange(permutations), [len(part) for part in parts]),
        experiences=[tuple(classes)] * permutations,
        test_rows=np.tile(np.arange(tested), permutations),
        test_experience=np.repeat(np.arange(permutations), tested),
        permutations=np.stack(orders),
    )


def shuffled(data: Dataset, random: np.random.RandomState, limit: int | None = None) -> Plan:
    """All images in one random order, as a single experience. Arguments as `split`'s."""
    parts = _limited([random.permutation(len(data.train_labels))], limit)
    return _grouped(data, [tuple(range(data.num_classes))], parts)


def limited_tests(plan: Plan, random: np.random.RandomState, limit: int | None) -> Plan:
    """The plan with this many test images, of each experience in proportion, in their order; None keeps all."""
    if limit is None:
        return plan
    own = [random.permutation(np.flatnonzero(plan.test_experience == j)) for j in range(len(plan.experiences))]
    kept = np.sort(np.concatenate(_limited(own, limit)))
    return dataclasses.replace(plan, test_rows=plan.test_rows[kept], test_experience=plan.test_experience[kept])


def _grouped(data: Dataset, groups: list[tuple[int, ...]], parts: list[np.ndarray]) -> Plan:
    """The parts one after another; a test image belongs where its class does."""
    table = np.empty(data.num_classes, dtype=np.int64)
    for experience, group in enumerate(groups):
        table[list(group)] = experience
    return Plan(
        rows=np.concatenate(parts),
        experience=np.repeat(np.arange(len(parts)), [len(part) for part in parts]),
        experiences=groups,
        test_rows=np.arange(len(data.test_labels)),
        test_experience=table[data.test_labels],
    )


def _order(class_order: ClassOrder, part_sizes: list[int], random: np.random.RandomState) -> list[int]:
    classes = range(sum(part_sizes))
    if class_order == "natural":
        return list(classes)
    if class_order == "shuffled":
        firsts = np.cumsum([0, *part_sizes[:-1]])
        parts = [first + random.permutation(size) for first, size in zip(firsts, part_sizes, strict=True)]
        return np.concatenate(parts).tolist()
    if isinstance(class_order, str) or sorted(class_order) != list(classes):
        raise ValueError(f"class_order: expected natural, shuffled or every class once, got {class_order!r}")
    return [int(label) for label in class_order]


def _limited(parts: list[np.ndarray], limit: int | None) -> list[np.ndarray]:
    if limit is None:
        return parts
    return [part[:size] for part, size in zip(parts, _shares([len(p) for p in parts], limit), strict=True)]


def _shares(sizes: list[int], limit: int) -> list[int]:
    """`limit` images over parts of these sizes in proportion, at least one each; largest remainders are rounded up."""
    if limit < len(sizes):
        raise ValueError(f"limit: expected at least {len(sizes)} images, one per experience, got {limit}")
    total = sum(sizes)
    if limit >= total:
        return sizes
    exact = [limit * size / total for size in sizes]
    shares = [max(1, int(share)) for share in exact]
    while sum(shares) > limit:  # the smallest were lifted to one image, at the largest's cost
        shares[shares.index(max(shares))] -= 1
    by_remainder = sorted(range(len(sizes)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: limit - sum(shares)]:
        shares[i] += 1
    return shares
