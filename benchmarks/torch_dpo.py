"""The step of preference tuning by TRL's own trainer, LoRA by PEFT; a child of peer.py, knows no JAX.

    python benchmarks/torch_dpo.py CASE --device cuda --precision autocast --compile

CASE is as in torch_wire.py, with a PEFT folder "adapter" where the loss is checked. Prints one JSON line.
"""

import argparse
import tempfile
from typing import Any

import datasets
import numpy as np
import peft
import safetensors.torch
import tokenizers
import torch
import transformers
import trl
from torch_run import build, narrow, parse, say, stored, timed
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer


def make_trainer(args: argparse.Namespace, folder: str) -> DPOTrainer:
    """Returns TRL's trainer over the case's model; its one row of data is never read."""
    spec = args.spec
    (name,) = spec["readers"]
    lora, dpo = spec["lora"], spec["dpo"]
    words = tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="<pad>", eos_token="<eos>"
    )
    return DPOTrainer(
        build(args.case / name, stored(args.precision), args.device, load=args.check is not None),
        args=DPOConfig(
            folder,
            beta=dpo["beta"],
            loss_type=list(dpo["loss"]),
            loss_weights=list(dpo["weights"]),
            label_smoothing=dpo["label_smoothing"],
            max_length=dpo["max_length"],
            gradient_checkpointing=spec["remat"] != "none",
            use_cpu=args.device == "cpu",
            bf16=args.precision != "fp32",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": "a", "chosen": "a", "rejected": "a"}]),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(
            r=lora["rank"],
            lora_alpha=lora["alpha"],
            lora_dropout=lora["dropout"],
            target_modules=list(lora["targets"]),
            task_type="CAUSAL_LM",
        ),
    )


def main() -> None:
    args = parse(__doc__, ("step",))
    torch.manual_seed(0)
    loaded, (name,) = np.load(args.case / "batch.npz"), args.spec["readers"]
    inputs = {
        key: torch.from_numpy(np.concatenate([loaded[f"{name}/{ours}"][:, side] for side in (0, 1)])).long()
        for key, ours in (("input_ids", "ids"), ("attention_mask", "mask"), ("completion_mask", "completion"))
    }
    inputs = {key: value.to(args.device) for key, value in inputs.items()}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(args, folder)
        trainer.current_gradient_accumulation_steps = 1  # set by train(), which would read data
        model: Any = trainer.model
        if args.check:
            adapter = safetensors.torch.load_file(args.case / "adapter" / "adapter_model.safetensors")
            peft.set_peft_model_state_dict(model, adapter)
        learns = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(learns, lr=2e-5, weight_decay=0.0, fused=True)
        if args.compile:
            model.compile()

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            optimizer.zero_grad(set_to_none=True)
            with narrow(args):  # the trainer would do so itself in `train`, which prepares the model
                loss = trainer.training_step(model, inputs)
            norm = torch.nn.utils.clip_grad_norm_(learns, 1.0)
            optimizer.step()
            return loss, norm

        if args.check:
            loss, norm = step()
            np.savez(args.check, allow_pickle=False)
            told = {"loss": float(loss.detach()), "grad_norm": float(norm)}
        else:
            told = timed(step, args)
        say(told, args, trl=trl.__version__, peft=peft.__version__)


if __name__ == "__main__":
    main()
