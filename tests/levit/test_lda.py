"""Streaming LDA against scikit-learn, patch features against loops in NumPy, logistic slopes against SciPy."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from levit.lda import BLOCK, SHRINKAGE, StreamingLDA
from levit.logistic import RIDGE, fit_slopes
from levit.patch_features import FLAT, PatchFeatures


def rows_and_labels(count=600, dim=7, classes=4, seed=0):
    random = np.random.RandomState(seed)
    labels = random.randint(0, classes, count)
    means = random.randn(classes, dim)
    return means[labels] + random.randn(count, dim) @ random.randn(dim, dim), labels


def observed(rows, labels, classes=4, batches=(10,), dtype=torch.float64):
    lda = StreamingLDA(rows.shape[1], classes).to(dtype)
    rows, labels = torch.tensor(rows, dtype=dtype), torch.tensor(labels)
    first = i = 0
    while first < len(rows):
        size = batches[i % len(batches)]
        lda.observe(rows[first : first + size], labels[first : first + size])
        first, i = first + size, i + 1
    return lda


def test_equals_scikit_learn():
    rows, labels = rows_and_labels()
    lda = observed(rows, labels)
    priors = np.bincount(labels) / len(labels)
    oracle = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=SHRINKAGE, priors=priors).fit(rows, labels)
    expected = oracle.decision_function(rows) - np.log(priors)
    np.testing.assert_allclose(lda(torch.tensor(rows)).numpy(), expected, rtol=1e-9, atol=1e-9)


def test_batches_leave_no_trace_and_the_order_only_rounding():
    rows, labels = rows_and_labels(2 * BLOCK + 77)
    one = observed(rows, labels, batches=(10,))
    for batches in [(1,), (len(rows),), (3, 300, 17)]:
        other = observed(rows, labels, batches=batches).state_dict()
        assert all(torch.equal(value, other[key]) for key, value in one.state_dict().items())
    order = np.random.RandomState(1).permutation(len(rows))
    for mixed, expected in zip(observed(rows[order], labels[order]).solve(), one.solve(), strict=True):
        torch.testing.assert_close(mixed, expected, rtol=1e-9, atol=1e-9)


def test_float32_is_as_good_where_rows_are_centred():
    rows, labels = rows_and_labels(3000)
    exact, single = observed(rows, labels), observed(rows, labels, dtype=torch.float32)
    torch.testing.assert_close(single.solve()[0].double(), exact.solve()[0], rtol=1e-3, atol=1e-4)


def test_rows_without_a_label_change_nothing():
    rows, labels = rows_and_labels(50)
    hidden = np.where(np.arange(50) % 3 == 0, -1, labels)
    one, other = observed(rows, hidden), observed(rows[hidden >= 0], labels[hidden >= 0])
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in one.state_dict().items())


def test_before_anything_and_with_one_class_or_row():
    lda = StreamingLDA(3, 4).double()
    query = torch.randn(5, 3, dtype=torch.float64)
    assert torch.equal(lda(query), torch.zeros(5, 4, dtype=torch.float64))
    lda.observe(torch.ones(1, 3, dtype=torch.float64), torch.tensor([2]))
    for _ in range(2):
        logits = lda(query)
        assert logits[:, 2].isfinite().all() and (logits[:, [0, 1, 3]] == -torch.inf).all()
        assert (logits.softmax(1)[:, 2] == 1).all()
        lda.observe(torch.randn(20, 3, dtype=torch.float64), torch.full((20,), 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 0.5])
def test_rows_that_are_all_alike(value, dtype):
    lda = StreamingLDA(6, 3).to(dtype)
    lda.observe(torch.full((40, 6), value, dtype=dtype), torch.arange(40) % 2)
    probabilities = lda(torch.full((2, 6), value, dtype=dtype)).softmax(1)
    torch.testing.assert_close(probabilities, torch.tensor([[0.5, 0.5, 0]], dtype=dtype).expand(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_class_one_image_over_and_over(dtype):
    """The scatter is 0 but for rounding, which may leave it indefinite."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(10, 50, generator=generator).to(dtype) + 3
    lda = StreamingLDA(50, 10).to(dtype)
    for _ in range(40):
        lda.observe(rows, torch.arange(10))
    assert lda(rows).softmax(1).isfinite().all() and lda(rows).argmax(1).tolist() == list(range(10))


def test_two_rows_of_two_classes_decide_by_distance():
    lda = StreamingLDA(2, 2).double()
    lda.observe(torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64), torch.tensor([0, 1]))
    assert lda(torch.tensor([[0.6, 0.4], [0.1, 0.2]], dtype=torch.float64)).argmax(1).tolist() == [0, 1]


def test_a_solution_follows_what_is_loaded_or_cast():
    rows, labels = rows_and_labels(60)
    one, other = observed(rows, labels), StreamingLDA(7, 4).double()
    other.solve()
    other.load_state_dict(one.state_dict())
    assert torch.equal(other.solve()[0], one.solve()[0])
    assert one.float().solve()[0].dtype == torch.float32


