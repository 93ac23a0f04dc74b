"""benchmarks/peer_compaction.py: what its table says of the rows of both sides."""

from benchmarks import peer_compaction


def row(press, ratio, nll, **more):
    own = {"f1": 0.5, "write_seconds": 2.0, "positions": 9.0, "kept_bytes": 4e6, "held_bytes": 8e6}
    return {"press": press, "ratio": ratio, "nll": nll, "tokens": 2} | own | more


def test_the_gain_is_between_nothing_and_the_text_and_a_press_without_gates_says_so():
    absent = {"press": "FastKVzipPress", "ratio": 2, "error": "no trained gates"}
    ours = [row("ours", 2, 2.0), row("ours", 2, 4.0, f1=1.0)]
    lines = peer_compaction.summarise([*ours, row("text", 1, 2.0), row("nothing", 1, 6.0), absent])
    words = lines[1].split()
    assert words[:5] == ["ours", "2", "0.750", "1.500", "0.750"]  # of 3.0 nats without text and 1.0 with it
    assert words[5:] == ["2.000", "9.0", "4.00", "8.00"] and "no trained gates" in lines[-1]
