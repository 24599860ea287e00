"""``distkit``, or ``python -m lightning_distkit.cli``: questions that are answered by measuring."""
