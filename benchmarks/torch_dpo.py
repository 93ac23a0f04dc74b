"""The step of preference tuning by TRL's own trainer, LoRA by PEFT; a child of peer.py, knows no JAX."""

import tempfile
from typing import Any

import datasets
import peft
import safetensors.torch
import tokenizers
import torch
import transformers
import trl
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

from benchmarks.torch_run import Job, stepper


def make_trainer(job: Job, folder: str) -> DPOTrainer:
    """Returns TRL's trainer over the case's model; its one row of data is never read."""
    (name,), lora, dpo = job.spec["readers"], job.spec["lora"], job.spec["dpo"]
    words = tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="<pad>", eos_token="<eos>"
    )
    return DPOTrainer(
        job.build(name),
        args=DPOConfig(
            folder,
            beta=dpo["beta"],
            loss_type=list(dpo["loss"]),
            loss_weights=list(dpo["weights"]),
            label_smoothing=dpo["label_smoothing"],
            max_length=dpo["max_length"],
            gradient_checkpointing=job.spec["remat"] != "none",
            use_cpu=job.device == "cpu",
            bf16=job.precision != "fp32",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": "a", "chosen": "a", "rejected": "a"}]),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(task_type="CAUSAL_LM", **lora),
    )


def run(**words: Any) -> dict[str, Any]:
    job = Job(**words)
    batch, (name,) = job.batch(), job.spec["readers"]
    inputs = {
        key: torch.cat([batch[f"{name}/{ours}"][:, side] for side in (0, 1)]).long()
        for key, ours in (("input_ids", "ids"), ("attention_mask", "mask"), ("completion_mask", "completion"))
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(job, folder)
        trainer.current_gradient_accumulation_steps = 1  # set by train(), which would read data
        model: Any = trainer.model
        if job.check:
            adapter = safetensors.torch.load_file(job.case / "adapter" / "adapter_model.safetensors")
            peft.set_peft_model_state_dict(model, adapter)
        if job.compiled:
            model.compile()

        def call() -> torch.Tensor:
            with job.narrow():  # the trainer would do so itself in `train`, which prepares the model
                return trainer.training_step(model, inputs)

        step = stepper(model, call, lr=2e-5, weight_decay=0.0)
        told = job.checked({}, step) if job.check else job.timed(step)
        return job.report(told, trl=trl.__version__, peft=peft.__version__)
