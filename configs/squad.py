"""SQuAD over the wire with a small real reader, SmolLM2-135M, whose body the encoder starts from.

    python run.py --config configs/squad.py                       # SQuAD from the hub; one card
    python run.py --config configs/squad.py --config.data.train=FILE --config.data.validation=OTHER

Stages: adapters alone, then reconstruction and continuation of growing passages, then questions with everything
trained, in messages of 8, 16 or 32 slots and of several precisions. As it is not measured; what a much smaller run of
it gave: docs/experiments.md (E2, E3).
"""

from ml_collections import ConfigDict

from configs import base, models


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns base.py with one small reader, three stages and the text-prompted reader's distribution as target."""
    c = base.get_config(recipe)
    c.llms.llama = models.smollm2_135m()
    c.encoder.source = c.llms.llama.source
    c.encoder.sha256 = c.llms.llama.sha256
    c.adapter.start = "aligned"
    c.prompt.system = "Answer with a few words from the text."
    c.prompt.anchor = ""
    c.data.train = "hub:rajpurkar/squad"
    c.data.validation = "hub:rajpurkar/squad"
    c.data.context_tokens = 640
    c.data.overlong = "drop"
    c.loss.kl = 1.0
    c.stages.align.share = 0.05
    c.stages.pretrain.share = 0.6
    c.stages.answer.rate = 0.5
    c.stages.answer.slots = (8, 16, 32)
    c.stages.answer.bits = (16, 8, 4)
    c.optim.learning_rate = 3e-4
    c.optim.warmup_steps = 200
    c.train.steps = 12000
    c.train.global_batch = 128
    c.train.eval_every = 1000
    c.train.checkpoint_every = 500
    c.train.alarm_step = 2000
    c.eval.examples = 512
    c.compute.dtype = "bf16"
    return c
