"""Memory traffic of a decoder's kernels other than matmuls: bytes that one device moves.

XLA runs norms, activations, softmax, rotations, casts and copies as kernels of their own, each of which reads and
writes whole activations; attention's small products wait for memory too. In a training step of 8 billion parameters
they take a third of the time. How often each kind of activation is moved is counted in compiled programs: the steps
of configs/large.py for H100, remat none and full on one card and none on two that share the products (jax 0.10.2),
every kernel of each layer loop by the dimensions of its arrays, what a product moves beyond the time of its arithmetic
included. docs/planning.md has how far the seconds lie from compiled plans.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Moves:
    """Reads and writes of a layer's values, in one micro-batch."""

    width: float  # values [t d]: residual stream, norms and their gradients
    heads: float  # values [t h e]: queries, attended values, their rotations, transposes and gradients
    ffn: float  # values [t f]: gate, up, their product and their gradients
    scores: float  # bytes of each score [h t k] in bf16 arithmetic; the softmax itself is fp32
    weights: float  # matrices: a scan over layers copies each layer's slice for every pass


# A pass that saves nothing for backward.
FORWARD = Moves(width=16.0, heads=7.0, ffn=3.0, scores=18.0, weights=2.2)
# Forward and backward, by recomputation. "none" writes saved values into stacks of layers, which are copied once more.
FROZEN = {
    "none": Moves(width=41.0, heads=23.0, ffn=15.4, scores=71.0, weights=4.3),
    "full": Moves(width=38.0, heads=23.0, ffn=8.5, scores=82.0, weights=4.9),
}
# The same of trainable weights, stored in fp32: they are cast once, and backward has two matmuls for one.
TRAINED = {
    "none": Moves(width=57.0, heads=27.0, ffn=16.8, scores=68.0, weights=10.0),
    "full": Moves(width=52.0, heads=26.0, ffn=9.8, scores=68.0, weights=10.0),
}
LOGITS = 5.0  # times each fp32 logit is moved: softmax, loss and their gradient
# Reads and writes of fp32 parameters in a step: gradient, parameter and both moments for the update, and norms.
OPTIMIZER = 9.3
ACCUMULATED = 3.0  # with every micro-batch of several: the gradient is added to the sum


@dataclasses.dataclass(frozen=True)
class Layers:
    """Sizes of a decoder's layers."""

    width: int
    layers: int
    heads: int
    head_dim: int
    ffn: int


@dataclasses.dataclass(frozen=True)
class Share:
    """One device's part of a micro-batch."""

    rows: int
    queries: int  # positions of a row
    keys: int  # positions that each attends to
    size: int  # bytes of a value
    weights: float  # bytes of the matrices that it reads from its own memory
    heads: int = 1  # devices that share the heads
    ffn: int = 1  # devices that share the values between the mlp's products


def moved(model: Layers, often: Moves, one: Share) -> float:
    """Returns the bytes that one device moves for all layers of one micro-batch."""
    values = often.width * model.width + often.heads * model.heads * model.head_dim / one.heads
    values += often.ffn * model.ffn / one.ffn
    scores = often.scores * (3 + one.size / 2) / 4 * model.heads / one.heads * one.keys  # three quarters are fp32
    return model.layers * one.rows * one.queries * (values * one.size + scores) + often.weights * one.weights
