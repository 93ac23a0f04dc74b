"""SmolLM2-135M reads prefix embeddings: four trained layers of its own as encoder, two-fact cards, 93 MB from PyPI.

    python run.py --config configs/embeddings.py

What `benchmarks/peer.py` measures beside PyTorch. Time and table of this run: docs/numbers.md.
"""

from ml_collections import ConfigDict

from configs import base, models


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns base.py with SmolLM2-135M as reader and its first layers as the encoder's pretrained body."""
    c = base.get_config(recipe)
    c.llms.llama = models.smollm2_135m()
    c.encoder.source = c.llms.llama.source
    c.encoder.sha256 = c.llms.llama.sha256
    c.encoder.layers = 4  # of 30: a card is short, and two CPU cores are few
    c.encoder.slots = 16
    c.encoder.window = 64
    c.encoder.rate = 0.1
    c.adapter.start = "aligned"
    c.prompt.user = "{context}\nQuestion: {question}"
    c.prompt.system = "Answer with one word from the text."
    c.prompt.anchor = ""
    c.data.facts = 2
    c.optim.kind = "muon"
    c.optim.learning_rate = 2e-3
    c.optim.warmup_steps = 10
    c.train.steps = 150
    c.train.global_batch = 16
    c.train.checkpoint_every = 50
    c.train.eval_every = 50
    # Asked for an answer in its own words, this reader says sentences: text_taught is the fair upper row.
    c.eval.rows = ("text", "text_taught", "latents", "shuffled", "random", "none", "truncated", "selected_taught")
    return c
