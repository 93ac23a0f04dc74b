"""What the preference-tuning configurations share: sane defaults, and the seed project's own for comparison.

    python run.py --config configs/dpo/tinyllama.py --config.data.train=pairs.jsonl          # ours
    python run.py --config configs/dpo/tinyllama.py:seed --config.data.train=pairs.jsonl     # the original's values

No data comes with the project: data.train is a file of rows {"prompt", "chosen", "rejected"}.
"""

from ml_collections import ConfigDict

from configs import base

PAIRS = 320  # of the seed's training set; its epochs are counted in them


def tuned(llm: ConfigDict, *, rank: int, variant: str) -> ConfigDict:
    """Returns a model's own configuration; `variant` "seed" is completed by `seed`."""
    if variant not in ("dpo", "seed"):
        raise ValueError(f"no variant {variant!r}: dpo, seed")
    c = base.get_config("dpo")
    c.llms.policy = llm
    c.lora.rank = rank
    c.data.train = "pairs.jsonl"
    c.compute.dtype = "bf16"
    # LoRA moves a hundredth of the weights: 1e-5 to 5e-5, where tuning all of them takes 5e-7 to 1e-6.
    c.optim.learning_rate = 2e-5
    c.optim.warmup_steps = 10
    c.optim.weight_decay = 0.0
    c.optim.b2 = 0.999
    c.train.global_batch = 16
    c.train.steps = 200
    c.train.eval_every = 50
    c.train.checkpoint_every = 50
    c.train.log_every = 5
    c.eval.examples = 256  # of each validation: a tenth of a large set takes longer than the steps in between
    c.eval.batch = 8
    return c


def seed(c: ConfigDict, *, rate: float, batch: int, warmup: int, every: int, max_length: int) -> ConfigDict:
    """Returns the original's values in our keys: 3 epochs of its pairs; `plan` names what is wrong with them."""
    c.optim.learning_rate = rate
    c.optim.warmup_steps = warmup
    c.lora.dropout = 0.1
    c.train.global_batch = batch
    c.train.steps = 3 * PAIRS // batch
    c.train.eval_every = every
    c.train.checkpoint_every = every
    c.dpo.max_length = max_length
    c.dpo.max_prompt = 512
    c.dpo.truncation = "keep_end"
    return c
