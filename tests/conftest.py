"""One thread, one seed per test, and NaN in all memory that nobody wrote."""

import os
import random

import numpy as np
import pytest
import torch

# They have a process of their own: test_triton.py starts it.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["levit_kernels/interpreted"]


def pytest_configure(config):
    torch.set_num_threads(1)
    # torch fills fresh memory with NaN in deterministic mode only
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(autouse=True)
def seeds():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
