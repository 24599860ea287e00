"""A namespace sets skip tensors of the same name apart."""

from __future__ import annotations

import uuid


class Namespace:
    """Skip tensors of one name in two namespaces are two. It is equal to its copies, and to nothing else."""

    __slots__ = ("id",)

    def __init__(self) -> None:
        self.id = uuid.uuid4()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.id == other.id

    def __lt__(self, other: Namespace) -> bool:
        return self.id < other.id  # any order will do

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<Namespace {str(self.id)[:8]}>"
