"""Use of a run's devices, from devices.jsonl: a table, and what is wrong with it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lw_jax.core.progress import duration
from lw_jax.report.tables import Table

UNDER_USED = 0.5  # mean utilisation below it is a finding
LOW_MEMORY = 0.5  # peak memory below this share of the limit: the micro-batch could grow
UNBALANCED = 0.2  # difference of mean utilisation or peak memory between devices
HOT_CELSIUS, HOT_UTILISATION = 80, 0.8
MIN_SAMPLES = 10  # no findings about a device that was in use for less, as one of a start that failed
DEVICE = {  # of devices.jsonl: name -> (heading, factor)
    "utilisation": ("utilisation, %", 100),
    "memory_bytes": ("memory, GB", 1e-9),
    "card_bytes": ("memory of all processes, GB", 1e-9),
    "celsius": ("temperature, °C", 1),
    "watts": ("power, W", 1),
}


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    names = [name for name in DEVICE if any(name in row for row in rows)]
    head = ["device", "hours", *(cell for name in names for cell in (DEVICE[name][0], "min .. max"))]
    head += ["peak memory, GB", "of the limit, %"]
    return Table(head, [_cells(device, group, names) for device, group in by_device(rows).items()])


def by_device(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["device"], []).append(row)
    return groups


def mean_of(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Returns the sample-weighted mean of the rows' means."""
    return sum(row[name] * row["samples"] for row in rows) / sum(row["samples"] for row in rows)


def _cells(device: str, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    line = [device, f"{sum(row['seconds'] for row in rows) / 3600:.2f}"]
    for name in names:
        sampled, scale = [row for row in rows if name in row], DEVICE[name][1]
        if not sampled:
            line += ["unknown", ""]
            continue
        values = [row[name] * scale for row in sampled]
        line += [f"{mean_of(sampled, name) * scale:,.1f}", f"{min(values):,.1f} .. {max(values):,.1f}"]
    peak, share = max((row["peak_bytes"] for row in rows if "peak_bytes" in row), default=None), _share(rows)
    cells = "unknown" if peak is None else f"{peak / 1e9:,.1f}", "unknown" if share is None else f"{100 * share:.0f}"
    return [*line, *cells]


def findings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    devices = by_device(rows).items()
    groups = {device: group for device, group in devices if sum(row["samples"] for row in group) >= MIN_SAMPLES}
    used = {device: [row for row in group if "utilisation" in row] for device, group in groups.items()}
    use = {device: mean_of(group, "utilisation") for device, group in used.items() if group}
    memory = {device: share for device, group in groups.items() if (share := _share(group))}
    return [
        *_under_used(use, memory),
        *_unbalanced("mean utilisation", use),
        *_unbalanced("peak memory", memory),
        *_hot(groups),
    ]


def _under_used(use: Mapping[str, float], memory: Mapping[str, float]) -> Iterator[str]:
    for device, mean in use.items():
        if mean >= UNDER_USED:
            continue
        share = memory.get(device)
        if share is None:
            reason = "the host keeps it waiting (loading of data, validation) or the micro-batch is small"
        elif share < LOW_MEMORY:
            reason = f"memory never passed {LOW_MEMORY:.0%}: the micro-batch is small, a larger train.micro_batch fits"
        else:
            reason = "memory is in use: the host keeps it waiting (loading of data, validation, checkpoints)"
        yield f"under-used: {device} ({mean:.0%}); likely {reason}"


def _unbalanced(what: str, shares: Mapping[str, float]) -> Iterator[str]:
    ends = sorted(shares, key=shares.__getitem__)[:: max(1, len(shares) - 1)]  # the least and the most
    if shares and shares[ends[-1]] - shares[ends[0]] > UNBALANCED:
        named = ", ".join(f"{device} {shares[device]:.0%}" for device in ends)
        yield f"unbalanced: {what} is {named}, more than {UNBALANCED * 100:.0f} points apart"


def _hot(groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Yields the devices that were hot under load, where a card lowers its clock."""
    for device, group in groups.items():
        hot = [
            row for row in group if row.get("celsius", 0) > HOT_CELSIUS and row.get("utilisation", 0) > HOT_UTILISATION
        ]
        if hot:
            spent, most = duration(sum(row["seconds"] for row in hot)), max(row["celsius"] for row in hot)
            yield f"hot: {device} spent {spent} above {HOT_CELSIUS} °C under load (at most {most:.0f} °C)"


def _share(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the largest share of its limit that a device held; a run may go on under another limit."""
    known = (row for row in rows if row.get("limit_bytes") and "peak_bytes" in row)
    return max((row["peak_bytes"] / row["limit_bytes"] for row in known), default=None)