def oracle_features(images, features, seed, filters, fit=None):
    """Filters from the first `fit` images and responses of all, in NumPy, one patch at a time."""
    side, stride = features.side, features.stride
    starts = range(0, images.shape[-1] - side + 1, stride)
    cut = np.array([[im[:, y : y + side, x : x + side].ravel() for y in starts for x in starts] for im in images])
    cut = cut - cut.mean(-1, keepdims=True)
    patches = cut[:fit].reshape(-1, cut.shape[-1])
    patches = patches[np.sqrt((patches**2).mean(1)) > FLAT]
    values, vectors = np.linalg.eigh(patches.T @ patches / len(patches))
    white = vectors @ np.diag((np.maximum(values, 0) + 1e-3 * values.max() + 1e-12) ** -0.5) @ vectors.T
    order = torch.randperm(len(patches), generator=torch.Generator().manual_seed(seed)).numpy()[:filters]
    drawn = patches[order] @ white
    drawn = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    responses = cut @ white @ drawn.T  # [B, positions, filters]
    threshold = 0.5 * np.sqrt((responses[:fit] ** 2).mean())
    grid = responses.reshape(len(images), len(starts), len(starts), -1)
    n, pooled = len(starts), []
    bounds = [(0, -(-n // 2)), (n // 2, n)]
    for side_of_zero in (grid, -grid):
        active = np.maximum(side_of_zero - threshold, 0)
        quarters = [[active[:, a:b, c:d].mean((1, 2)) for c, d in bounds] for a, b in bounds]
        pooled.append(np.stack([np.stack(row, -1) for row in quarters], -2).reshape(len(images), -1))
    raw = np.concatenate(pooled, 1)
    return raw - raw[:fit].mean(0)


@pytest.mark.parametrize(("channels", "size"), [(1, 8), (1, 28), (3, 32)], ids=["digits", "mnist", "cifar"])
def test_features_equal_the_formulas(channels, size):
    images = torch.rand(9, channels, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    features = PatchFeatures(channels, size, 11, seed=4).double()
    features.fit(images)
    assert features(images).shape == (9, features.dim) == (9, 88)
    np.testing.assert_allclose(
        features(images).numpy(), oracle_features(images.numpy(), features, 4, 11), rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize(("channels", "size"), [(1, 1), (1, 2), (3, 3), (3, 84)])
def test_features_of_any_size_are_finite_and_the_same_alone(channels, size):
    images = torch.rand(5, channels, size, size, dtype=torch.float64)
    features = PatchFeatures(channels, size, 10, seed=0).double()
    features.fit(images)
    together = features(images)
    assert together.isfinite().all()
    torch.testing.assert_close(torch.cat([features(image[None]) for image in images]), together, rtol=1e-12, atol=1e-12)


def test_constant_images_and_too_few_patches():
    features = PatchFeatures(1, 8, 50, seed=0)
    features.fit(torch.full((20, 1, 8, 8), 0.3))
    assert torch.equal(features(torch.rand(4, 1, 8, 8)), torch.zeros(4, features.dim))
    one = torch.full((1, 1, 8, 8), 0.3)
    one[0, 0, 0, 0] = 1.0
    features.fit(one)
    assert (
        features(torch.rand(4, 1, 8, 8)).isfinite().all() and features.kernel[0].any() and not features.kernel[1:].any()
    )


def test_features_depend_on_the_seed_and_nothing_else():
    images = torch.rand(6, 3, 12, 12)
    kernels = []
    for seed in (0, 0, 1):
        torch.rand(3)
        features = PatchFeatures(3, 12, 8, seed)
        features.fit(images)
        kernels.append(features.kernel)
    assert torch.equal(kernels[0], kernels[1]) and not torch.equal(kernels[0], kernels[2])


@pytest.mark.parametrize("case", ["both", "one is useless", "one misleads", "both mislead", "some missing"])
def test_slopes_equal_a_general_optimizer(case):
    random = np.random.RandomState(3)
    n, k = 200, 4
    own = random.randint(0, k, n)
    scores = random.randn(n, k, 2) * [5.0, 0.3]
    scores[np.arange(n), own] += {
        "one is useless": [4.0, 0.0],
        "one misleads": [4, -0.2],
        "both mislead": [-4, -0.3],
    }.get(case, [4.0, 0.2])
    if case == "some missing":
        scores[random.rand(n, k) < 0.3] = np.nan
        scores[np.arange(n), own] = 1.0
    lead = scores - scores[np.arange(n), own][:, None]
    exists = np.isfinite(lead).all(-1)
    spread = np.sqrt(np.nansum(lead**2, (0, 1)) / (exists.sum() - n))

    def objective(theta):
        z = np.where(exists, np.nan_to_num(lead) @ theta, -np.inf)
        return np.log(np.exp(z).sum(1)).sum() + RIDGE / 2 * ((theta * spread) ** 2).sum()

    expected = minimize(objective, [0.1, 0.1], bounds=[(0, None)] * 2, tol=1e-12)
    found = fit_slopes(torch.tensor(scores), torch.tensor(own)).numpy()
    assert (found >= 0).all()
    np.testing.assert_allclose(objective(found), expected.fun, rtol=1e-9)
    np.testing.assert_allclose(found, expected.x, rtol=2e-3, atol=2e-4)


def test_slopes_of_separable_and_of_equal_scores_are_finite():
    own = torch.zeros(50, dtype=torch.int64)
    scores = torch.zeros(50, 3, 1)
    assert fit_slopes(scores, own).tolist() == [0.0]
    scores[:, 0] = 1000.0
    slope = fit_slopes(scores, own)
    assert slope.isfinite().all() and slope > 0
