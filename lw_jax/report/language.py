"""Panels and tables of a language model's run, from its log, last checkpoint and device samples."""

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from lw_jax.report import series
from lw_jax.report.device_use import by_device, mean_of
from lw_jax.report.figures import Panel
from lw_jax.report.records import Run, to_number
from lw_jax.report.tables import Table, Verdict, number

SECTIONS = {
    "positions": "Perplexity by position",
    "speed": "Speed and memory",
    "scaling": "Scaling",
}
BASELINES = {"unigram": ":", "bigram": "--"}  # name -> line in the picture
INNER = {
    "first": "initial weights",
    "before": "before the chunk's update",
    "after": "after the update",
}  # inner loss of a chunk's last token, as recipe `ttt` measures it
POSITION = re.compile(r"validation/detail/position/([0-9]{1,9})-([0-9]{1,9})")


Span = tuple[int, int, float]  # first and last position of a range in a window, from 1; mean loss, nats a token


def describe(run: Run) -> str:
    spec, count = run.cfg.ttt, parameters(run)
    bound = "" if _vocabulary(run) or spec.table_multiple == 1 else "up to "
    text = f"TTT-{'Linear' if spec.inner == 'linear' else 'MLP'}, {spec.backbone} backbone, "
    text += f"{spec.layers} layers of {spec.width}, {spec.heads} heads, windows of {window(run):,} tokens"
    return text + (f", {bound}{count:,} parameters" if count else "")


def parameters(run: Run) -> int:
    """Returns how many values are trained; 0 before a checkpoint. Padding counts where the vocabulary is unknown."""
    vocab, table = _vocabulary(run), run.leaves.get("trainable/embed")
    padding = max(0, table[0][0] - vocab) if table and vocab else 0
    return _values(run, "trainable/") - padding * run.cfg.ttt.width


def _vocabulary(run: Run) -> int:
    """Returns the tokens of the run's vocabulary; 0 where its tokenizer's file alone says how many."""
    if run.cfg.ttt.tokenizer != "bytes":
        return run.cfg.ttt.vocab
    from lw_jax.data.tokens import ByteTokenizer  # imports tokenizers and gguf

    return ByteTokenizer().vocab


def window(run: Run) -> int:
    return run.cfg.ttt.length * run.cfg.ttt.segments


def verdict(run: Run) -> Verdict:
    rows = [row for row in run.metrics if "validation/loss" in row]
    if not rows:
        return Verdict("none", "no validation yet")
    row = rows[-1]
    loss = to_number(row["validation/loss"])
    baselines = {name: to_number(row.get(f"validation/nll/{name}")) for name in BASELINES}
    text = f"step {row['step']:,}: held-out loss {number(loss, digits=3)} nats a token, perplexity {perplexity(loss)}"
    text += "; baselines: " + ", ".join(f"{name} {number(value, digits=3)}" for name, value in baselines.items())
    known = [value for value in baselines.values() if math.isfinite(value)]
    if not math.isfinite(loss) or not known:
        return Verdict("none", text)
    if loss < min(known):
        return Verdict("carries", f"{text}: below {'both' if len(known) > 1 else 'the known one'}")
    return Verdict("none", f"{text}: not below all of them")


def training(run: Run) -> list[Panel]:
    loss = series.read_line(run, "train/loss", "training")
    rate = series.read_line(run, "train/learning_rate", "learning rate")
    speed = series.read_line(run, "train/tokens_per_second", "all devices")
    panels = [Panel("loss", "nats a token", [loss], True), Panel("learning rate", "", [rate], False)]
    return series.keep_drawable([*panels, Panel("speed", "tokens/s", [speed], False)])


def validation(run: Run) -> list[Panel]:
    loss = [series.read_line(run, "validation/loss", "this model", colour=0)]
    loss += [series.read_line(run, f"validation/nll/{name}", name, style=style) for name, style in BASELINES.items()]
    inner = [
        series.read_line(run, f"validation/inner/{name}", label, colour=i)
        for i, (name, label) in enumerate(INNER.items())
    ]
    return series.keep_drawable(
        [Panel("held-out loss", "nats a token", loss, False), Panel("inner loss", "last token of a chunk", inner, True)]
    )


def positions(run: Run) -> tuple[int, list[Span]]:
    """Returns the step of the last validation with losses by position, and the losses in order."""
    for row in reversed(run.metrics):
        matches = [(match, value) for name, value in row.items() if (match := POSITION.fullmatch(name))]
        if matches:
            return row["step"], sorted((int(match[1]), int(match[2]), to_number(value)) for match, value in matches)
    return 0, []


def by_position(spans: Sequence[Span]) -> Table:
    rows = [
        (
            f"{first}-{last}" if last > first else str(first),
            str(last - first + 1),
            number(loss, digits=3),
            perplexity(loss),
        )
        for first, last, loss in spans
    ]
    return Table(("positions", "count", "nats a token", "perplexity"), rows)


