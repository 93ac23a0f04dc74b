"""A terminal gets a view refreshed in place with lines above it; everything else gets plain lines."""

import contextlib
import math
import os
import pty
import re
import sys
import threading
import time

import pytest

from lw_jax.core import progress as live_module
from lw_jax.core.errors import UserError
from lw_jax.core.progress import Live

TEXTS = ["loss 2.125", "0.42 s/step"]


class Terminal:
    """Is standard output while it is entered: 110 columns; `sent` is what it was sent."""

    def __enter__(self):
        self.parent, child = pty.openpty()
        self.chunks: list[bytes] = []
        self.reader = threading.Thread(target=self.drain, daemon=True)
        self.reader.start()
        self.stream = os.fdopen(child, "w", encoding="utf-8")
        self.redirection = contextlib.redirect_stdout(self.stream)
        self.redirection.__enter__()
        return self

    def __exit__(self, *error):
        self.redirection.__exit__(*error)
        self.stream.close()
        self.reader.join(10)
        os.close(self.parent)
        self.sent = b"".join(self.chunks).decode()

    def drain(self) -> None:
        with contextlib.suppress(OSError):  # so Linux ends a terminal whose other side is closed: EIO
            while chunk := os.read(self.parent, 4096):
                self.chunks.append(chunk)


@pytest.fixture
def terminal(monkeypatch):
    for name, value in (("TERM", "xterm"), ("COLUMNS", "110"), ("LINES", "30")):
        monkeypatch.setenv(name, value)
    return Terminal()


ERASE = "\x1b[2K"  # a line
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


def test_plain_lines_are_the_trainers(capsys):
    with Live(60, 20) as live:
        live.show_line("first step in 3s")
        live.advance(21)
        live.update(21, TEXTS, math.nan)
        live.update(30, TEXTS, 200.0)
    assert capsys.readouterr().out == (
        "first step in 3s\n"
        "step 21/60  loss 2.125  0.42 s/step  left -\n"
        "step 30/60  loss 2.125  0.42 s/step  left 3m 20s\n"
    )


def test_process_that_is_not_the_first_shows_nothing(terminal, hurried, monkeypatch):
    monkeypatch.setattr(live_module, "is_first_process", lambda: False)
    with terminal, contextlib.redirect_stderr(terminal.stream):
        with Live(60, enabled=False, devices=lambda: ["61 GB"]) as live:
            live.show_line("first step in 3s")
            live.update(30, TEXTS, 200.0)
        with live_module.phase("reading texts", 4):
            time.sleep(0.05)
    assert terminal.sent == ""


def test_terminal_is_refreshed_in_place_and_lines_stand_above(terminal, hurried, capsys):
    long = "[bold]checkpoint[/] :smile: " + "x" * 120
    with terminal, Live(60, devices=lambda: ["61.0 of 80.0 GB"]) as live:
        live.update(1, TEXTS, math.nan)
        live.show_line(long)
        print("printed by another module")
        print("warning", file=sys.stderr)
        with live_module.phase("validation", 4) as done:
            done.advance()
            time.sleep(0.6)
        live.update(3, ["loss 1.5"], 7500.0)
        live.advance(4)
    assert terminal.sent.count(ERASE) > 3, "in place of the one before"
    sent = CODES.sub("", terminal.sent.replace(ERASE, "\n"))
    lines = [line.rstrip() for line in sent.splitlines() if line.strip()]
    assert {long, "printed by another module"} <= set(lines), "no markup is read, no line is broken"
    bar, *report = lines[-3:]
    assert bar.startswith("step 4/60 ")
    assert report == ["loss 1.5", "61.0 of 80.0 GB  left 2h 05m"]
    assert "validation: 1 of 4" in terminal.sent, "a second bar of the view"
    assert capsys.readouterr().err == "warning\n", "errors go where standard error goes"


def test_terminal_without_a_movable_cursor_gets_plain_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with terminal, Live(60) as live:
        live.update(30, TEXTS, 200.0)
    assert terminal.sent.replace("\r", "") == "step 30/60  loss 2.125  0.42 s/step  left 3m 20s\n"


@pytest.fixture
def hurried(monkeypatch):
    """Lines of phases come every hundredth of a second."""
    monkeypatch.setenv(live_module.SECONDS, "0.01")


def test_phase_that_lasts_tells_done_total_and_time_left(hurried, capsys):
    with live_module.phase("reading texts", 4, "batches") as done:
        for _ in done.track(range(4)):
            time.sleep(0.05)
    out, err = capsys.readouterr()
    assert out == "", "results alone go to standard output"
    first, *_, last = err.splitlines()
    assert first == "reading texts: 0 of 4 batches, 0s so far" and last == "reading texts: done in 0s"
    assert re.search(r"reading texts: [23] of 4 batches, left 0s", err)


def test_parts_done_before_do_not_shorten_the_time_left(monkeypatch):
    moment = [0.0]
    monkeypatch.setattr(live_module.time, "monotonic", lambda: moment[0])
    work = live_module._Phase("asking", 100, "batches")
    for before in (40, 50):
        work.skip(before)
        moment[0] += 3.0
        work.advance()
    assert str(work) == "asking: 92 of 100 batches, left 24s"


def test_innermost_phase_tells_and_one_that_failed_is_over(hurried, capsys):
    with live_module.phase("outer", ends=False):
        with pytest.raises(OSError), live_module.phase("inner", 2):
            time.sleep(0.05)
            raise OSError
        inner = capsys.readouterr().err
        time.sleep(0.05)
    assert "outer" not in inner and "inner: 0 of 2" in inner
    assert set(capsys.readouterr().err.splitlines()) == {"outer: 0s"}


@pytest.mark.parametrize("given", ["soon", "0", "nan"])
def test_seconds_that_are_no_time_are_refused(monkeypatch, given):
    monkeypatch.setenv(live_module.SECONDS, given)
    with pytest.raises(UserError, match=f"{live_module.SECONDS}='{given}'"), live_module.phase("reading texts"):
        raise AssertionError
