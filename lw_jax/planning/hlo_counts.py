"""FLOPs, memory traffic and collectives of one device, counted in the optimised HLO of a compiled program.

XLA's cost analysis counts the body of a scan once and does not exist for ahead-of-time GPU programs, so the optimised
HLO is parsed instead: a loop body counts once per iteration. `roofline.py` turns counts into time.
"""

import dataclasses
import functools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lw_jax.core.errors import UserError

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Equal kernels: one fusion, library call or copy, and how often it runs in a step."""

    arithmetic: str  # of its matrix product: "bf16", "tf32", "fp32", "fp8", "int8", "other"; "" where it has none
    flops: int  # of its matrix products, one run
    bytes: int  # read and written, one run
    executed: int = 1
    source: str = ""  # "module.function" of this project in which it was traced; "" where the text does not say


@dataclasses.dataclass(frozen=True)
class Collective:
    """Equal collectives over equal groups of devices, and how often they run in a step."""

    kind: str  # HLO's name, e.g. "all-reduce"
    groups: Groups  # positions in the mesh; of a collective-permute its (source, target) pairs
    operand_bytes: int  # that one device hands in, one run
    wire_bytes: int  # that one device sends, one run, by the ring algorithm
    executed: int = 1


@dataclasses.dataclass(frozen=True)
class Program:
    """Everything that one device executes in one run of the program."""

    kernels: tuple[Kernel, ...]
    collectives: tuple[Collective, ...]

    @property
    def flops(self) -> int:
        """FLOPs of all matrix products: 2 for each multiplication and addition."""
        return sum(kernel.flops * kernel.executed for kernel in self.kernels)

    @property
    def moved_bytes(self) -> int:
        """Bytes that all kernels read and write."""
        return sum(kernel.bytes * kernel.executed for kernel in self.kernels)

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends in all collectives."""
        return sum(collective.wire_bytes * collective.executed for collective in self.collectives)


class Unreadable(UserError):
    """The text of a compiled program is in a notation that is not known here."""


def analyse(text: str) -> Program:
    """Returns the counts of `compiled.as_text()`, for CPU and GPU programs alike.

    Of a conditional the branch with the most work counts. A fusion that slices its operand reads the slice, and one
    that updates a slice in place writes the slice.

    Raises:
      Unreadable: another version of XLA writes another text, or it is no HLO module.
    """
    try:
        module = _Module(text)
        tally = module.tally(module.entry)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # a text in which something is not found
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__} {error}"
        raise Unreadable(f"the text of the compiled program is not understood: {reason}") from error
    operations = [dataclasses.replace(op, executed=count) for op, count in tally.items()]
    kernels = [op for op in operations if isinstance(op, Kernel)]
    collectives = [op for op in operations if isinstance(op, Collective)]
    return Program(
        tuple(sorted(kernels, key=lambda kernel: (-kernel.flops, -kernel.bytes, kernel.arithmetic, kernel.source))),
        tuple(
            sorted(collectives, key=lambda collective: (collective.kind, collective.groups, collective.operand_bytes))
        ),
    )


# What costs nothing on the device: names for values, and the ends of what a -start began.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id opt-barrier "
    "add-dependency domain".split()
)
_COLLECTIVES = frozenset(
    "all-reduce all-gather reduce-scatter all-to-all ragged-all-to-all collective-permute collective-broadcast".split()
)
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))  # read as much of their first operand as they return
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # in place; which operand holds what is written
_GEMMS = ("__cublas$gemm", "__cublas$lt$matmul")
# What a Pallas kernel of this project says of itself (`models/ttt_kernel.py`), as a string in a string.
_OF_PALLAS = re.compile(
    r'serialized_metadata = "{\\22arithmetic\\22: \\22(?P<arithmetic>\w+)\\22, \\22flops\\22: \\22(?P<flops>\d+)'
)


