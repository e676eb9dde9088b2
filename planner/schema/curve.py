"""Measured curves: a quantity at a few sizes, read between and beyond them."""

from __future__ import annotations

from bisect import bisect_left

from .record import Record


class Curve(Record, frozen=True, kw_only=True):
    """A quantity ``y`` (seconds or bytes) at sizes ``x`` (samples or bytes), piecewise linear.

    Below the first size the line from the first two points is followed, never under the first value
    in proportion; beyond the last the line from the last two, never falling. At size zero the value
    is zero.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.x or len(self.x) != len(self.y):
            raise ValueError(f"a curve needs as many x as y, got {len(self.x)} and {len(self.y)}")
        if any(b <= a for a, b in zip(self.x, self.x[1:], strict=False)) or self.x[0] <= 0:
            raise ValueError(f"a curve's x must be positive and rising, got {self.x}")
        if min(self.y) < 0:
            raise ValueError(f"a curve's y must not be negative, got {min(self.y)}")

    def __call__(self, size: float) -> float:
        """The value at ``size``."""
        if size <= 0:  # a rank without samples does no work and sends nothing
            return 0.0
        if len(self.x) == 1:  # one measurement says only that it grows with size
            return self.y[0] * size / self.x[0]
        right = min(max(bisect_left(self.x, size), 1), len(self.x) - 1)
        x0, x1, y0, y1 = self.x[right - 1], self.x[right], self.y[right - 1], self.y[right]
        slope = (y1 - y0) / (x1 - x0)
        # Noise may let the last two measurements fall: a larger size never takes less.
        if size > self.x[-1]:
            return y1 + max(slope, 0.0) * (size - x1)
        value = y0 + slope * (size - x0)
        # Nor does noise in the first two make a part of a size take less than its share of it.
        return max(value, y0 * size / x0) if size < x0 else value

    def scaled(self, factor: float) -> Curve:
        """The same curve with every value multiplied."""
        return Curve(x=self.x, y=tuple(v * factor for v in self.y))


ZERO = Curve(x=(1.0,), y=(0.0,))


def proportional(per_size: float) -> Curve:
    """A value that grows with size from zero."""
    return Curve(x=(1.0,), y=(per_size,))
