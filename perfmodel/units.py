"""Unit constants and number formatting: SI inside, converted at the two edges.

Inside the package every quantity is in seconds, bytes, bytes per second, FLOP, FLOP/s, watts,
joules and US dollars. Files and reports convert with the constants below; bandwidths are always
decimal (1 GB/s = 1e9 B/s, never 2**30).
"""

KB, MB, GB, TB = 1e3, 1e6, 1e9, 1e12
KIB, MIB, GIB = 2**10, 2**20, 2**30
MICROSECOND, MILLISECOND, HOUR = 1e-6, 1e-3, 3600.0
MILLION = 1e6
KILOWATT, KWH, YEAR = 1e3, 3.6e6, 365 * 24 * HOUR

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def si(value: float, unit: str = "", digits: int = 3) -> str:
    """Returns `value` with a decimal SI prefix.

    >>> si(3.35e12, "B/s")
    '3.35 TB/s'
    >>> si(0.0, "B")
    '0 B'
    """
    size = abs(float(value))
    for scale, prefix in _PREFIXES:
        if size >= scale:
            return f"{value / scale:.{digits}g} {prefix}{unit}".rstrip()
    return f"{float(value):.{digits}g} {unit}".rstrip()


def seconds(value: float) -> str:
    """Returns a duration in the unit people read it in.

    >>> seconds(0.0123), seconds(3.2e-6), seconds(12.0)
    ('12.3 ms', '3.2 µs', '12 s')
    """
    size = abs(float(value))
    if size >= 1.0 or size == 0.0:
        return f"{value:.3g} s"
    if size >= MILLISECOND:
        return f"{value / MILLISECOND:.3g} ms"
    return f"{value / MICROSECOND:.3g} µs"
