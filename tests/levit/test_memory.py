"""The ring against a plain Python list."""

import random

import pytest
import torch

from levit.memory import Memory

DOUBLE = torch.zeros(1, dtype=torch.float64)


def fill(memory, positions):
    images = torch.tensor(positions, dtype=torch.float64).view(-1, 1, 1, 1).expand(-1, 1, 2, 2)
    return memory.add(images, torch.tensor(positions))


def rows(memory):
    live = memory.live()
    return sorted(memory.positions[live].tolist())


@pytest.mark.parametrize("capacity", [1, 7, 10])
def test_ring_holds_what_a_list_would(capacity):
    draw = random.Random(capacity)
    memory, expected, seen = Memory(capacity, (1, 2, 2), DOUBLE), [], 0
    for _ in range(200):
        action = draw.random()
        if action < 0.7:
            count = draw.randint(1, capacity)
            slots = fill(memory, list(range(seen, seen + count)))
            assert torch.equal(memory.labels[slots], torch.arange(seen, seen + count))
            expected = (expected + list(range(seen, seen + count)))[-capacity:]
            seen += count
        elif action < 0.97:
            count = draw.randint(0, capacity + 1)
            memory.drop_oldest(count)
            expected = expected[count:]
        else:
            memory.clear()
            expected = []
        assert rows(memory) == expected and len(memory) == len(expected) and memory.full == (len(expected) == capacity)
        assert memory.seen == seen
        live = memory.live()
        assert torch.equal(memory.images[live][:, 0, 0, 0], memory.labels[live].double())


def test_rows_never_move():
    memory = Memory(5, (1, 2, 2), DOUBLE)
    first = fill(memory, [0, 1])
    fill(memory, [2, 3, 4])
    fill(memory, [5])
    assert memory.positions[first].tolist() == [5, 1]


def test_sample_is_uniform_over_live_rows_with_replacement():
    memory = Memory(6, (1, 2, 2), DOUBLE)
    fill(memory, list(range(6)))
    fill(memory, [6, 7])
    memory.drop_oldest(1)
    drawn = memory.positions[memory.sample(5000, torch.Generator().manual_seed(0))]
    counts = torch.bincount(drawn, minlength=8)
    assert counts[:3].sum() == 0 and counts[3:].min() > 900 and counts[3:].max() < 1100


def test_arrivals_remember_the_batch():
    memory = Memory(5, (1, 2, 2), DOUBLE)
    fill(memory, [0, 1])
    slots = fill(memory, [2, 3, 4])
    assert memory.arrivals[:, slots].tolist() == [[2, 2, 2], [3, 3, 3]]


def test_state_puts_rows_back_into_their_slots():
    memory = Memory(5, (1, 2, 2), DOUBLE)
    fill(memory, [0, 1, 2, 3])
    fill(memory, [4, 5, 6])
    memory.drop_oldest(1)
    other = Memory(5, (1, 2, 2), DOUBLE)
    fill(other, [9, 9, 9])
    other.load_state_dict(memory.state_dict())
    live = memory.live()
    assert torch.equal(live, other.live()) and other.seen == 7
    assert torch.equal(memory.images[live], other.images[live]) and torch.equal(
        memory.positions[live], other.positions[live]
    )
    a, b = (m.sample(20, torch.Generator().manual_seed(1)) for m in (memory, other))
    assert torch.equal(a, b)


def test_a_state_of_another_memory_is_refused():
    memory = Memory(5, (1, 2, 2), DOUBLE)
    fill(memory, [0, 1, 2, 3])
    state = memory.state_dict()
    small, wide = Memory(3, (1, 2, 2), DOUBLE), Memory(5, (1, 3, 3), DOUBLE)
    with pytest.raises(ValueError, match="at most 3 rows, got 4"):
        small.load_state_dict(state)
    with pytest.raises(ValueError, match=r"memory.images: expected \[4, 1, 3, 3\], got \[4, 1, 2, 2\]"):
        wide.load_state_dict(state)
    assert len(small) == 0 and len(wide) == 0
