"""The sequence of ``numpy.random.RandomState(seed).randint``, which torch's PowerSGD seeds its factors with.

Source: Matsumoto and Nishimura, 1998, MT19937. Python's own generator is the same one, but seeded otherwise.
"""

from __future__ import annotations

from random import Random


class SeedSequence:
    """Integers below `END`, the same for the same seed on every rank; its whole state is how many were drawn."""

    END = 10**9

    def __init__(self, seed: int, n_drawn: int = 0) -> None:
        self.seed = seed
        self.n_drawn = 0
        words = [seed & 0xFFFFFFFF]
        for i in range(1, 624):
            words.append((1812433253 * (words[-1] ^ (words[-1] >> 30)) + i) & 0xFFFFFFFF)
        self._random = Random()
        self._random.setstate((3, (*words, 624), None))
        for _ in range(n_drawn):
            self.draw()

    def draw(self) -> int:
        """The next one."""
        self.n_drawn += 1
        while True:
            value = self._random.getrandbits(32) & 0x3FFFFFFF
            if value < self.END:
                return value
