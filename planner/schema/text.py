"""Durations, sizes and rates as people read them."""


def seconds(value: float) -> str:
    """A duration in the unit in which it reads best."""
    # What is less than half a nanosecond is what rounding leaves of none.
    if value < 5e-10:
        return "0"
    unit, scale = _unit_of(value)
    return f"{value * scale:.2f} {unit}" if scale < 1e6 else f"{value * scale:.0f} {unit}"


def expected(value: float, low: float | None, high: float | None) -> str:
    """A duration with the interval in which it is expected, where that is known."""
    if low is None or high is None or not value:
        return seconds(value)
    _, scale = _unit_of(value)
    ends = (f"{v:.0f}" if v >= 100 else f"{v:.3g}" for v in (low * scale, high * scale))
    return f"{seconds(value)} ({' to '.join(ends)})"


def _unit_of(value: float) -> tuple[str, float]:
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if value * scale >= 1:
            return unit, scale
    return ("µs", 1e6) if value >= 1e-6 else ("ns", 1e9)


def gap_text(gap: float) -> str:
    """The gap between a plan and its bound."""
    # Below a millionth it is what rounding leaves of none.
    if gap > 0.1:
        return f"{100 * gap:.0f}%"
    return f"{100 * gap:.2g}%" if gap > 1e-6 else "0%"


def size(count: float) -> str:
    """Bytes in the binary unit in which they read best."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def ranks(count: int) -> str:
    """So many ranks in words."""
    return "1 rank" if count == 1 else f"{count} ranks"


def samples(count: int) -> str:
    """So many samples in words."""
    return "1 sample" if count == 1 else f"{count} samples"


def rate(bytes_per_s: float) -> str:
    """A bandwidth in bits."""
    # Networks are sold by the bit, memory and messages are counted by the byte.
    gigabits = bytes_per_s * 8 / 1e9
    if gigabits < 1:
        return (
            f"{gigabits * 1000:.0f} Mbit/s" if gigabits >= 0.01 else f"{gigabits * 1000:.2g} Mbit/s"
        )
    return f"{gigabits:.2f} Gbit/s" if gigabits < 100 else f"{gigabits:.0f} Gbit/s"


def option(name: str) -> str:
    """The option of the command line for a parameter of that name."""
    return "--" + name.replace("_", "-")