@dataclasses.dataclass(frozen=True)
class _Op:
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @functools.cached_property
    def bytes(self) -> int:
        """Of the result; of a tuple of all its parts."""
        return sum(_size(dtype, shape) for dtype, shape in self.shapes)

    @functools.cached_property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Of a tuple of all its parts, in order."""
        parts = re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", self.type)
        return [(dtype, tuple(int(n.lstrip("<=")) for n in dims.split(",") if n)) for dtype, dims in parts]

    def attribute(self, name: str) -> str:
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return match[1] if match else ""

    def indices(self, name: str) -> list[int]:
        match = re.search(rf"\b{name}={{([\d,]*)}}", self.attributes)
        return [int(n) for n in match[1].split(",") if n] if match else []

    @functools.cached_property
    def backend_config(self) -> dict[str, Any]:
        start = self.attributes.find("backend_config={")
        if start < 0:
            return {}
        return json.JSONDecoder().raw_decode(self.attributes, start + len("backend_config="))[0]


# How often each kernel and collective runs.
_Tally = Counter[Kernel | Collective]


def _add(tally: _Tally, other: _Tally, times: int) -> None:
    for op, count in other.items():
        tally[op] += count * times


def _work(tally: _Tally) -> tuple[int, int]:
    """Returns FLOPs and bytes of all kernels."""
    runs = [(op, count) for op, count in tally.items() if isinstance(op, Kernel)]
    return sum(kernel.flops * n for kernel, n in runs), sum(kernel.bytes * n for kernel, n in runs)


class _Computation:
    def __init__(self, ops: list[_Op]) -> None:
        self.ops = {op.name: op for op in ops}
        self.root = next((op for op in ops if op.is_root), ops[-1])

    def operand_bytes(self, op: _Op) -> int:
        return sum(self.ops[name].bytes for name in dict.fromkeys(op.operands))


class _Module:
    def __init__(self, text: str) -> None:
        self.entry, self.computations = _parse(text)
        header = text[: text.index("\n")]
        sizes = (re.search(rf"\b{name}=(\d+)", header) for name in ("num_partitions", "replica_count"))
        self.devices = math.prod(int(match[1]) for match in sizes if match)
        self._tallies: dict[str, _Tally] = {}
        self._functions = _functions(text)

    def tally(self, name: str) -> _Tally:
        if name not in self._tallies:
            result, computation = _Tally(), self.computations[name]
            for op in computation.ops.values():
                self._count(op, computation, result)
            self._tallies[name] = result
        return self._tallies[name]

    def _count(self, op: _Op, computation: _Computation, result: _Tally) -> None:
        base = op.opcode.removesuffix("-start")
        if op.opcode in _FREE or op.opcode.endswith(("-done", "async-update")):
            return
        if op.opcode == "while":
            trips = op.backend_config.get("known_trip_count", {}).get("n", 1)  # where it is not known, one round
            _add(result, self.tally(op.attribute("body")), int(trips))
        elif op.opcode == "conditional":
            named = re.search(r"branch_computations={([^}]*)}", op.attributes)
            branches = named[1].replace("%", "").split(", ") if named else []
            branches += filter(None, (op.attribute("true_computation"), op.attribute("false_computation")))
            _add(result, max(map(self.tally, branches), key=_work), 1)
        elif op.opcode == "call" or base == "async" or (base == "fusion" and self._holds_collective(op)):
            _add(result, self.tally(op.attribute("to_apply") or op.attribute("calls")), 1)
        elif base in _COLLECTIVES:
            groups, operand = _groups(op, self.devices), computation.operand_bytes(op)
            result[Collective(base, groups, operand, _wire_bytes(base, groups, operand))] += 1
        else:
            result[self.kernel(op, computation)] += 1

    def _holds_collective(self, fusion: _Op) -> bool:
        inner = self.computations[fusion.attribute("calls")].ops.values()
        return any(op.opcode.removesuffix("-start") in _COLLECTIVES for op in inner)

    def _source(self, op: _Op) -> str:
        """Returns the function in which an operation was traced; of a fusion that says none one of its parts."""
        frame = re.search(r"\bstack_frame_id=(\d+)", op.attributes)
        if frame or op.opcode.removesuffix("-start") != "fusion":
            return self._functions.get(int(frame[1]), "") if frame else ""
        inner = self.computations[op.attribute("calls")]
        return next(filter(None, map(self._source, (inner.root, *reversed(inner.ops.values())))), "")

    def kernel(self, op: _Op, computation: _Computation) -> Kernel:
        products = list(self._products(op, computation))
        arithmetic = max(products, key=lambda product: product[1])[0] if products else ""
        fused = op.opcode.removesuffix("-start") == "fusion"
        size = _fusion_bytes(self.computations[op.attribute("calls")]) if fused else _op_bytes(op, computation)
        return Kernel(arithmetic, sum(flops for _, flops in products), size, source=self._source(op))

    def _products(self, op: _Op, computation: _Computation) -> Iterator[tuple[str, int]]:
        """Yields arithmetic and FLOPs of each matrix product of an operation."""
        if op.opcode.removesuffix("-start") == "fusion":
            inner = self.computations[op.attribute("calls")]
            for part in inner.ops.values():
                yield from self._products(part, inner)
        elif op.opcode == "dot":
            yield _product(op, computation, op.indices("lhs_contracting_dims"), op.attributes)
        elif op.opcode == "custom-call":
            target = re.search(r'custom_call_target="([^"]*)"', op.attributes)
            if target and target[1].startswith(_GEMMS):
                config = op.backend_config["gemm_backend_config"]
                contracted = [int(n) for n in config["dot_dimension_numbers"]["lhs_contracting_dimensions"]]
                yield _product(op, computation, contracted, json.dumps(config["precision_config"]))
            elif counted := _OF_PALLAS.search(op.attributes):
                yield counted["arithmetic"], int(counted["flops"])


def _product(op: _Op, computation: _Computation, contracted: list[int], precision: str) -> tuple[str, int]:
    dtype, shape = computation.ops[op.operands[0]].shapes[0]
    inner = math.prod(shape[dim] for dim in contracted)
    return _arithmetic(dtype, precision.lower()), 2 * inner * math.prod(op.shapes[0][1])


def _arithmetic(dtype: str, precision: str) -> str:
    if dtype.startswith("f8"):
        return "fp8"
    if dtype in ("bf16", "f16"):
        return "bf16"
    if dtype == "s8":
        return "int8"
    if dtype != "f32":
        return "other"
    # XLA runs fp32 products of default precision in TF32 where the card has it.
    exact = re.search(r"highest|dot_f32_f32_f32", precision)
    return "fp32" if exact else "bf16" if "dot_bf16" in precision else "tf32"


def _op_bytes(op: _Op, computation: _Computation) -> int:
    if op.opcode in _SLICES:
        return 2 * op.bytes
    if op.opcode in _UPDATES:
        written = computation.ops[op.operands[_UPDATES[op.opcode]]].bytes
        return written * (2 if op.opcode == "dynamic-update-slice" else 3)  # a scatter adds to what it finds
    if op.opcode.endswith("-start"):
        return 2 * computation.operand_bytes(op) if op.opcode == "copy-start" else op.bytes  # a tuple with the operands
    if op.opcode == "custom-call" and f'"{_GEMMS[0][:8]}' in op.attributes:  # its second result is workspace
        return computation.operand_bytes(op) + _size(*op.shapes[0])
    return computation.operand_bytes(op) + op.bytes


def _fusion_bytes(inner: _Computation) -> int:
    """Returns what a fusion reads and writes: of an operand that it only slices or updates in place, that part."""
    reads = sum(_read_bytes(inner, op) for op in inner.ops.values() if op.opcode == "parameter")
    results = [inner.ops[name] for name in inner.root.operands] if inner.root.opcode == "tuple" else [inner.root]
    return reads + sum(_written_bytes(inner, op) for op in results)


def _read_bytes(inner: _Computation, parameter: _Op) -> int:
    views, read = {parameter.name}, 0
    for op in inner.ops.values():
        used = [index for index, name in enumerate(op.operands) if name in views]
        if op.opcode == "bitcast" and used:
            views.add(op.name)
        elif used == [0] and op.opcode in _SLICES:
            read += op.bytes
        elif used == [0] and op.opcode in _UPDATES:
            read += inner.ops[op.operands[2]].bytes if op.opcode == "scatter" else 0
        elif used:
            return parameter.bytes
    return min(read, parameter.bytes)


def _written_bytes(inner: _Computation, op: _Op) -> int:
    while op.opcode == "bitcast":
        op = inner.ops[op.operands[0]]
    return inner.ops[op.operands[_UPDATES[op.opcode]]].bytes if op.opcode in _UPDATES else op.bytes


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    digits = re.match(r"[a-z]+(\d+)", dtype)  # token and opaque have none and take no memory
    bits = 8 if dtype == "pred" else int(digits[1]) if digits else 0
    return -(-bits * math.prod(shape) // 8)


def _wire_bytes(kind: str, groups: Groups, operand: int) -> int:
    """Returns what one device sends: NCCL's ring algorithm, "bus bandwidth" in nccl-tests/doc/PERFORMANCE.md."""
    size = max(map(len, groups))
    if kind == "collective-permute":
        return operand if any(source != target for source, target in groups) else 0
    if kind == "collective-broadcast":
        return operand if size > 1 else 0
    if kind == "all-gather":
        return operand * (size - 1)
    return operand * (size - 1) * (2 if kind == "all-reduce" else 1) // size


