"""``distkit timeline``: the drawing, the numbers below it, the picture, and what cannot be drawn."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_distkit.cli.__main__ import main
from lightning_distkit.cli.timeline import timeline

ONE_F_ONE_B = """\
1f1b: 4 stages on 4 ranks, 8 micro-batches. A row is a rank; F2 is the forward of micro-batch 2, B its backward.
rank 0 F0 F1 F2 F3 ..................B0--- F4 B1--- F5 B2--- F6 B3--- F7 B4--- ...B5--- ...B6--- ...B7---
rank 1 ...F0 F1 F2 ............B0--- F3 B1--- F4 B2--- F5 B3--- F6 B4--- F7 B5--- ...B6--- ...B7--- ......
rank 2 ......F0 F1 ......B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- F6 B5--- F7 B6--- ...B7--- ............
rank 3 .........F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- F6 B6--- F7 B7--- ..................

rank 0 idle 27.3%, holds the activations of at most 4 micro-batches
rank 1 idle 27.3%, holds the activations of at most 3 micro-batches
rank 2 idle 27.3%, holds the activations of at most 2 micro-batches
rank 3 idle 27.3%, holds the activations of at most 1 micro-batch
Bubble: 27.3% of all ranks' time. The step takes 33.
With 4 ranks it is at best 2.91 times as fast as with one.
"""


@pytest.fixture(autouse=True)
def _terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["distkit", "timeline", *arguments])
    main()


def text(capsys: pytest.CaptureFixture[str]) -> str:
    return "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines())


def lines_of(capsys: pytest.CaptureFixture[str], **options: Any) -> list[dict[str, Any]]:
    timeline(**options, json_lines=True)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_schedule_is_drawn_with_its_bubble_and_what_each_rank_holds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(monkeypatch, "--schedule", "1f1b", "--stages", "4", "--chunks", "8")
    assert text(capsys) == ONE_F_ONE_B


def test_the_guide_shows_what_the_command_prints() -> None:
    guide = Path(__file__).parents[2] / "docs" / "pipeline.md"
    assert f"$ distkit timeline --schedule 1f1b --stages 4 --chunks 8\n{ONE_F_ONE_B}```" in guide.read_text()


def test_several_stages_a_rank_are_told_apart_and_a_long_drawing_is_broken_in_pieces(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    command(
        monkeypatch, "--schedule=interleaved_1f1b", "--stages=4", "--chunks=2", "--stages-per-rank=2", "--backward=1"
    )
    assert "rank 0 F0.0 F0.1 F2.0 F2.1 .....B2.0 .....B2.1 B0.0 B0.1\n" in text(capsys)
    command(monkeypatch, "--schedule=interleaved_1f1b", "--stages=4", "--chunks=3")
    pieces = text(capsys).split("\n\n")
    drawn = [[line[7:] for line in piece.splitlines() if line.startswith("rank")] for piece in pieces[:-1]]
    assert len(drawn) == 3
    labels = " ".join(" ".join(piece[0] for piece in drawn).replace(".....", " ").replace("-", "").split())
    assert labels == "F0.0 F0.1 F0.2 F2.0 F2.1 F2.2 B2.0 B2.1 B2.2 B0.0 B0.1 B0.2"


def test_costs_are_of_all_stages_or_of_each_and_a_message_takes_time(capsys: pytest.CaptureFixture[str]) -> None:
    first, *ranks = lines_of(capsys, schedule="gpipe", stages=2, chunks=1, forward=[1, 3], backward=4, message=0.5)
    assert first["duration"] == 1 + 0.5 + 3 + 4 + 0.5 + 4
    assert first["bubble"] == pytest.approx(1 - 12 / 26)
    assert ranks[1] == {
        "rank": 1,
        "bubble": pytest.approx(1 - 7 / 13),
        "live_activations": 1,
        "actions": [["F1.0", 1.5, 4.5], ["B1.0", 4.5, 8.5]],
    }


def test_interleaving_has_two_stages_a_rank_if_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    first, *ranks = lines_of(capsys, schedule="interleaved_1f1b", stages=8, chunks=8)
    assert first["about"] == "interleaved_1f1b: 8 stages on 4 ranks, 8 micro-batches"
    assert first["bubble"] == pytest.approx(3 / (2 * 8 + 3))
    assert [rank["live_activations"] for rank in ranks] == [11, 9, 7, 5]


def test_what_is_too_long_for_labels_is_still_drawn_to_scale(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    timeline("gpipe", stages=2, chunks=17, backward=2)
    lines = text(capsys).splitlines()
    backwards = "".join(f"B{i}" if i < 10 else "B-" for i in reversed(range(17)))
    for rank, expected in enumerate((f"{'F' * 17}...{backwards}", f".{'F' * 17}{backwards}..")):
        drawn = [line[7:] for line in lines if line.startswith(f"rank {rank}") and "idle" not in line]
        assert "".join(drawn) == expected
        assert [len(each) for each in drawn] == [53, 1]  # a line is 60 columns, 7 of them for the name


def test_colours_tell_forwards_from_backwards(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    timeline()
    out = capsys.readouterr().out
    assert "\x1b[1;37;44mF0\x1b[0m" in out
    assert "\x1b[1;30;42mB0---\x1b[0m" in out


@pytest.mark.parametrize("chunks", [2, 200])
def test_the_picture_is_one(chunks: int, capsys: pytest.CaptureFixture[str]) -> None:
    timeline("interleaved_1f1b", chunks=chunks, png="timeline.png", json_lines=True)
    assert Path("timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"schedule": "2f2b"}, "schedule must be one of gpipe, 1f1b, interleaved_1f1b, got '2f2b'"),
        ({"stages": 0}, "stages must be at least 1, got 0"),
        ({"chunks": 0}, "chunks must be at least 1, got 0"),
        ({"stages_per_rank": 0}, "stages_per_rank must be at least 1, got 0"),
        (
            {"schedule": "gpipe", "stages": 5, "stages_per_rank": 2},
            "stages must be a multiple of stages_per_rank, as each rank has as many, got 5 and 2; 6 would do",
        ),
        ({"stages_per_rank": 2}, "1f1b has one stage a rank, got 2; use interleaved_1f1b or gpipe"),
        ({"forward": [1, 2]}, "forward must be a cost of at least 0, or 4 of them, one a stage; got [1, 2]"),
        ({"backward": -1}, "backward must be a cost of at least 0"),
        ({"forward": 0, "backward": 0}, "forward and backward must not both cost nothing"),
        ({"message": -1}, "message must be a time of at least 0, got -1"),
        ({"png": "timeline.nonsense"}, "--png must be where a picture can be written, as timeline.png"),
        ({"png": "nowhere/timeline.png"}, "--png must be where a picture can be written"),
    ],
)
def test_what_cannot_be_drawn_is_said(options: dict[str, Any], says: str) -> None:
    with pytest.raises(SystemExit, match="^" + re.escape(says)):
        timeline(**options)


@pytest.mark.parametrize(("module", "options"), [("rich", {}), ("matplotlib", {"png": "timeline.png"})])
def test_what_is_not_installed_is_named(module: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console" if module == "rich" else module, None)
    with pytest.raises(SystemExit, match=f"needs {module}: pip install 'lightning-distkit"):
        timeline(**options)
