"""Real text for two real readers of two families: SmolLM2-135M and Qwen2.5-Coder-1.5B, a fourth of the positions.

    python run.py --config configs/pair.py                                    # SQuAD from the hub
    python run.py --config configs/pair.py --config.data.train=FILE --config.data.validation=OTHER

A slot for every nine tokens: the encoder, SmolLM2 with its causal mask, takes six
layers' states of the rarest tokens; each reader gets keys and values of every layer. Both begin at the readers' own.
Half of the steps write the text out again, half answer questions: latents then say more of their text. Two cores,
24 GiB: 33 s a step with AMX, 74 s without, 17.4 GB. What it gave: docs/experiments.md, "The pair". No GPU tried.
"""

from ml_collections import ConfigDict

from configs import base, models, squad


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns squad.py with two readers, keys and values, and two stages: the text itself, then its questions."""
    c = squad.get_config(recipe)
    c.llms.llama.weights = "bf16"
    c.llms.qwen = models.qwen25_coder_1_5b()
    c.llms.qwen.weights = "bf16"
    c.encoder.slots = 29
    c.encoder.ratio = 9
    c.encoder.width = 512
    c.encoder.window = 256
    c.encoder.states = 6
    base.keys_and_values(c)
    c.data.context_tokens = 256
    c.data.packed_tokens = 128
    c.data.question_tokens = 48
    c.data.answer_tokens = 20
    c.data.validation_limit = 256
    c.loss.kl = 0.0
    c.stages.align.share = 0.0
    c.stages.pretrain.share = 0.5
    c.stages.pretrain.reconstruct = 1.0
    c.stages.pretrain.lengths = (128,)
    c.stages.answer.rate = 1.0
    c.stages.answer.slots = ()
    c.stages.answer.bits = ()
    c.optim.learning_rate = 5e-4
    c.optim.warmup_steps = 50
    c.train.steps = 2000
    c.train.global_batch = 16
    c.train.eval_every = 200
    c.train.checkpoint_every = 100
    c.train.alarm_step = 200
    c.eval.examples = 256
    return c
