"""Accuracy over a stream, per sample; every definition in one place.

R is the accuracy matrix, [T, T]: R[i, j] is the accuracy (0 to 1) on the test images of experience j after experience i
of the stream, 0-based; NaN where no evaluation was made. A prediction is always made for one image alone, over all
classes, and never knows the experience; the one exception is labelled `by-task (leaks)`.

What a run costs stands in its results.json too (`levit.train`): updates per sample (optimizer steps / images of the
stream), samples per second and seconds per thousand images (of learning: neither evaluation nor files), parameters
(all experts'), and peak memory (the process's largest resident size, the data set included).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from levit.streams import Images, TestSet

EVALUATION_BATCH = 256


def answers(
    model: nn.Module, images: Images | Tensor, device: torch.device | str = "cpu"
) -> tuple[np.ndarray, np.ndarray]:
    """The label of every image [n, C, S, S], argmax over all classes, and the expert that said so: [n] int64 each."""

    def answer(batch: Tensor) -> Tensor:
        logits, routes = model.answer(batch)
        return torch.stack([logits.argmax(dim=1), routes], dim=1)

    predicted, chosen = _joined(_batches(images, device, answer)).T
    return predicted, chosen


def accuracy(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Share of the images whose label was predicted: [n], [n] → 0 to 1. Over a whole test set: per-sample accuracy."""
    return float((predicted == labels).mean())


def accuracy_by_experience(
    predicted: np.ndarray, labels: np.ndarray, experience: np.ndarray, count: int
) -> list[float]:
    """A row of R: the accuracy on each experience's test images; `experience` [n] says whose an image is."""
    return [accuracy(predicted[experience == j], labels[experience == j]) for j in range(count)]


def average_accuracy(matrix: np.ndarray) -> float:
    """mean_j R[T-1, j]: every experience counts alike, however many test images it has."""
    return float(np.asarray(matrix, dtype=float)[-1].mean())


def anytime_accuracy(matrix: np.ndarray) -> float:
    """mean_i A_i with A_i = mean_{j ≤ i} R[i, j], the accuracy on what was seen so far; over the evaluated i."""
    matrix = np.asarray(matrix, dtype=float)
    return float(np.mean([matrix[i, : i + 1].mean() for i in _evaluated(matrix)]))


def forgetting(matrix: np.ndarray) -> list[float | None]:
    """F_i = mean_{j < i} (max_{j ≤ l < i} R[l, j] − R[i, j]) after each experience from the second on.

    What was lost of each experience seen before since its best moment; negative where it gained. Counted over the
    evaluated rows; None where a row, or every earlier row of the experiences before it, is missing.

    Returns:
        [T-1], the last being the forgetting of the run.
    """
    matrix = np.asarray(matrix, dtype=float)
    evaluated = _evaluated(matrix)
    result: list[float | None] = []
    for i in range(1, len(matrix)):
        earlier = {j: [matrix[row, j] for row in evaluated if j <= row < i] for j in range(i)}
        losses = [max(best) - matrix[i, j] for j, best in earlier.items() if best]
        result.append(float(np.mean(losses)) if losses and i in evaluated else None)
    return result


def backward_transfer(matrix: np.ndarray) -> float | None:
    """BWT = mean_{j < T-1} (R[T-1, j] − R[j, j]) over the j whose own end was evaluated; None where none was."""
    matrix = np.asarray(matrix, dtype=float)
    changes = [matrix[-1, j] - matrix[j, j] for j in _evaluated(matrix)[:-1]]
    return float(np.mean(changes)) if changes else None


def route_accuracy(chosen: np.ndarray, kinds: np.ndarray, seen: Sequence[Sequence[int]]) -> float:
    """Share of the test images whose expert was trained on images of their kind; an upper bound of what routing can do.

    A kind is a class, or a class under one permutation of the pixels (`levit.streams.Stream.kinds`): an expert that
    never saw one cannot be right but by transfer or luck. Only the evaluator knows what an expert has seen.

    Args:
        chosen: [n] the expert of each image.
        kinds: [n] the kind of each image.
        seen: how many images of each kind the stream showed while the expert was the active one, [K][kinds]; experts
            beyond the list have seen nothing.
    """
    counts = np.zeros((max(len(seen), chosen.max() + 1), len(seen[0])))
    counts[: len(seen)] = seen
    return float((counts[chosen, kinds] > 0).mean())


def by_task_accuracy(model: nn.Module, test: TestSet, count: int, device: torch.device | str = "cpu") -> float:
    """The protocol `by-task (leaks)`: one expert per experience's test set, argmin of its summed VAE loss.

    It tells the model which images belong together, so it may only ever be shown under that label, to compare with
    figures that were published that way. `count` is the number of experiences.
    """
    correct = 0
    for part in map(test.of_experience, range(count)):
        loss = sum(batch.sum(0) for batch in _batches(part.images, device, model.elbo_loss))
        expert = int(loss.argmin())
        answer = lambda images, k=expert: model.forward_expert(images, k).argmax(dim=1)  # noqa: E731
        correct += int((_joined(_batches(part.images, device, answer)) == part.labels).sum())
    return correct / len(test)


def summary(matrix: np.ndarray) -> dict[str, float | None]:
    """The figures of a run that follow from its accuracy matrix."""
    losses = forgetting(matrix)
    return {
        "average_accuracy": average_accuracy(matrix),
        "anytime_accuracy": anytime_accuracy(matrix),
        "forgetting": losses[-1] if losses else None,
        "backward_transfer": backward_transfer(matrix),
    }


def _evaluated(matrix: np.ndarray) -> list[int]:
    return [i for i, row in enumerate(matrix) if not np.isnan(row).any()]


def _joined(batches: Iterator[Tensor]) -> np.ndarray:
    return torch.cat(list(batches)).cpu().numpy()


@torch.no_grad()
def _batches(
    images: Images | Tensor, device: torch.device | str, function: Callable[[Tensor], Tensor]
) -> Iterator[Tensor]:
    for first in range(0, len(images), EVALUATION_BATCH):
        yield function(images[first : first + EVALUATION_BATCH].to(device))
