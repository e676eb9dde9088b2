"""Why a model's training on shares of a batch differs from training on all of it."""

import meshwright as mw
import pytest
import torch
from meshwright.executor.launch.attribution import (
    batch_buffers,
    check_mean,
    mixing_cause,
    restless_module,
    used_buffers,
)
from meshwright.executor.launch.yardstick import STATE
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


def test_a_buffer_that_a_forward_makes_anew_is_put_back():
    class Growing(nn.Linear):
        def forward(self, x):
            self.positions = torch.arange(x.shape[1], dtype=x.dtype)
            return super().forward(x + self.positions)

    model = Growing(WIDTH, 3).double()
    model.register_buffer("positions", torch.zeros(1), persistent=False)
    restless_module(model, make_batch(5))
    assert torch.equal(model.positions, torch.zeros(1))


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


def added(extra):
    """A mean over samples, and what ``extra`` makes of the model."""
    found = workload(nn.BatchNorm1d(WIDTH))
    last = found.model[1]

    class Keeping(nn.Module):
        def forward(self, x):
            self.kept = torch.dropout(x, 0.5, self.training)
            return x.relu()

    last.after = Keeping()
    mean = found.loss
    return mw.Workload(
        "added", found.model, make_batch,
        lambda output, target: mean(output, target) + extra(found.model, last.after.kept),
    )  # fmt: skip


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, target: F.cross_entropy(output, target, reduction="sum"),
        # Over a number that is no rank's own.
        lambda output, target: F.cross_entropy(output, target, reduction="sum") / 256,
        lambda output, target: F.cross_entropy(output, target) + 1e-2 * output.square().sum(),
    ],
)
def test_a_sum_over_samples_is_refused_with_the_remedy(loss):
    with pytest.raises(mw.InputError, match=r"'test' is a sum over samples.*reduction='mean'"):
        check_mean(workload(nn.BatchNorm1d(WIDTH), loss))


def test_a_sum_of_what_a_module_keeps_is_refused_despite_dropout():
    with pytest.raises(mw.InputError, match="with losses that modules keep, as a mean"):
        check_mean(added(lambda model, kept: 1e-2 * kept.square().sum()))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "found",
    [
        workload(nn.BatchNorm1d(WIDTH)),
        workload(Noisy()),
        added(lambda model, kept: kept.square().mean()),
        added(lambda model, kept: 0.1 * sum(p.square().sum() for p in model.parameters())),
    ],
    ids=["mean", "random", "kept", "weight decay"],
)
def test_means_and_weight_decay_are_let_through(found):
    check_mean(found)


def test_a_loss_that_compares_samples_is_told():
    def contrast(output, target):
        return F.cross_entropy(output @ output.T, torch.arange(len(output)))

    with pytest.warns(UserWarning, match="each rank compares those of its own share"):
        check_mean(workload(nn.ReLU(), contrast))


def by_class(output, target):
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=output.dtype)
    return F.cross_entropy(output, target, weight=weight)


def test_a_mean_over_weights_is_told_with_what_a_loop_says():
    with pytest.warns(UserWarning, match=r"'test' is a mean.*unequally.*mw.loss_weight"):
        check_mean(workload(nn.BatchNorm1d(WIDTH), by_class))
    assert "mw.loss_weight" in cause(workload(nn.ReLU(), by_class))


@pytest.mark.filterwarnings("error")
def test_a_module_that_compares_samples_is_no_weighted_mean():
    check_mean(workload(Centred()))


def test_a_model_that_takes_other_sizes_only_is_asked_with_those():
    class Fours(nn.Module):
        def forward(self, x):
            return x.view(-1, 4, WIDTH).flatten(0, 1)

    with pytest.raises(mw.InputError, match="for 4 samples"):
        check_mean(workload(Fours(), lambda output, target: output.sum()))


def test_that_a_model_computes_with_what_it_keeps_is_told():
    class Scaled(Ranged):
        """Divides by the largest value, and keeps how often it was whole."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("whole", torch.zeros(1, dtype=torch.int32))

        def forward(self, x):
            x = super().forward(x) / (1 + 1e-9 * self.most)
            self.whole = (0 * self.most).int()
            return x

    def used(after):
        found = workload(after)
        kept = batch_buffers(found, make_batch(5), STATE[torch.float64].share)
        before = {name: t.clone() for name, t in found.model.state_dict().items()}
        said = used_buffers(found, make_batch(5), kept)
        assert all(torch.equal(t, before[name]) for name, t in found.model.state_dict().items())
        return list(kept), said

    # The loss of the whole is that of its parts within what rounding may do: the buffer tells.
    assert cause(workload(Scaled())) == ""
    names, said = used(Scaled())
    assert names == ["1.after.most", "1.after.least", "1.after.whole"]
    assert said.startswith("module '1.after' keeps in buffer '1.after.most'")
    assert "the model computes with it" in said
    assert used(Ranged()) == (["1.after.most", "1.after.least"], "")
