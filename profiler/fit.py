"""Lines through measured transfer times: seconds = latency + bytes / bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import lsq_linear


class Line(NamedTuple):
    """Latency in seconds and bandwidth in bytes per second."""

    latency_s: float
    bytes_per_s: float


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line with the least squared *relative* errors, latency and slope not negative.

    Relative, as sizes span five orders of magnitude and the large ones would drown the latency.
    """
    size, time = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    rows = np.stack([np.ones_like(size), size], axis=1) / time[:, None]
    scale = np.array([time.min(), time.max() / size.max()])  # unknowns of about one
    found = lsq_linear(rows * scale, np.ones_like(size), bounds=(0, np.inf)).x * scale
    slope = float(found[1])
    # A slope of zero says only that the largest message was too small to tell.
    fastest = float(size.max() / time.max()) * 1e3
    return Line(float(found[0]), 1 / slope if slope > 1 / fastest else fastest)
