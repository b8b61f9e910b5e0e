from __future__ import annotations

from typing import Any


def splitmix64(x: Any) -> Any:
    """Returns another number for each int64, which looks random, in an array or a tensor like x.

    It is the finaliser of SplitMix64, a bijection (Steele et al. 2014).

    x: an int64 array of numpy or tensor of torch, whose products wrap around.
    """
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Any, bits: int) -> Any:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # int64 shifts in copies of its sign: clear them


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


ODD_1, ODD_2 = 0x2127599BF4325C37, 0x6A09E667F3BCC909  # any odd numbers
MOST = (1 << 63) - 1


def mix63(x: Any) -> Any:
    """Returns another number of 63 bits for each, which looks random. It is a bijection, and 0
    stays 0.

    x: an int64 array of numpy or tensor of torch, of numbers that are not negative.
    """
    x = ((x ^ (x >> 32)) * ODD_1) & MOST
    x = ((x ^ (x >> 29)) * ODD_2) & MOST
    return x ^ (x >> 32)


def unmix63(x: Any) -> Any:
    """Returns the number of which `mix63` makes x."""
    x = ((x ^ (x >> 32)) * pow(ODD_2, -1, 1 << 63)) & MOST
    x = ((x ^ (x >> 29) ^ (x >> 58)) * pow(ODD_1, -1, 1 << 63)) & MOST
    return x ^ (x >> 32)
