"""Numbers with units, for tables and pages."""

PREFIXES = {1e15: "P", 1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k"}


def prefix_of(value: float) -> tuple[float, str]:
    """The largest prefix of units that is below a value, as number and letter."""
    return next(((size, letter) for size, letter in PREFIXES.items() if abs(value) >= size), (1.0, ""))


def scaled(value: float, unit: str) -> str:
    """A value with up to four digits and its unit: 25.77 GB."""
    size, letter = prefix_of(value)
    return f"{value / size:.4g} {letter}{unit}".strip()


def size_text(size: float) -> str:
    """Bytes in GB; small ones in a smaller unit."""
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 or not size else scaled(size, "B")


def gigabytes(size: float) -> str:
    """Bytes as a cell of a column in GB; sizes that would be 0.00 have a unit of their own."""
    return f"{size / 1e9:,.2f}" if size >= 5e6 or not size else scaled(size, "B")


def duration(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
