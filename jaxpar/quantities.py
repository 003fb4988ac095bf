"""Numbers with their units, for people; imports no JAX."""

UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def quantity(value: float, unit: str) -> str:
    """Three significant digits and a decimal prefix.

    Example:
        >>> quantity(84_942_979_072, "B"), quantity(0, "B"), quantity(512, "B")
        ('84.9 GB', '0 B', '512 B')
    """
    for size, prefix in UNITS:
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def seconds(value: float) -> str:
    """A time in the unit that suits it.

    Example:
        >>> seconds(0.0021), seconds(3.2), seconds(4e-6), seconds(1e-9), seconds(0)
        ('2.1 ms', '3.2 s', '4 µs', '< 1 µs', '0')
    """
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return "< 1 µs" if value else "0"


def percent(share: float) -> str:
    """A share in whole per cent.

    Example:
        >>> percent(0.523), percent(0.0001), percent(0)
        ('52%', '< 1%', '0%')
    """
    return "< 1%" if 0 < share < 0.005 else f"{share:.0%}"