def speed(run: Run) -> Table | None:
    """Returns throughput over the run's logged steps, None where none was timed."""
    tokens, devices = _finite(run, "train/tokens_per_second"), device_count(run)
    if not tokens:
        return None
    rows = [("tokens/s, all devices", *_spread(tokens, 0))]
    # Of earlier starts, on other devices, it is not known how many there were.
    here = _finite(run, "train/tokens_per_second", since=run.hardware.get("since_step", 0))
    if devices and here:
        rows.append((f"tokens/s a device, of {devices}", *_spread([rate / devices for rate in here], 0)))
    rows.append(("seconds a step", *_spread(_finite(run, "train/seconds_per_step"), 4)))
    return Table(("over the logged steps", "median", "quartiles", "min .. max", "samples"), rows)


def tokens_a_step(run: Run) -> str:
    batch, length = run.cfg.train.global_batch, window(run)
    return f"{batch:,} windows x {length:,} tokens = {batch * length:,} tokens a step over all devices"


def balance(run: Run) -> str:
    groups = by_device(row for row in run.last_devices if "utilisation" in row)
    if not groups:
        return ""
    means = [mean_of(rows, "utilisation") for rows in groups.values()]
    if len(means) == 1:
        return f"Utilisation of the one device: {means[0]:.1%}."
    spread = (max(means) - min(means)) / 2 / statistics.mean(means) if any(means) else 0.0
    return f"Utilisation of {len(means)} devices: {min(means):.1%} .. {max(means):.1%}, ±{spread:.1%} about their mean."


def memory(run: Run) -> Table | None:
    """Returns weights, optimizer, activations and peak with the source of each; None where none is known."""
    saved = "shapes in the last checkpoint (whole model)"
    cells: dict[str, tuple[float | None, str]] = {}
    if run.leaves:
        cells["weights"] = (_bytes(run, "trainable/"), saved)
        cells["optimizer"] = (_bytes(run, "opt_state/"), saved)
    matching = _matching_row(run)
    if matching:
        where = f"{matching['kind']}, {matching['devices']} x {matching['target']}, {matching['peak_from']}"
        for name in ("weights", "optimizer", "activation", "peak"):
            cells.setdefault(name, (matching[f"{name}_bytes"], where))
    peaks = [row["peak_bytes"] for row in run.last_devices if "peak_bytes" in row]
    if peaks:
        cells["peak"] = (max(peaks), "devices.jsonl, maximum over devices")
    if not cells:
        return None
    text = {"weights": "weights", "optimizer": "optimizer", "activation": "activations and gradients", "peak": "peak"}
    rows = [(text[name], size(cells[name][0]), cells[name][1]) for name in text if name in cells]
    return Table(("of one device", "bytes", "source"), rows, text_columns=frozenset({2}))


def _matching_row(run: Run) -> dict[str, Any] | None:
    """Returns the row of scaling.json with this run's shapes, a measured one first."""
    batch, devices = run.cfg.train.global_batch, device_count(run)
    count = _values(run, "trainable/")
    matches = [
        row
        for row in run.scaling
        if (row["length"], row["global_batch"]) == (window(run), batch)
        and row["peak_bytes"] is not None
        and row["parameters"] == (count or row["parameters"])
        and row["devices"] == (devices or row["devices"])
    ]
    return min(matches, key=lambda row: (row["kind"] != "measured", row["devices"]), default=None)


def device_count(run: Run) -> int:
    """Returns the run's number of devices; 0 where it was not recorded."""
    return int(run.hardware.get("devices", 0)) or len({row["device"] for row in run.devices})


def perplexity(loss: float) -> str:
    return number(math.exp(loss), digits=2) if loss < 100 else "unknown"


def size(count: float | None) -> str:
    if count is None:
        return "unknown"
    return f"{count / 1e9:,.2f} GB" if count >= 1e8 else f"{count / 1e6:,.2f} MB"


def _values(run: Run, prefix: str) -> int:
    return sum(math.prod(shape) for path, (shape, _) in run.leaves.items() if path.startswith(prefix))


def _bytes(run: Run, prefix: str) -> int:
    return sum(
        math.prod(shape) * (8 if dtype == "bool" else int(re.sub(r"\D", "", dtype))) // 8
        for path, (shape, dtype) in run.leaves.items()
        if path.startswith(prefix)
    )


def _finite(run: Run, name: str, *, since: int = 0) -> list[float]:
    """Returns a logged value of the steps behind `since`."""
    values = (to_number(row[name]) for row in run.metrics if name in row and row["step"] > since)
    return [value for value in values if math.isfinite(value)]


def _spread(values: Iterable[float], digits: int) -> tuple[str, str, str, str]:
    ordered = sorted(values)
    if not ordered:
        return "unknown", "", "", "0"
    quartiles = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    least, low, middle, high, most = (number(value, digits=digits) for value in (ordered[0], *quartiles, ordered[-1]))
    return middle, f"{low} .. {high}", f"{least} .. {most}", str(len(ordered))