def _groups(op: _Op, devices: int) -> Groups:
    if op.opcode.startswith("collective-permute"):
        return _explicit(op, "source_target_pairs")
    text = op.attributes
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, reshape, order = ([int(n) for n in part.split(",")] if part else None for part in match.groups())
        return _rows(np.arange(math.prod(reshape or ())).reshape(reshape).transpose(order).reshape(shape))
    if match := re.search(r"replica_groups=(mesh\[.*?\](?:, device_ids=\(.*?\)\)?)?) {(.*?)}", text):
        return _mesh_groups(match[1], match[2])
    groups = _explicit(op, "replica_groups")
    return groups or (tuple(range(devices)),)  # {}: all


def _explicit(op: _Op, name: str) -> Groups:
    match = re.search(rf"\b{name}={{((?:{{[\d,]*}},?)*)}}", op.attributes)
    if match is None:
        raise UserError(f"HLO operation {op.name}: {name} is in no known notation: {op.attributes[:200]}")
    return tuple(tuple(int(n) for n in row.split(",") if n) for row in re.findall(r"{([\d,]*)}", match[1]))


def _mesh_groups(mesh: str, axes: str) -> Groups:
    """Reads "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0))" and "'a','b':(2)2": sub-axis 2 of b, cut as [2, 2, rest]."""
    sizes = {name: int(size) for name, size in re.findall(r"'?(\w+)'?=(\d+)", mesh.split("]")[0])}
    grouped = {name: (int(pre or 1), int(size or 0)) for name, pre, size in _AXIS.findall(axes)}
    shape, chosen = [], []
    for name, size in sizes.items():
        before, sub_size = grouped.get(name, (size, 1))
        sub_size = sub_size or size
        chosen += [len(shape) + 1] if name in grouped else []
        shape += [before, sub_size, size // before // sub_size]
    ids = np.arange(math.prod(shape))
    if iota := re.search(r"device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\)", mesh):
        reshape, order = ([int(n) for n in part.split(",")] for part in iota.groups())
        ids = ids.reshape(reshape).transpose(order)
    elif listed := re.search(r"device_ids=\(([\d,]+)\)", mesh):
        ids = np.array([int(n) for n in listed[1].split(",")])
    ids = np.moveaxis(ids.reshape(shape), chosen, range(-len(chosen), 0))
    return _rows(ids.reshape(-1, math.prod(shape[axis] for axis in chosen)))


_AXIS = re.compile(r"'?(\w+)'?(?::\((\d+)\)(\d+))?(?:,|$)")


def _rows(ids: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in ids.tolist())


def kernels_by_name(text: str) -> dict[str, Kernel]:
    """Returns one run of each operation of `compiled.as_text()`; what holds others, as a loop, is left out."""
    module, kernels = _Module(text), {}
    for part in module.computations.values():
        for name, op in part.ops.items():
            if op.opcode not in _FREE and op.opcode not in ("while", "conditional", "call"):
                kernels[name] = module.kernel(op, part)
    return kernels


def _functions(text: str) -> dict[int, str]:
    """Returns for each stack frame of the text's tables the innermost function of this project, "module.function"."""
    files, functions, locations, frames = (
        _table(text, name) for name in ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
    )
    innermost = {0: ""}
    for number, frame in frames.items():
        location, parent = re.findall(r"=(\d+)", frame)  # the parent's number is one more than that of its row
        file, function, *_ = re.findall(r"=(\d+)", locations[location])
        path, name = Path(files[file].strip('"')), functions[function].strip('"')
        qualified = f"{path.stem}.{name.split('.<locals>')[0]}"
        innermost[int(number)] = qualified if __name__.partition(".")[0] in path.parts else innermost[int(parent) - 1]
    return innermost


def _table(text: str, name: str) -> dict[str, str]:
    match = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    return dict(re.findall(r"^(\d+) (.*)$", match[1], re.MULTILINE)) if match else {}


def _parse(text: str) -> tuple[str, dict[str, _Computation]]:
    entry, computations, name, ops = "", {}, "", []
    for line in text.splitlines():
        if not line.startswith((" ", "}")):
            if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*{$", line):
                name, ops = head[2], []
                entry = name if head[1] else entry
        elif line.startswith("}") and name:
            computations[name], name = _Computation(ops), ""
        elif name and (op := _parse_op(line)):
            ops.append(op)
    if not entry:
        raise UserError("this text holds no ENTRY computation: it is not what compiled.as_text() of JAX returns.")
    return entry, computations


def _parse_op(line: str) -> _Op | None:
    head = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if head is None:
        return None
    rhs = re.sub(r"/\*.*?\*/", "", line[head.end() :])
    cut = _closing(rhs, 0) if rhs.startswith("(") else rhs.index(" ")
    kind, rhs = rhs[:cut], rhs[cut:].lstrip()
    opened = rhs.index("(")
    closed = _closing(rhs, opened)
    operands = tuple(re.findall(r"%([\w.\-]+)", rhs[opened:closed]))
    return _Op(head[2], kind, rhs[:opened], operands, rhs[closed:], head[1] is not None)


def _closing(text: str, start: int) -> int:
    depth = 0
    for match in re.finditer(r"[()]", text[start:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return start + match.end()
    raise UserError(f"HLO line with an open parenthesis: {text[:200]}")
