"""One real reader, SmolLM2-135M: profiles of eight sentences in a fifth of their positions, one download of 93 MB.

    python run.py --config configs/default.py

Trained latents: the encoder is the frozen reader with LoRA pairs, keys and values of every layer take the place of the
text and begin at the reader's own. Any CPU or GPU. Time and table of this run: docs/numbers.md.
"""

from ml_collections import ConfigDict

from configs import base, models


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns base.py with SmolLM2-135M as reader and as the encoder's body."""
    c = base.get_config(recipe)
    c.llms.llama = models.smollm2_135m()
    c.llms.llama.weights = "bf16"
    c.llms.llama.template = "plain"
    c.encoder.source = c.llms.llama.source
    c.encoder.sha256 = c.llms.llama.sha256
    c.encoder.window = 128
    c.encoder.slots = 16
    c.encoder.ratio = 6
    c.encoder.states = 3
    base.keys_and_values(c)
    c.prompt.user = "{context}\nQuestion: {question}"
    c.data.train = "profiles"
    c.data.validation = "profiles"
    c.data.cards = 1024
    c.data.facts = 8
    c.data.question_tokens = 48
    c.data.answer_tokens = 20
    c.data.packed_tokens = 128
    c.data.validation_limit = 64
    c.optim.learning_rate = 1e-3
    c.optim.warmup_steps = 5
    c.train.steps = 60
    c.train.global_batch = 8
    c.train.checkpoint_every = 30
    c.train.eval_every = 30
    c.train.alarm_step = 30
    # Taught no form, this reader answers in sentences: text_taught is the fair upper row.
    c.eval.rows = ("text", "text_taught", "latents", "shuffled", "random", "none", "truncated", "selected_taught")
    return c
