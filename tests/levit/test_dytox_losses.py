"""DyTox's losses, herding and memory against NumPy."""

import numpy as np
import pytest
import torch

from levit.dytox.augment import crop_and_mirror, mix_up
from levit.dytox.losses import classification_loss, distillation_loss, divergence_loss, dytox_loss
from levit.dytox.rehearsal import Rehearsal, herding

RNG = np.random.RandomState(0)
LOGITS, OLD, DIV = RNG.randn(5, 7), RNG.randn(5, 4), RNG.randn(5, 4)
HOT = np.eye(7)[[0, 6, 3, 4, 5]]
SOFT = 0.3 * HOT + 0.7 * HOT[::-1]


def bce(logits, targets):
    p = 1 / (1 + np.exp(-logits))
    return -np.mean(targets * np.log(p) + (1 - targets) * np.log(1 - p))


def kl(new, old, temperature):
    p, q = (np.exp(x / temperature) / np.exp(x / temperature).sum(1, keepdims=True) for x in (old, new[:, :4]))
    return np.mean(p * np.log(p / q)) * temperature**2


def div(logits, targets):
    return bce(logits, np.stack([t for t in [targets[:, :4].sum(1), *targets[:, 4:].T]], 1))


def tensors(*arrays):
    return [torch.from_numpy(np.ascontiguousarray(x)) for x in arrays]


@pytest.mark.parametrize("targets", [HOT, SOFT], ids=["one-hot", "mixed"])
def test_losses(targets):
    logits, old, divergence, wanted = tensors(LOGITS, OLD, DIV, targets)
    assert classification_loss(logits, wanted).item() == pytest.approx(bce(LOGITS, targets), rel=1e-12)
    for temperature in (1.0, 2.5):
        assert distillation_loss(logits, old, temperature).item() == pytest.approx(
            kl(LOGITS, OLD, temperature), rel=1e-12
        )
    assert divergence_loss(divergence, wanted).item() == pytest.approx(div(DIV, targets), rel=1e-12)
    alpha = 4 / 7
    want = (1 - alpha) * bce(LOGITS, targets) + alpha * kl(LOGITS, OLD, 2.0) + 0.1 * div(DIV, targets)
    assert dytox_loss(logits, wanted, old, divergence, 0.1, 2.0).item() == pytest.approx(want, rel=1e-12)
    assert dytox_loss(logits, wanted).item() == pytest.approx(bce(LOGITS, targets), rel=1e-12)


def test_distilling_a_model_from_itself_costs_nothing():
    (logits,) = tensors(LOGITS)
    logits.requires_grad_()
    loss = distillation_loss(logits, logits[:, :4].detach())
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-15) and logits.grad.abs().max() < 1e-15


def test_herding_follows_the_mean():
    """Oracle: every candidate tried, the mean of all chosen ones taken anew."""
    features = RNG.randn(9, 4) * RNG.rand(9, 1) * 5
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    chosen = []
    while len(chosen) < 7:
        left = [i for i in range(9) if i not in chosen]
        chosen.append(min(left, key=lambda i: np.linalg.norm(unit.mean(0) - unit[[*chosen, i]].mean(0))))
    assert herding(torch.from_numpy(features), 7).tolist() == chosen
    assert herding(torch.from_numpy(features), 3).tolist() == chosen[:3]
    assert sorted(herding(torch.from_numpy(features), 50).tolist()) == list(range(9))
    assert herding(torch.zeros(0, 4), 3).tolist() == [] == herding(torch.from_numpy(features), 0).tolist()


def test_the_memory_has_one_limit_for_all_classes():
    memory = Rehearsal(20)
    images = lambda c, n: torch.arange(n).view(n, 1, 1, 1) + 100 * c  # noqa: E731
    memory.add([images(0, 30), images(1, 4)])
    assert [len(x) for x in memory.classes] == [10, 4] and memory.per_class(5) == 4
    memory.add([images(c, 30) for c in (2, 3, 4)])
    assert [len(x) for x in memory.classes] == [4] * 5 and len(memory) == 20
    stored, labels = memory.all()
    assert torch.equal(stored.flatten(), torch.cat([images(c, 4).flatten() for c in range(5)]))
    assert labels.tolist() == [c for c in range(5) for _ in range(4)]
    other = Rehearsal(20)
    other.load_state_dict(memory.state_dict())
    assert torch.equal(other.all()[0], stored)
    with pytest.raises(ValueError, match="memory: expected a capacity of 3 images, got 20"):
        Rehearsal(3).load_state_dict(memory.state_dict())


def test_crop_and_mirror_moves_each_image_by_itself():
    images = torch.arange(1, 1 + 40 * 64).view(40, 1, 8, 8).float()
    got = crop_and_mirror(images, torch.Generator().manual_seed(0))
    seen = set()
    for before, after in zip(images[:, 0].numpy(), got[:, 0].numpy(), strict=True):
        room = np.pad(before, 1)
        matches = [
            (i, j, mirrored)
            for i in range(3)
            for j in range(3)
            for mirrored in (False, True)
            if np.array_equal(after, room[i : i + 8, j : j + 8][:, :: -1 if mirrored else 1])
        ]
        assert len(matches) == 1
        seen.add(matches[0])
    assert len(seen) > 10
    assert torch.equal(got, crop_and_mirror(images, torch.Generator().manual_seed(0)))


def test_mix_up_mixes_images_as_it_mixes_targets():
    images, labels = torch.rand(5, 3, 4, 4), torch.tensor([0, 1, 2, 1, 0])
    state = np.random.get_state()[1].copy()
    mixed, targets = mix_up(images, labels, 0.8, 3, seed=4)
    assert (np.random.get_state()[1] == state).all()
    assert mixed.shape == (4, 3, 4, 4) and targets.shape == (4, 3)
    share = targets[0, 0].item()
    assert 0 < share < 1
    torch.testing.assert_close(mixed, share * images[:4] + (1 - share) * images[:4].flip(0))
    hot = torch.eye(3)[labels[:4]]
    torch.testing.assert_close(targets, share * hot + (1 - share) * hot.flip(0))
    assert torch.equal(mixed, mix_up(images, labels, 0.8, 3, seed=4)[0])
