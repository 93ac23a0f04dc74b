"""Tables of partition specs over parameter paths.

Paths and dims of a frozen reader are those of docs/architecture.md; a prefix (the reader's name) may stand before.
Families with equal specs share rows, so that each table is live for Llama and Phi-3 (no biases, tied or not), Qwen
(biases) and StableLM (norms with biases). The layer axis is never split: the scan would gather the whole stack.
"""

from jax.sharding import PartitionSpec as P

from sharding.rules import Table

# Encoder and adapters: small; their gradients are summed over data.
TRAINABLE: Table[P] = ((r".*", P()),)

# A fully trainable model, over data: weights are gathered layer by layer, gradients and moments stay sharded.
# Small leaves and those without a dim that divides are replicated.
LEARNER_FSDP: Table[P | tuple[P, ...]] = (
    (r"embed|head", (P(None, "data"), P())),
    (r"layers/([qkvo]|out_gate|gate|up)", (P(None, None, "data"), P())),
    (r"layers/down", (P(None, "data"), P())),
    (r".*", P()),
)

# Of packed matrices: small beside the codes, and in blocks that seldom divide.
_SCALES: Table[P] = ((r"(.*/)?layers/\w+/(scale|zero|row)", P()),)

_READERS: dict[str, Table[P | tuple[P, ...]]] = {
    "replicate": ((r".*", P()),),
    # The model width d, which every matrix has: the scan gathers the slice of one layer.
    "fsdp": (
        (r"(.*/)?(embed|head)", (P(None, "data"), P("data"))),
        (r"(.*/)?layers/[qkv](/codes)?", P(None, None, None, "data")),
        (r"(.*/)?layers/(gate|up)(/codes)?", (P(None, None, "data"), P(None, "data"))),
        (r"(.*/)?layers/(o|down)(/codes)?", P(None, "data")),
        (r"(.*/)?(norm(_bias)?|layers/(\w+_norm|\w+_bias))", P()),
    ),
    # Column-parallel q, k, v, gate, up; row-parallel o, down: one sum after attention and one after the mlp.
    # Heads that do not divide stay whole, because splitting inside a head costs all-to-alls.
    "tensor": (
        (r"(.*/)?(embed|head)", (P("model"), P(None, "model"))),
        (r"(.*/)?layers/[qkv](_bias|/codes)?", (P(None, "model"), P())),
        (r"(.*/)?layers/o(/codes)?", (P(None, None, "model"), P())),
        (r"(.*/)?layers/(gate|up)(/codes)?", P(None, "model")),
        (r"(.*/)?layers/down(/codes)?", P(None, None, "model")),
        (r"(.*/)?(norm(_bias)?|layers/\w+_norm(_bias)?)", P()),
    ),
}


def reader_table(placement: str, *, packed: bool = False) -> Table[P | tuple[P, ...]]:
    """Returns the table of frozen readers for "replicate", "fsdp" (over data) or "tensor" (over model).

    `packed`: their matrices are codes of 4 or 8 bits with separate scales.
    """
    return (*_SCALES, *_READERS[placement]) if packed else _READERS[placement]
