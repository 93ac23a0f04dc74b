"""Eight keys with values on a card, one asked for, two self-made readers: the proof that latents carry information.

    python run.py --config configs/pairs.py
    python run.py eval --workdir runs/pairs-latentwire

No download, no GPU; what it must show stands in tests/smoke/test_proof.py, times in docs/numbers.md.
"""

from ml_collections import ConfigDict

from configs import smoke


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns smoke.py with key-value cards; the encoder has less than a million parameters."""
    c = smoke.get_config(recipe)
    c.encoder.slots = 16
    c.encoder.window = 64
    c.encoder.rate = 1.0
    c.prompt.user = "{context}\n{question}"
    c.prompt.anchor = ""
    c.data.train = "pairs"
    c.data.validation = "pairs"
    c.data.facts = 8
    c.data.cards = 16384
    c.optim.warmup_steps = 20
    c.train.steps = 400
    c.train.eval_every = 100
    c.train.alarm_step = 100
    c.selfmade.steps = 300
    c.selfmade.batch = 32
    c.selfmade.learning_rate = 6e-3
    return c
