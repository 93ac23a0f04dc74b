"""GPU specifications, target names, and compilation for GPUs on a machine without any.

Units: bytes, bytes/s and FLOP/s; GB is 1e9. Sources, where a constant names none of its own:

- XLA: openxla/xla, xla/backends/gpu/target_config/specs/*.txtpb (what the driver reported on such a card).
- A100: "NVIDIA A100 Tensor Core GPU" data sheet (2021), SXM columns. H100: "NVIDIA H100 Tensor Core GPU" data sheet
  (2023), SXM5 column, halved where it counts sparsity. H200: its data sheet (2024), SXM column, halved likewise.
- B200: "NVIDIA Blackwell" / HGX B200 data sheet (2024), one eighth of the board, halved likewise.
- Ada: "NVIDIA Ada GPU Architecture" white paper (RTX 4090 and its SM), L40S data sheet; dense, fp32 accumulation.
- V100: "NVIDIA V100 Tensor Core GPU" data sheet (2020), SXM2 column. It has no bf16, tf32 or int8 tensor cores: XLA
  converts bf16 operands and multiplies in fp32 (seen in programs compiled for it, jax 0.10.2), int8 runs as DP4A, four
  products in the place of one. Memory of v100_32: what its driver reports (CUDA's deviceQuery).
- Link of rtx4090: GeForce cards cannot access a peer's memory, so that NCCL copies through the host's. While both cards
  send, p2pBandwidthLatencyTest reports 28.8 to 30.5 GB/s both ways for two of them on PCIe 4.0 x16 ("Bidirectional
  P2P=Disabled", github.com/NVIDIA/nccl issue 814 and others): 15 GB/s in each direction.
- Memory of l40s and rtx4090: the smallest "total capacity" found in PyTorch's out-of-memory messages, 44.40 and
  23.52 GiB (github.com: QwenLM/Qwen3-VL issue 2097 on an L40, Soul-AILab/SoulX-FlashTalk issue 5).
"""

import contextlib
import dataclasses
import importlib.metadata
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import SingleDeviceSharding

from lw_jax.core.config import suggest
from lw_jax.core.environment import memory_fraction
from lw_jax.core.errors import UserError

PER_HOST = 8  # largest number of GPUs in one node: HGX boards

# Without a device nothing can be autotuned, and the Triton GEMM fusions then fail for some shapes: "Couldn't find
# output tile sizes that satisfy hlo" (jax 0.10.2). cuBLAS calls carry their dimensions in the HLO, so nothing is lost.
COMPILE_OPTIONS: dict[str, bool | str] = {"xla_gpu_enable_triton_gemm": False}

# How far a card's memory may lie from the figure here and still be that card: drivers and ECC move it by 1 or 2 %.
MEMORY_TOLERANCE = 0.06

# Names of boards with the chip and memory of a card below, but lower clocks, another bandwidth or fewer links.
_OTHER_BOARDS = re.compile(r"PCI|NVL|L40$|V100S|A800|H800|RTX 6000")


