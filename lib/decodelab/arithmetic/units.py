"""Units: GB is 1e9 bytes, GiB is 2**30 bytes. All formatting of quantities lives here and nowhere else.

Bandwidth, traffic and FLOPs are decimal. GiB is for allocated capacity only.
"""

from math import isfinite

GB = 10**9
GIB = 2**30

_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def significant(value: float, digits: int = 4) -> str:
    """`value` with `digits` significant digits, thousands separated, never in exponent form below 1e15.

    >>> significant(77.2997), significant(1342.0), significant(0.0031269)
    ('77.30', '1,342', '0.003127')
    """
    if not isfinite(value):
        return "-"
    if value == 0:
        return "0"
    exponent = int(f"{abs(value):.{digits - 1}e}".split("e")[1])
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def _scaled(value: float, base: int, prefixes: tuple[str, ...], digits: int) -> tuple[float, str]:
    """The value divided by the largest power of `base` that leaves at least 1 before the point, as rounded to `digits`."""
    for prefix in prefixes[:-1]:
        if not isfinite(value) or abs(value) < base * (1 - 0.5 / 10**digits):
            return value, prefix
        value /= base
    return value, prefixes[-1]


def format_bytes(value: float, digits: int = 4) -> str:
    """Bytes moved or stored in a file, decimal.

    >>> format_bytes(7e9 * 2), format_bytes(100e12 * 16 / 8)
    ('14.00 GB', '200.0 TB')
    """
    scaled, prefix = _scaled(value, 1000, _DECIMAL, digits)
    return f"{int(value)} B" if not prefix and isfinite(value) and value == int(value) else f"{significant(scaled, digits)} {prefix}B"


def format_capacity(value: float, digits: int = 4) -> str:
    """Allocated memory in bytes, binary.

    >>> format_capacity(83e9), format_capacity(7e9 * 2), format_capacity(100e12 * 16 / 8)
    ('77.30 GiB', '13.04 GiB', '181.9 TiB')
    """
    scaled, unit = _scaled(value, 1024, _BINARY, digits)
    return f"{significant(scaled, digits)} {unit}"


def _format_scaled(value: float, unit: str, digits: int) -> str:
    scaled, prefix = _scaled(value, 1000, _DECIMAL, digits)
    return f"{significant(scaled, digits)} {prefix}{unit}"


def format_bandwidth(value: float, digits: int = 3) -> str:
    """Bytes per second, decimal.

    >>> format_bandwidth(4.8e12), format_bandwidth(2**30 / 1e-3, 5)
    ('4.80 TB/s', '1.0737 TB/s')
    """
    return _format_scaled(value, "B/s", digits)


def format_flops(value: float, digits: int = 3) -> str:
    """A count of floating-point operations (a multiply-add is 2)."""
    return _format_scaled(value, "FLOP", digits)


def format_flop_rate(value: float, digits: int = 3) -> str:
    """Floating-point operations per second."""
    return _format_scaled(value, "FLOP/s", digits)


def format_seconds(value: float, digits: int = 3) -> str:
    """A duration in the largest unit that leaves at least 1 before the point.

    >>> format_seconds(0.0031269), format_seconds(32.66), format_seconds(13e-6)
    ('3.13 ms', '32.7 s', '13.0 µs')
    """
    if abs(value) < 1e-12 or not isfinite(value):
        return f"{significant(value if not isfinite(value) else 0)} s"
    scale, unit = next(((s, u) for s, u in _SECONDS if abs(value) >= s * (1 - 5e-4)), _SECONDS[-1])
    return f"{significant(value / scale, digits)} {unit}"


def format_count(value: float) -> str:
    """A whole count with thousands separated.

    >>> format_count(124439808)
    '124,439,808'
    """
    return f"{round(value):,}" if isfinite(value) else "-"


def format_percent(fraction: float, digits: int = 3) -> str:
    """A fraction as a percentage; close to 100 % it keeps the digits that tell it from 100.

    >>> format_percent(0.0812), format_percent(0.999904), format_percent(1.0)
    ('8.12 %', '99.9904 %', '100 %')
    """
    if fraction == 1:
        return "100 %"
    if 0.995 <= fraction < 1:
        missing = significant((1 - fraction) * 100, 2)
        return f"{100 - float(missing):.{len(missing.partition('.')[2])}f} %"
    return f"{significant(fraction * 100, digits)} %"


def format_rate(count: float, seconds: float, unit: str = "tokens/s") -> str:
    """A count per second, or "-" where nothing was counted or no time passed (never nan).

    >>> format_rate(64, 0.64), format_rate(0, 0.0)
    ('100 tokens/s', '-')
    """
    return f"{significant(count / seconds, 3)} {unit}" if count and seconds > 0 else "-"
