"""Why a model's training on shares of a batch differs from training on all of it."""

import meshwright as mw
import pytest
import torch
from meshwright.executor.launch.attribution import batch_buffers, mixing_cause, restless_module
from meshwright.executor.launch.verify import STATE
from torch import nn
from torch.nn import functional as F

WIDTH = 4


class Inner(nn.Module):
    """A linear layer, and what ``after`` makes of its result."""

    def __init__(self, after) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.after = after

    def forward(self, x):
        return self.second(self.after(self.first(x)))


class Centred(nn.Module):
    """Subtracts the mean over the batch."""

    def forward(self, x):
        return x - x.mean(0)


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.rand(())


class Ranged(nn.Module):
    """Keeps the largest value it has seen and the least, in a new tensor each time, as quantization
    does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("most", torch.zeros(1))
        self.register_buffer("least", torch.zeros(1))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.most = torch.maximum(self.most, x.detach().max())
        self.least = torch.minimum(self.least, x.detach().min())
        self.calls += 1
        return x


def workload(after, loss=F.cross_entropy) -> mw.Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Inner(after)).double()
    return mw.Workload("test", model, make_batch, loss)


def make_batch(size: int) -> mw.Batch:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
    return mw.Batch((x,), torch.arange(size) % 3)


def cause(found: mw.Workload) -> str:
    return mixing_cause(found, make_batch(5), STATE[torch.float64].share)


@pytest.mark.parametrize("after", [nn.ReLU(), nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)])
def test_what_treats_samples_one_by_one_is_no_cause(after):
    assert cause(workload(after)) == ""


def test_the_module_that_compares_samples_is_named():
    assert cause(workload(Centred())).startswith("module '1.after' computes over the batch")


def test_a_function_is_told_by_the_module_that_calls_it():
    found = workload(torch.relu)
    found.model[1].after = lambda x: x - x.mean(0)
    assert cause(found).startswith("module '1' computes over the batch")


def test_batch_norm_without_running_statistics_is_named():
    after = nn.BatchNorm1d(WIDTH, track_running_stats=False)
    assert cause(workload(after)).startswith("module '1.after' computes")


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, target: F.cross_entropy(output, target, reduction="sum"),
        lambda output, target: F.cross_entropy(output @ output.T, torch.arange(len(target))),
    ],
)
def test_a_loss_that_is_no_mean_over_samples_is_told(loss):
    assert cause(workload(nn.ReLU(), loss)).startswith("the loss of 5 samples is not the mean")


def test_the_buffer_that_keeps_what_it_finds_in_the_samples_is_named():
    def kept(after):
        return batch_buffers(workload(after), make_batch(5), STATE[torch.float64].share)

    assert cause(workload(Ranged())) == ""
    found = kept(Ranged())
    # The largest is in one half of the samples, the least in the other.
    assert list(found) == ["1.after.most", "1.after.least"]
    assert found["1.after.most"].startswith("module '1.after' keeps in buffer '1.after.most'")
    assert kept(nn.BatchNorm1d(WIDTH)) == {}


@pytest.mark.parametrize("after", [nn.BatchNorm1d(WIDTH), Ranged()])
def test_a_model_is_left_as_it_was(after):
    found = workload(after)
    before = {name: t.clone() for name, t in found.model.state_dict().items()}
    cause(found)
    batch_buffers(found, make_batch(5), STATE[torch.float64].share)
    restless_module(found.model, make_batch(5))
    assert all(m.training for m in found.model.modules())
    assert all(torch.equal(t, before[name]) for name, t in found.model.state_dict().items())
    assert not any(m._forward_hooks for m in found.model.modules())


def test_the_module_that_draws_is_named():
    assert restless_module(workload(Noisy()).model, make_batch(5)) == "1.after"
    assert restless_module(workload(nn.ReLU()).model, make_batch(5)) is None


def test_a_model_that_takes_another_way_each_time_is_random():
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(20))

        def forward(self, x):
            for layer in self.layers:
                if torch.rand(()) > 0.5:
                    x = layer(x)
            return x

    assert restless_module(Dropping().double(), make_batch(5)) == ""


@pytest.mark.filterwarnings("ignore:.*spectral_norm:FutureWarning")
def test_what_follows_from_buffers_is_not_random():
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(WIDTH, 3))).double()
    assert restless_module(model, make_batch(5)) is None


def test_a_module_on_samples_in_the_second_dimension_is_no_cause():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.RNN(1, WIDTH)

        def forward(self, x):
            return self.inner(x.T.unsqueeze(-1))[0][-1]

    torch.manual_seed(0)
    assert cause(workload(Recurrent().double())) == ""