class CompilerAbsent(UserError):
    """No compiler for NVIDIA GPUs in this process; the message says what is missing and how to get it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """One kind of GPU."""

    name: str
    model: str  # as the driver names it
    capability: str  # "9.0"
    feature: str = ""  # of the proto's feature_extension
    cores: int  # streaming multiprocessors
    fpus: int  # fp32 units of each
    clock_ghz: float
    bandwidth: int  # of device memory
    l2_bytes: int
    memory_bytes: int  # as the runtime reports it
    shared_bytes: int  # shared memory of one multiprocessor
    # Dense FLOP/s: "bf16", "tf32", "fp32", "int8", and "fp8" where the card has it.
    peak: Mapping[str, float] = dataclasses.field(hash=False)
    nvlinks: int = 0  # 0: PCIe only
    link: float  # between two GPUs of one node, per direction and GPU
    network: float  # between nodes, per direction and GPU
    shares_network: bool = False  # `network` is a node's: its GPUs divide it

    @property
    def proto(self) -> str:
        """The smallest text of stream_executor.GpuTargetConfigProto that XLA compiles for."""
        major, minor = self.capability.split(".")
        feature = f"feature_extension: {self.feature}" if self.feature else ""
        links = f"device_interconnect_info {{ active_links: {self.nvlinks} }}" if self.nvlinks else ""
        # CUDA C++ Programming Guide, technical specifications per capability.
        threads = 1536 if self.capability == "8.9" else 2048
        # Bytes that the driver keeps of each block's shared memory, on every card since Ampere.
        reserved = 1024 if multiplies_bf16(self.capability) else 0
        return f"""
            gpu_device_info {{
              name: "{self.model}" device_vendor: "NVIDIA Corporation" device_address_bits: 64 ecc_enabled: true
              cuda_compute_capability {{ major: {major} minor: {minor} {feature} }}
              core_count: {self.cores} fpus_per_core: {self.fpus} clock_rate_ghz: {self.clock_ghz}
              memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2_bytes} device_memory_size: {self.memory_bytes}
              shared_memory_per_core: {self.shared_bytes} shared_memory_per_block: 49152
              shared_memory_per_block_optin: {self.shared_bytes - reserved}
              threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: {threads}
              thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              registers_per_core_limit: 65536 registers_per_block_limit: 65536 pcie_bandwidth: 34359738368
              driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
              dnn_version: "9.10.0" {links}
            }}
            platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{self.model}"
        """


def multiplies_bf16(capability: str) -> bool:
    """Says whether a card of this compute capability has tensor cores for bf16: Ampere (8.0) and later."""
    return float(capability) >= 8.0


def describe_precision(asked: Sequence[str], capability: str) -> str:
    """Returns how a card of this compute capability (empty: no GPU) computes values of the asked kinds, fp32 and bf16.

    A run's values keep their precision on every card, so that it stays the same run; what differs is in which units
    they are multiplied. Without bf16 units XLA converts bf16 operands to fp32, which is exact, and multiplies there.
    """
    modern = bool(capability) and multiplies_bf16(capability)
    notes = []
    for word in asked:
        units = {"fp32": "tf32" if modern else "fp32", "bf16": "bf16" if modern or not capability else "fp32"}[word]
        notes.append(word if units == word else f"{word} values, multiplied in {units}")
    if capability and not modern and "bf16" in asked:
        notes.append(f"compute capability {capability} has no bf16 units: no faster than fp32, only smaller")
    return "; ".join(notes)


_A100 = {"capability": "8.0", "cores": 108, "fpus": 64, "clock_ghz": 1.41, "l2_bytes": 41943040}  # XLA
_A100 |= {"shared_bytes": 167936, "nvlinks": 12}  # XLA
_A100 |= {"peak": {"bf16": 312e12, "tf32": 156e12, "fp32": 19.5e12, "int8": 624e12}}  # A100 data sheet
_A100 |= {"link": 300e9}  # A100 data sheet: 600 GB/s both ways
_A100 |= {"network": 25e9}  # DGX A100 data sheet: one 200 Gb/s port a GPU

_HOPPER = {"capability": "9.0", "feature": "ACCELERATED_FEATURES", "cores": 132, "fpus": 128, "clock_ghz": 1.98}  # XLA
_HOPPER |= {"l2_bytes": 52428800, "shared_bytes": 233472, "nvlinks": 18}  # XLA
_HOPPER |= {"peak": {"bf16": 989.5e12, "tf32": 494.5e12, "fp32": 67e12, "fp8": 1979e12}}  # H100 and H200 data sheets
_HOPPER["peak"] |= {"int8": 1979e12}  # H100 and H200 data sheets
_HOPPER |= {"link": 450e9}  # H100 data sheet: 900 GB/s both ways
_HOPPER |= {"network": 50e9}  # DGX H100 data sheet: one 400 Gb/s port a GPU

_ADA = {"capability": "8.9", "fpus": 128, "clock_ghz": 2.52, "shared_bytes": 102400}  # Ada

_V100 = {"capability": "7.0", "cores": 80, "fpus": 64, "clock_ghz": 1.53, "l2_bytes": 6291456}  # XLA
_V100 |= {"bandwidth": 898048000000, "shared_bytes": 98304, "nvlinks": 6}  # XLA
_V100 |= {"peak": {"bf16": 15.7e12, "tf32": 15.7e12, "fp32": 15.7e12, "int8": 62.8e12}}  # V100, all of fp32's units
_V100 |= {"link": 150e9}  # V100 data sheet: 300 GB/s both ways
_V100 |= {"network": 6.25e9}  # DGX-1 data sheet: four 100 Gb/s ports for eight GPUs

CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        Card(
            name="h100",
            model="NVIDIA H100 80GB HBM3",
            bandwidth=3352320000000,  # XLA
            memory_bytes=84942979072,  # XLA
            **_HOPPER,
        ),
        Card(
            name="h200",
            model="NVIDIA H200",
            bandwidth=4800000000000,  # XLA
            memory_bytes=151397597184,  # XLA
            **_HOPPER,
        ),
        Card(
            name="a100_40",
            model="NVIDIA A100-SXM4-40GB",
            bandwidth=1555200000000,  # XLA
            memory_bytes=42331013120,  # XLA
            **_A100,
        ),
        Card(
            name="a100_80",
            model="NVIDIA A100-SXM4-80GB",
            bandwidth=2039040000000,  # XLA
            memory_bytes=85100068864,  # XLA
            **_A100,
        ),
        Card(
            name="b200",
            model="NVIDIA B200",
            capability="10.0",
            feature="ACCELERATED_FEATURES",
            cores=148,  # XLA, and so to `shared_bytes`
            fpus=128,
            clock_ghz=1.965,
            bandwidth=7672320000000,
            l2_bytes=132644864,
            memory_bytes=191514411008,
            shared_bytes=233472,
            peak={"bf16": 2250e12, "tf32": 1125e12, "fp32": 75e12, "fp8": 4500e12, "int8": 4500e12},  # B200
            nvlinks=18,  # XLA
            link=900e9,  # B200: 1.8 TB/s both ways
            network=50e9,  # DGX B200 data sheet: one 400 Gb/s port a GPU
        ),
        Card(
            name="l40s",
            model="NVIDIA L40S",
            cores=142,  # L40S data sheet, as 142 third-generation RT cores, one a multiprocessor
            bandwidth=864000000000,  # L40S data sheet
            l2_bytes=100663296,  # Ada: the full AD102's
            memory_bytes=47674136985,
            # L40S data sheet
            peak={"bf16": 362.05e12, "tf32": 183e12, "fp32": 91.6e12, "fp8": 733e12, "int8": 733e12},
            link=32e9,  # PCIe 4.0 x16, L40S data sheet: 64 GB/s both ways
            network=12.5e9,  # assumed: a 200 Gb/s port for two cards
            **_ADA,
        ),
        Card(
            name="rtx4090",
            model="NVIDIA GeForce RTX 4090",
            cores=128,  # Ada
            bandwidth=1008000000000,  # Ada
            l2_bytes=75497472,  # Ada
            memory_bytes=25254407700,
            peak={"bf16": 165.2e12, "tf32": 82.6e12, "fp32": 82.6e12, "fp8": 330.3e12, "int8": 660.6e12},  # Ada
            link=15e9,  # through the host's memory, see above
            network=1.25e9,  # assumed: 10 Gb/s Ethernet
            shares_network=True,
            **_ADA,
        ),
        Card(
            name="v100_16",
            model="Tesla V100-SXM2-16GB",
            memory_bytes=16935682048,  # XLA
            **_V100,
        ),
        Card(
            name="v100_32",
            model="Tesla V100-SXM2-32GB",
            memory_bytes=34089730048,
            **_V100,
        ),
    )
}
_ALIASES = {"h100_80": "h100", "h200_141": "h200", "l40s_48": "l40s", "rtx4090_24": "rtx4090"}


@dataclasses.dataclass(frozen=True)
class Target:
    """Nodes of equal cards; device i of a mesh stands in node i // per_host."""

    card: Card
    per_host: int
    hosts: int = 1

    @property
    def devices(self) -> int:
        return self.per_host * self.hosts

    @property
    def name(self) -> str:
        """The word that `parse` reads back."""
        nodes = f"{self.hosts}x" if self.hosts > 1 else ""
        return f"{nodes}{self.card.name}x{self.per_host}"

    def spans_hosts(self, group: Sequence[int]) -> bool:
        return len({device // self.per_host for device in group}) > 1

    def link_bandwidth(self, group: Sequence[int]) -> float:
        """Returns what each device of the group can send, in bytes/s and one direction, while all of them do.

        In a ring over nodes only one device of a node hands the data on, but the members of a node share their ports
        for it, as NCCL's parallel rings do: so k members of each node send as if at k ports.
        """
        if not self.spans_hosts(group):
            return self.card.link
        members = min(Counter(device // self.per_host for device in group).values())
        port = self.card.network / (self.per_host if self.card.shares_network else 1)
        return min(self.card.link, members * port)


def parse(text: str) -> Target:
    """Returns the target that a word names: "h100x4", "a100_40x2", "2xh100x8" (nodes x card x GPUs a node).

    More than eight cards without a number of nodes are nodes of eight: "h100x16". Raises UserError for anything else.
    """
    word = text.strip().lower().replace("-", "_")
    named = "|".join([*CARDS, *_ALIASES])  # before any other word, or rtx4090 would be 4090 cards named "rt"
    match = re.fullmatch(rf"(?:(\d+)x)?({named}|[a-z]\w*?)(?:gb)?(?:x(\d+))?", word)
    rule = "a target is [NODESx]CARD[xGPUS], as in h100x4 or 2xh100x8"
    if match is None:
        raise UserError(f"target {text!r}: {rule}; the cards are {', '.join(CARDS)}.")
    name = _ALIASES.get(match[2], match[2])
    if name not in CARDS:
        known = f"the cards are {', '.join(CARDS)}"
        raise UserError(f"target {text!r}: {match[2]!r} is no known card.{suggest(name, CARDS)} {rule}; {known}.")
    hosts, count = int(match[1] or 1), int(match[3] or 1)
    if hosts < 1 or count < 1:
        raise UserError(f"target {text!r}: {hosts} nodes of {count} GPUs; there is at least one of each ({rule}).")
    if match[1] is None and count > PER_HOST and count % PER_HOST == 0:
        hosts, count = count // PER_HOST, PER_HOST
    if count > PER_HOST:
        wanted = -(-hosts * count // PER_HOST)
        raise UserError(
            f"target {text!r}: a node holds at most {PER_HOST} GPUs, and more are whole nodes of {PER_HOST}; "
            f"say {wanted}x{name}x{PER_HOST}, or another number of nodes."
        )
    return Target(CARDS[name], count, hosts)


def compile_devices(target: Target) -> list[Any]:
    """Returns stand-ins for the target's devices: a mesh of them can be compiled for, and nothing can run on them.

    Needs JAX_PLATFORMS=cpu and, where no driver is, JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1, both set before JAX starts.
    Raises CompilerAbsent.
    """
    try:
        devices = topologies.get_topology_desc(
            platform="cuda", target_config=target.card.proto, topology=f"1x{target.hosts}x{target.per_host}"
        ).devices
    except NotImplementedError as error:  # "topology not implemented for cuda": no plugin has registered
        raise CompilerAbsent(_describe_absence(target)) from error
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(devices[0]))
    try:
        compile_lowered(jax.jit(jnp.exp).lower(scalar))
    except jax.errors.JaxRuntimeError as error:
        if re.search("libdevice|ptxas|PTX", str(error)) is None:
            raise
        cause = str(error).partition("\n")[0].partition(". ")[0]
        raise CompilerAbsent(
            f"target {target.name}: XLA's CUDA plugin is here, NVIDIA's assembler is not ({cause}); {_remedy(())}"
        ) from error
    return devices


def compile_lowered(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles what was lowered for devices of `compile_devices`, past the persistent cache.

    JAX writes such a program into the cache but cannot read it without a GPU: each later run would compile again, with
    a warning.
    """
    with compile_cache(None):
        return lowered.compile(compiler_options=COMPILE_OPTIONS)


@contextlib.contextmanager
def compile_cache(folder: str | None) -> Iterator[None]:
    """Context in which compiled programs are kept in another folder; None: nowhere."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()  # JAX opens its cache once, and remembers
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


def of_device(device: Any) -> Card | None:
    """Returns the card of a live device by what the runtime reports; None where unknown.

    Capability and number of multiprocessors decide, and memory between those that share both; a name only excludes. A
    MIG slice, an A100 on PCIe or a card that is not in the table is None.
    """
    if _OTHER_BOARDS.search(device.device_kind):
        return None
    capability, cores = getattr(device, "compute_capability", None), getattr(device, "core_count", None)
    alike = [card for card in CARDS.values() if (card.capability, card.cores) == (capability, cores)]
    if not alike:
        return None
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None:  # XLA_PYTHON_CLIENT_ALLOCATOR=platform keeps no account
        return alike[0] if len(alike) == 1 else None
    memory = limit / memory_fraction()
    nearest = min(alike, key=lambda card: abs(card.memory_bytes - memory))
    return nearest if abs(nearest.memory_bytes / memory - 1) < MEMORY_TOLERANCE else None


def of_all_devices() -> Card | None:
    """Returns the card that all devices of the run are; None where it is unknown, or they are not all of one kind."""
    if len({device.device_kind for device in jax.devices()}) > 1:
        return None
    return of_device(jax.local_devices()[0])  # of another process's JAX refuses to say the memory


def _cuda() -> int:
    return next((v for v in (12, 13) if _is_installed(f"jax-cuda{v}-plugin")), 12)


def _is_installed(name: str) -> bool:
    return any(importlib.metadata.distributions(name=name))


def _remedy(names: Sequence[str]) -> str:
    if _cuda() == 12:
        return "pip install -r requirements-plan.txt (223 MB; without a network: --no-index --find-links FOLDER)"
    return f"pip install {' '.join(f'{name}=={jax.__version__}' for name in names)} nvidia-cuda-nvcc nvidia-nvvm"


def _describe_absence(target: Target) -> str:
    names = [f"jax-cuda{_cuda()}-plugin", f"jax-cuda{_cuda()}-pjrt"]
    if missing := [name for name in names if not _is_installed(name)]:
        return (
            f"target {target.name}: XLA's compiler for NVIDIA GPUs is not installed ({', '.join(missing)}); "
            f"{_remedy(names)}"
        )
    return (
        f"target {target.name}: {names[0]} is installed but unused in this process; set JAX_PLATFORMS=cpu and "
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before JAX starts"
    )
