"""What a trace tells of a forward."""

import torch
from meshwright.models.units.trace import coarse_modules, record
from meshwright.models.workload import Batch
from torch import nn


class Narrow(nn.Module):
    """Computes a part of itself in another precision, and a table of constants."""

    def __init__(self, precision):
        super().__init__()
        self.layer, self.precision = nn.Linear(4, 4), precision

    def forward(self, x):
        table = torch.arange(4.0).to(torch.float16).to(x.dtype)
        y = self.layer(x)
        return y.to(self.precision).square().to(x.dtype) + table


def coarse(*precisions, given=torch.float64):
    model = nn.Sequential(*(Narrow(p) for p in precisions)).to(given)
    return coarse_modules(record(model, Batch((torch.randn(3, 4, dtype=given),), None)), given)


def test_modules_that_compute_in_less_precision_are_found():
    double, single, half = torch.float64, torch.float32, torch.bfloat16
    assert coarse(double) == {}
    assert coarse(double, single, half, single) == {"1": single, "2": half, "3": single}
    assert coarse(double, single, half, given=single) == {"2": half}
