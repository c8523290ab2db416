"""`Learner(graph=True)` without a GPU: a tape of the operators stands in for the CUDA graph."""

import copy
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from helpers import random_images, random_labels, small_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import levit
from levit.graph import WARM_UP
from levit_kernels import use_backend


class Tape(TorchDispatchMode):
    """Like a CUDA graph: capturing leaves no trace but memory for results, replaying writes into what was captured."""

    made = 0

    def __init__(self):
        super().__init__()
        Tape.made += 1
        self.calls, self.before, self.born = [], [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "equal"), f"{func} waits"
        written = [a for a, s in zip(args, func._schema.arguments, strict=False) if s.is_write]
        written += [kwargs[s.name] for s in func._schema.arguments if s.is_write and s.name in kwargs]
        if func.overloadpacket.__name__ == "native_batch_norm":
            written += args[3:5]  # the running statistics, which its schema does not mention
        for x in tree_leaves(written):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.born:
                self.before.append((x, x.clone()))
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        if all(r.alias_info is None for r in func._schema.returns):
            self.born |= {x.untyped_storage().data_ptr() for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
        return out

    def undo(self):
        with torch.no_grad():
            for x, before in reversed(self.before):
                x.copy_(before)

    def replay(self):
        with torch.no_grad():
            for func, args, kwargs, out in self.calls:
                fresh = all(r.alias_info is None for r in func._schema.returns)
                found = func(*args, **kwargs) if fresh or func._schema.is_mutable else out
                if fresh:
                    for kept, new in zip(tree_leaves(out), tree_leaves(found), strict=True):
                        if isinstance(kept, torch.Tensor):
                            kept.copy_(new)


@pytest.fixture
def tapes(monkeypatch):
    """CUDA as far as a captured step asks for it, without the kernels that a CPU has."""

    @contextmanager
    def capture(tape):
        with tape:
            yield
        tape.undo()

    def stream():
        return SimpleNamespace(wait_stream=lambda other: None)

    monkeypatch.setattr("levit.learner._on_gpu", lambda model: True)
    fakes = dict(CUDAGraph=Tape, graph=capture, Stream=stream, current_stream=stream)
    fakes |= dict(stream=lambda s: nullcontext(), device=lambda d: nullcontext())
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(Tape, "made", 0)
    with use_backend("torch"):
        yield


def run(learner, batches, first=0):
    found = []
    for i in range(first, batches):
        batch = random_images(learner.cfg, 4, torch.float64, seed=100 + i), random_labels(learner.cfg, 4, seed=i)
        found.append(learner.observe(*batch))
    return found


def make(graph):
    cfg = small_config(gamma=1e-9, updates_per_batch=2)
    return levit.Learner(levit.LEViT(cfg).double(), graph=graph)


@pytest.mark.usefixtures("tapes")
def test_replayed_steps_are_those_that_would_have_been_made_and_each_expert_is_captured_anew():
    plain, captured = make(False), make(True)
    for got, want in zip(run(captured, 14), run(plain, 14), strict=True):
        assert got.expanded == want.expanded and got.loss == want.loss
    assert plain.model.num_experts == 3 and Tape.made == 3
    for (name, got), want in zip(captured.model.state_dict().items(), plain.model.state_dict().values(), strict=True):
        assert torch.equal(got, want), name


@pytest.mark.usefixtures("tapes")
def test_a_saved_state_goes_on_with_and_without_graph():
    captured = make(True)
    run(captured, 4)
    state, want = copy.deepcopy(captured.state_dict()), None
    for graph in (False, True):
        other = make(graph)
        other.load_state_dict(copy.deepcopy(state))
        losses = [event.loss for event in run(other, 8, first=4)]
        want = want or losses
        assert losses == want and len(losses) > WARM_UP


def test_without_a_gpu_it_is_refused():
    with pytest.raises(ValueError, match="graph=True needs a CUDA device, but the model is on cpu"):
        make(True)
