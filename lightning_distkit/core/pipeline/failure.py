"""What went wrong on one rank, in a form that crosses to the others, and the one error that all of them raise."""

from __future__ import annotations

import builtins
import contextlib
import traceback
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Failure:
    """What one rank says of an error to the others.

    Args:
        text: all that there is to say, where the error was raised included.
        kind: name of the exception's type.
        stage: which one failed, was lost or was late; -1 where it is no stage's doing.
        rank: its rank in the whole world.
        is_fatal: the channels between the ranks are not clean any more, and no later call can work.
    """

    text: str
    kind: str = "RuntimeError"
    stage: int = -1
    rank: int = -1
    is_fatal: bool = False

    @classmethod
    def of(cls, error: BaseException, doing: str, stage: int, rank: int, is_fatal: bool = False) -> Failure:
        """That of an exception raised here, while this rank was ``doing`` something."""
        where = "".join(traceback.format_exception(error))
        who = f"stage {stage} (rank {rank})" if stage >= 0 else f"rank {rank}"
        text = f"{who} raised {type(error).__name__} in {doing}: {error}\n\nOn rank {rank}:\n{where}"
        return cls(text, type(error).__name__, stage, rank, is_fatal)

    def error(self) -> StageError:
        """The error to raise: a `StageError`, and of the original's type too where that is one of Python's own."""
        return _class_of(self.kind)(self)


class StageError(RuntimeError):
    """A stage raised, was lost or was late. Every rank raises it in the same call.

    It is an instance of the original exception's type, too, where that is one of Python's own: what `except TypeError`
    catches in one process it catches on all ranks. Its ``__cause__`` is the original on the rank where that was raised.

    Attributes:
        failure: which stage it was, on which rank, and why.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure

    def __reduce__(self) -> tuple[Any, ...]:
        return (Failure.error, (self.failure,))


_classes: dict[str, type[StageError]] = {}


def _class_of(kind: str) -> type[StageError]:
    if kind not in _classes:
        _classes[kind] = StageError
        original = getattr(builtins, kind, None)
        if isinstance(original, type) and issubclass(original, Exception) and not issubclass(StageError, original):
            with contextlib.suppress(TypeError):  # an exception with a layout of its own, as UnicodeError has
                _classes[kind] = type(f"Stage{kind}", (StageError, original), {})
    return _classes[kind]
