"""Whole lines from any chunks, and what a person sees on a terminal."""

import itertools
import re
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from screen import Screen

from samestep.launch.logs import (
    Assembler,
    FilePrinter,
    Source,
    Terminal,
    TerminalPrinter,
    printer,
    rank_prefix,
    terminal_from,
)

OUT0, ERR0, OUT1, OUT12 = Source(0, "stdout"), Source(0, "stderr"), Source(1, "stdout"), Source(12, "stdout")
PLAIN = Terminal(40, 10, colour=False)


def chunked(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    """Cuts `data` at the given places, wherever they are."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


def show(printer: TerminalPrinter, chunks: Sequence[tuple[Source, bytes]], close: bool = True) -> list[str]:
    """The screen after `chunks`, and, if wanted, the end of all that wrote them."""
    screen = Screen(40)
    for source, data in chunks:
        screen.write(printer.feed(source, data))
    for source in dict.fromkeys(source for source, _ in chunks) if close else ():
        screen.write(printer.close(source))
    return screen.rows


# ---- files and pipes


@given(st.binary(max_size=300), st.lists(st.integers(0, 300)))
def test_any_bytes_in_any_chunks_come_out_as_they_were(data: bytes, cuts: list[int]) -> None:
    assembler = Assembler()
    out = [assembler.feed(chunk) for chunk in chunked(data, cuts)]
    assert all(lines.endswith(b"\n") for lines in out if lines)
    assert len(assembler) == len(assembler.rest)
    assert b"".join(out) + assembler.rest == data
    rest = assembler.rest
    assert assembler.flush() == (rest + b"\n" if rest else b"")
    assert assembler.flush() == b""


# Newlines are made likely, so that there are many lines.
TEXT = st.lists(st.sampled_from([b"\n", b"\r", b"a", b"bc", b"\x00", b"\xff", b"\x1b[2K"])).map(b"".join)


@given(st.lists(st.tuples(st.sampled_from([OUT0, OUT1, OUT12, ERR0]), TEXT)))
def test_each_line_of_a_file_gets_a_prefix_and_loses_nothing(chunks: list[tuple[Source, bytes]]) -> None:
    prefixing, passing = FilePrinter(), FilePrinter(prefix=False)
    out = [prefixing.feed(*chunk) for chunk in chunks] + [prefixing.close(s) for s in (OUT0, OUT1, OUT12, ERR0)]
    bare = [passing.feed(*chunk) for chunk in chunks] + [passing.close(s) for s in (OUT0, OUT1, OUT12, ERR0)]
    lines = b"".join(out).split(b"\n")
    assert lines.pop() == b""
    assert all(re.match(rb"\[(0|1|12)\] ", line) for line in lines)
    assert [re.sub(rb"^\[\d+\] ", b"", line) for line in lines] == b"".join(bare).split(b"\n")[:-1]
    for source in (OUT1, OUT12):
        written = b"".join(data for s, data in chunks if s == source)
        prefix = rank_prefix(source.rank).encode()
        received = b"".join(line[len(prefix) :] + b"\n" for line in lines if line.startswith(prefix))
        assert received == written + (b"" if written.endswith(b"\n") or not written else b"\n")


def test_a_line_of_any_length_passes() -> None:
    long = FilePrinter()
    chunk = b"x" * 65536
    assert all(long.feed(OUT0, chunk) == b"" for _ in range(64))
    assert long.feed(OUT0, b"\nnext") == b"[0] " + chunk * 64 + b"\n"
    assert long.close(OUT0) == b"[0] next\n"
    assert long.close(OUT0) == b""


def test_the_launchers_own_lines() -> None:
    assert printer(None).say("text \udcff") == b"text \\udcff\n"
    assert printer(PLAIN).say("text") == b"text\n"


# ---- terminals


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TERM": "xterm-256color"}, Terminal(100, 30)),
        ({"TERM": "screen", "NO_COLOR": "1"}, Terminal(100, 30, colour=False)),
        ({"TERM": "screen", "NO_COLOR": ""}, Terminal(100, 30)),
        ({"TERM": "dumb"}, None),
        ({}, None),
    ],
)
def test_terminals(environment: dict[str, str], expected: Terminal | None) -> None:
    assert terminal_from(environment, 100, 30) == expected


def test_a_terminal_without_a_size_has_80_columns() -> None:
    assert terminal_from({"TERM": "xterm"}, 0, 0) == Terminal(80, 24)


def test_ranks_have_their_colours_and_do_not_leak_theirs() -> None:
    out = TerminalPrinter(Terminal(40, 10))
    assert out.feed(OUT0, b"plain\n") == b"\x1b[36m[0]\x1b[0m plain\n"
    assert out.feed(OUT1, b"\x1b[31mred\n") == b"\x1b[33m[1]\x1b[0m \x1b[31mred\x1b[0m\n"
    assert TerminalPrinter(Terminal(40, 10), prefix=False).feed(OUT0, b"plain\n") == b"plain\n"
    assert TerminalPrinter(PLAIN).feed(OUT0, b"plain\n") == b"[0] plain\n"


BAR = b"\x1b[?25l\r\x1b[2Kbar 10%\r\x1b[2Kbar 20%"


def test_a_bar_stays_below_the_lines_of_others() -> None:
    chunks = [(OUT0, BAR), (OUT1, b"one\ntw"), (OUT0, b"\r\x1b[2Kbar 30%"), (OUT1, b"o\n")]
    assert show(TerminalPrinter(PLAIN), chunks, close=False) == ["[1] one", "[1] two", "[0] bar 30%"]


def test_lines_of_the_launcher_and_of_rank_0_itself_come_above_the_bar() -> None:
    out, screen = TerminalPrinter(PLAIN), Screen(40)
    for data in (out.feed(OUT0, BAR), out.say("note"), out.feed(OUT0, b"\r\x1b[2Khello\nbar 40%")):
        screen.write(data)
    assert screen.rows[:2] == ["note", "[0] hello"]
    screen.write(out.feed(OUT0, b"\r\x1b[2Kbar 50%"))
    assert screen.rows == ["note", "[0] hello", "[0] bar 50%"]


def test_the_last_state_of_a_bar_stays_as_a_line() -> None:
    finished = [(OUT0, BAR), (OUT0, b"\r\x1b[2Kbar 100%\n\x1b[?25h"), (OUT1, b"bye\n")]
    assert show(TerminalPrinter(PLAIN), finished) == ["[1] bye", "[0] bar 100%", ""]
    finished[2:2] = [(OUT0, b"done\n")]
    assert show(TerminalPrinter(PLAIN), finished) == ["[0] bar 100%", "[0] done", "[1] bye", ""]
    cut_off = [(OUT0, BAR), (OUT1, b"bye\n")]
    assert show(TerminalPrinter(PLAIN), cut_off) == ["[1] bye", "[0] bar 20%", ""]
    removed = [(OUT0, BAR), (OUT0, b"\r\x1b[2K\x1b[?25h"), (OUT1, b"bye\n")]
    assert show(TerminalPrinter(PLAIN), removed) == ["[1] bye", ""]


def test_a_bar_with_the_carriage_return_behind_and_a_bar_on_stderr() -> None:
    chunks = [(OUT0, b"1%\r"), (OUT0, b"2%\r"), (ERR0, b"\r 7/9"), (ERR0, b"\r 8/9"), (OUT1, b"x\n")]
    assert show(TerminalPrinter(PLAIN), chunks, close=False) == ["[1] x", "[0] 2%", "[0]  8/9"]


def rich_frame(*rows: str, over: int = 1) -> tuple[Source, bytes]:
    """What rich writes to draw rows anew `over` those that it drew before."""
    return OUT0, b"\r\x1b[2K" + b"\x1b[1A\x1b[2K" * (over - 1) + "\n".join(rows).encode()


def test_a_bar_of_several_rows_that_grows() -> None:
    chunks = [
        (OUT0, b"begin\n\x1b[?25l"),
        rich_frame("a1"),
        rich_frame("a2", "b2"),
        (OUT1, b"x\n"),
        rich_frame("a3", "b3", "c3", over=2),
        (OUT1, b"y\n"),
        rich_frame("hello", "a4", "b4", "c4", over=3),
    ]
    live = ["[0] begin", "[1] x", "[1] y", "[0] hello", "[0] a4", "[0] b4", "[0] c4"]
    assert show(TerminalPrinter(PLAIN), chunks, close=False) == live
    chunks += [rich_frame("a5", "b5", "c5", over=3), (OUT1, b"z\n"), (OUT0, b"\n\x1b[?25hbye\n")]
    end = ["[0] begin", "[1] x", "[1] y", "[0] hello", "[1] z", "[0] a5", "[0] b5", "[0] c5", "[0] bye", ""]
    assert show(TerminalPrinter(PLAIN), chunks, close=False) == end


def test_a_bar_that_goes_away_in_the_end() -> None:
    gone = b"\n\x1b[?25h\r" + b"\x1b[1A\x1b[2K" * 2
    chunks = [rich_frame("a1", "b1"), rich_frame("hello", "a2", "b2", over=2), (OUT0, gone), (OUT0, b"bye\n")]
    assert show(TerminalPrinter(PLAIN), chunks, close=False) == ["[0] hello", "[0] bye", ""]
    assert show(TerminalPrinter(PLAIN), chunks[:-1]) == ["[0] hello", "", ""]


def test_a_bar_inside_a_bar() -> None:
    """As tqdm draws them: down to the inner one, and back up."""
    chunks = [(ERR0, b"\router 0"), (ERR0, b"\n\rinner 0\x1b[A"), (ERR0, b"\n\rinner 1\x1b[A")]
    # That the first row will be drawn anew can't be known before the cursor moves up.
    assert show(TerminalPrinter(PLAIN), chunks, close=False) == ["[0] outer 0", "[0] inner 1"]
    chunks += [(OUT1, b"x\n"), (ERR0, b"\router 1"), (ERR0, b"\n\rinner 0\x1b[A"), (OUT1, b"y\n")]
    seen = ["[0] outer 0", "[1] x", "[1] y", "[0] outer 1", "[0] inner 0"]
    assert show(TerminalPrinter(PLAIN), chunks, close=False) == seen
    chunks += [(ERR0, b"\n\r       \r\x1b[A"), (ERR0, b"\router 2\n")]
    assert show(TerminalPrinter(PLAIN), chunks) == ["[0] outer 0", "[1] x", "[1] y", "[0] outer 2", ""]


def test_lines_after_a_bar_are_lines_again() -> None:
    lines = [b"%d\n" % i for i in range(30)]
    chunks = [rich_frame("bar"), *((OUT0, line) for line in [b"\n", *lines])]
    out = TerminalPrinter(PLAIN)
    assert show(out, chunks, close=False) == ["[0] bar", *(f"[0] {i}" for i in range(30)), ""]
    assert out.say("last") == b"last\n"  # nothing is held back, so nothing is drawn anew


def test_a_bar_may_be_higher_than_the_terminal() -> None:
    names = [f"row {i}" for i in range(20)]
    chunks = [rich_frame(*names), rich_frame(*names, over=20), rich_frame(*names, over=20)]
    out = TerminalPrinter(PLAIN)
    for source, data in [*chunks, *((ERR0, data) for _, data in chunks)]:
        assert out.feed(source, data).count(b"\x1b[1A") < PLAIN.lines
    assert show(TerminalPrinter(PLAIN), chunks)[-2:] == ["[0] row 19", ""]


def test_other_ranks_do_not_move_the_cursor() -> None:
    chunks = [(OUT0, b"kept\n"), (OUT1, b"\x1b[1A\x1b[2K\x1b[H\x1b[2J\x1b[?1049hsly\n"), (OUT1, BAR)]
    assert show(TerminalPrinter(PLAIN), chunks, close=False) == ["[0] kept", "[1] sly", ""]
    assert show(TerminalPrinter(PLAIN), chunks) == ["[0] kept", "[1] sly", "[1] bar 20%", ""]


def test_windows_line_ends_are_no_bars() -> None:
    assert show(TerminalPrinter(PLAIN), [(OUT0, b"one\r\ntwo\r"), (OUT0, b"\n")]) == ["[0] one", "[0] two", ""]


def test_a_wide_bar_is_cut_not_wrapped() -> None:
    chunks = [(OUT0, b"\r" + b"#" * 100), (OUT1, b"x\n")]
    assert show(TerminalPrinter(PLAIN), chunks, close=False) == ["[1] x", "[0] " + "#" * 36]


def test_half_a_sequence_is_not_drawn_and_nothing_new_draws_nothing() -> None:
    out = TerminalPrinter(PLAIN)
    assert out.feed(OUT0, b"\rbar \x1b[3") == b"\x1b[?7l[0] bar \x1b[?7h"
    assert out.feed(OUT0, b"2") == b""
    assert b"bar \x1b[32mgreen" in out.feed(OUT0, b"mgreen")


DRAWN = st.sampled_from(
    [
        b"\n",
        b"\r",
        b"a",
        b"bc ",
        b"\x1b[2K",
        b"\x1b[K",
        b"\x1b[A",
        b"\x1b[3A",
        b"\x1b[31m",
        b"\x1b[?25h",
        b"\x1b[",
        b"\x1b[H",
        b"\x1b]8;;",
        b"\x07",
    ]
)


@given(st.lists(st.lists(DRAWN, max_size=8).map(b"".join), max_size=30), st.integers(1, 8))
def test_whatever_rank_0_draws_lines_of_others_stay_whole(drawn: list[bytes], lines: int) -> None:
    out, screen = TerminalPrinter(Terminal(1000, lines, colour=False)), Screen(1000)
    for number, data in enumerate(drawn):
        screen.write(out.feed(OUT0, data))
        screen.write(out.feed(OUT1, b"line %d\n" % number))
    screen.write(out.close(OUT0) + out.close(OUT1))
    expected = [f"[1] line {number}" for number in range(len(drawn))]
    assert [row for row in screen.rows if row.startswith("[1]")] == expected
    assert all(row.startswith("[0] ") for row in screen.rows if row and not row.startswith("[1]"))


@given(st.lists(st.sampled_from([b"\n", b"a", b"bc", b"\xff"])).map(b"".join), st.lists(st.integers(0, 100)))
def test_text_without_sequences_is_on_a_terminal_what_it_is_in_a_file(data: bytes, cuts: list[int]) -> None:
    terminal, file = TerminalPrinter(PLAIN), FilePrinter()
    chunks = chunked(data, cuts)
    assert [terminal.feed(OUT0, chunk) for chunk in chunks] == [file.feed(OUT0, chunk) for chunk in chunks]
    assert terminal.close(OUT0) == file.close(OUT0)


@given(st.lists(st.integers(0, 400)))
def test_chunks_do_not_matter_to_what_is_left(cuts: list[int]) -> None:
    data = BAR + b"\r\x1b[2Khello\n\x1b[32mbar\x1b[0m 30%\r\x1b[2Kbar 100%\n\x1b[?25hdone\r\nnext\n\nlast"
    chunks = [(OUT0, chunk) for chunk in chunked(data, cuts)]
    lines = ["[0] hello", "[0] bar 100%", "[0] done", "[0] next", "[0] ", "[0] last", ""]
    assert show(TerminalPrinter(PLAIN), chunks) == lines


def test_a_bar_drawn_for_days_takes_no_memory_and_data_is_no_bar() -> None:
    out = TerminalPrinter(PLAIN)
    for step in range(20_000):
        drawn = out.feed(OUT0, b"\r%d" % step)
    assert drawn == b"\r\x1b[2K\x1b[?7l[0] 19999\x1b[?7h"
    assert out.close(OUT0) == b"\r\x1b[2K[0] 19999\n"
    huge = b"\r" + b"x" * 70_000
    assert out.feed(OUT1, huge) == b""
    assert out.feed(OUT0, huge) == b""
    assert out.feed(OUT0, b"\n") == b"[0] " + huge[1:] + b"\n"
