"""Decoder families: config field names, tensor names and row order in both file formats. Opens no file.

A checkpoint is accepted only when every field that it states is known not to change the decoder's
mathematics: a model of another kind is refused by name instead of being computed wrongly.
"""

import math
from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from lw_jax.core.errors import UserError
from lw_jax.core.types import Tree
from lw_jax.hub import config_json, rope_fields
from lw_jax.hub.config_json import Decoder, Packing, Rope, is_stated
from lw_jax.hub.rope_fields import PARTIAL
from lw_jax.models.decoder import DecoderConfig, abstract
from lw_jax.models.rotary import LongRope

Fields = Mapping[str, Any]
DEFAULT_THETA = 10000.0  # of files that state none, as Llama 2's and older .gguf

_REQUIRED = config_json.names(Decoder, required=True)
_HANDLED = _REQUIRED | {
    "is_decoder",  # every one is
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "quantization_config",
    "tie_word_embeddings",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
}


class Family(NamedTuple):
    """Fields of one model_type's config.json beyond the common ones."""

    architecture: str  # transformers' class
    must: dict[str, Any]  # field -> the only value that the decoder computes; absent or null means it
    norm: str = "rms"
    required: Set[str] = frozenset()
    read: Set[str] = frozenset()  # fields that `decoder_config` reads
    silent: Set[str] = frozenset()  # fields that speak only where one of `must` has another value
    rope: Set[str] = frozenset({"default"})  # kinds of frequency scaling
    biases: bool | None = False  # of q, k and v; None: the file says
    fused: bool = False  # q, k, v and gate, up are stored as one tensor each
    rotated: float = 1.0  # share of a head's dimensions where the file states none
    square: bool = False  # transformers' class takes head_dim from the width, whatever the file says

    @property
    def epsilon(self) -> str:
        """Name of the field of the norms' epsilon."""
        return {"rms": "rms_norm_eps", "layer": "layer_norm_eps"}[self.norm]


FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        {"attention_bias": False, "mlp_bias": False, "rope_interleaved": False, PARTIAL: 1.0},
        rope={"default", "llama3"},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {"use_sliding_window": False, "use_mrope": False, PARTIAL: 1.0},
        required={"num_key_value_heads"},
        silent={"sliding_window", "max_window_layers"},
        rope={"default", "llama3"},
        biases=True,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {"attention_bias": False, "mlp_bias": False, "full_attn_mod": 1, "interpolate_factor": 1},
        required={"num_key_value_heads"},
        read={"sliding_window", PARTIAL, "original_max_position_embeddings"},
        rope={"default", "longrope"},
        fused=True,
    ),
    "stablelm": Family(
        "StableLmForCausalLM",
        {"use_parallel_residual": False, "qk_layernorm": False},
        norm="layer",
        required={"num_key_value_heads"},
        read={"use_qkv_bias", PARTIAL},
        biases=None,
        rotated=0.25,
        square=True,
    ),
}
_MUST_EQUAL_ALL = {"hidden_act": "silu", "is_encoder_decoder": False, "is_causal": True, "pretraining_tp": 1}
# Running, training, saving and generation: not used in computing logits. Code that `auto_map` names is never run.
HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _experts_implementation _flash_attn_2_enabled _from_model_config _name_or_path _num_labels architectures
    attention_dropout attention_probs_dropout_prob attn_implementation auto_map chunk_size_feed_forward
    classifier_dropout custom_pipelines dtype embd_pdrop experts_implementation finetuning_task
    gradient_checkpointing hidden_dropout hidden_dropout_prob id2label initializer_range is_llama_config
    keys_to_ignore_at_inference label2id max_sequence_length model_max_length name_or_path neftune_noise_alpha
    num_labels output_attentions output_hidden_states output_past prefix problem_type resid_pdrop return_dict
    task_specific_params tf_legacy_loss tokenizer_class torch_dtype torchscript transformers.js_config
    transformers_version unsloth_fixed unsloth_version use_bfloat16 use_cache xla_device
    assistant_confidence_threshold assistant_early_exit assistant_lookbehind bad_words_ids begin_suppress_tokens
    bos_token_id cache_config cache_implementation compile_config constraints decoder_start_token_id disable_compile
    diversity_penalty do_sample dola_layers early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty
    eos_token_id epsilon_cutoff eta_cutoff exponential_decay_length_penalty force_words_ids forced_bos_token_id
    forced_eos_token_id guidance_scale is_assistant length_penalty low_memory max_length max_matching_ngram_size
    max_new_tokens max_time min_length min_new_tokens min_p no_repeat_ngram_size num_assistant_tokens
    num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences output_logits output_scores
    pad_token_id penalty_alpha prefill_chunk_size prompt_lookup_num_tokens remove_invalid_values renormalize_logits
    repetition_penalty return_dict_in_generate sep_token_id sequence_bias stop_strings suppress_tokens
    target_lookbehind temperature token_healing top_h top_k top_p typical_p watermarking_config
    """.split()
)


class Row(NamedTuple):
    """One leaf's names in both file formats ({} is the layer), and the axis of [out, in] that splits into heads."""

    hugging_face: str
    gguf: str = ""  # empty: that format has no such model, or ours does not read it
    split: int | None = None


TENSORS: dict[str, Row] = {
    "embed": Row("model.embed_tokens.weight", "token_embd.weight"),
    "norm": Row("model.norm.weight", "output_norm.weight"),
    "norm_bias": Row("model.norm.bias", "output_norm.bias"),
    "head": Row("lm_head.weight", "output.weight"),
    "layers/attn_norm": Row("model.layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight"),
    "layers/mlp_norm": Row("model.layers.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight"),
    "layers/attn_norm_bias": Row("model.layers.{}.input_layernorm.bias", "blk.{}.attn_norm.bias"),
    "layers/mlp_norm_bias": Row("model.layers.{}.post_attention_layernorm.bias", "blk.{}.ffn_norm.bias"),
    "layers/q": Row("model.layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight", 0),
    "layers/k": Row("model.layers.{}.self_attn.k_proj.weight", "blk.{}.attn_k.weight", 0),
    "layers/v": Row("model.layers.{}.self_attn.v_proj.weight", "blk.{}.attn_v.weight", 0),
    "layers/o": Row("model.layers.{}.self_attn.o_proj.weight", "blk.{}.attn_output.weight", 1),
    "layers/q_bias": Row("model.layers.{}.self_attn.q_proj.bias", "blk.{}.attn_q.bias", 0),
    "layers/k_bias": Row("model.layers.{}.self_attn.k_proj.bias", "blk.{}.attn_k.bias", 0),
    "layers/v_bias": Row("model.layers.{}.self_attn.v_proj.bias", "blk.{}.attn_v.bias", 0),
    "layers/gate": Row("model.layers.{}.mlp.gate_proj.weight", "blk.{}.ffn_gate.weight"),
    "layers/up": Row("model.layers.{}.mlp.up_proj.weight", "blk.{}.ffn_up.weight"),
    "layers/down": Row("model.layers.{}.mlp.down_proj.weight", "blk.{}.ffn_down.weight"),
}

# Fused stored matrices, their parts in the order of the rows.
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}

Place = tuple[tuple[str, ...], int | None]  # path in the parameter tree, layer of a stacked leaf


class Slot(NamedTuple):
    """Destination of a stored tensor: path in the parameter tree, layer of a stacked leaf, shape in the file."""

    path: tuple[str, ...]
    layer: int | None
    shape: tuple[int, ...]


def tensor_map(cfg: DecoderConfig) -> dict[str, Slot]:
    return list_slots(abstract(cfg, jnp.float32), TENSORS, "hugging_face")


def list_slots(tree: Tree, rows: Mapping[str, Row], container: str) -> dict[str, Slot]:
    """Returns name in a "hugging_face" or "gguf" file -> destination, for each tensor of a tree of shapes."""
    leaves = {name: leaf for name, leaf in tree.items() if name != "layers"}
    leaves |= {f"layers/{name}": leaf for name, leaf in tree["layers"].items()}
    out = {}
    for name, leaf in leaves.items():
        row, path, stacked = rows[name], tuple(name.split("/")), name.startswith("layers/")
        shape, split = leaf.shape[1:] if stacked else leaf.shape, row.split
        if split is not None:
            shape = (*shape[:split], shape[split] * shape[split + 1], *shape[split + 2 :])
        for layer in range(leaf.shape[0]) if stacked else [None]:
            out[getattr(row, container).format(layer)] = Slot(path, layer, shape)
    return out


def parts(name: str) -> tuple[str, ...]:
    """Returns the names of a fused tensor's parts in the order of its rows; the name itself for any other."""
    for fused, members in FUSED.items():
        if f".{fused}." in name:
            return tuple(name.replace(fused, part) for part in members)
    return (name,)


def fuse(tensors: Mapping[str, np.ndarray], model_type: str) -> dict[str, np.ndarray]:
    if not FAMILIES[model_type].fused:
        return dict(tensors)
    wholes = {part: fused for fused, members in FUSED.items() for part in members}
    out: dict[str, np.ndarray] = {}
    for name in tensors:
        part = next((part for part in wholes if f".{part}." in name), None)
        whole = name if part is None else name.replace(part, wholes[part])
        if whole not in out:
            out[whole] = np.concatenate([tensors[member] for member in parts(whole)])
    return out


def decoder_config(fields: Fields, *, where: str = "config.json") -> DecoderConfig:
    """Returns the decoder's configuration from the fields of a config.json, read as transformers 5 reads them.

    Raises UserError for another family, a missing size, and a field that changes the mathematics.
    """
    family = _family(fields, where)
    refuse_fields(
        fields,
        required=_REQUIRED | family.required | {family.epsilon},
        must=_MUST_EQUAL_ALL | family.must,
        free=_HANDLED | HARMLESS | {family.epsilon} | family.read | family.silent,
        where=where,
    )
    stated = config_json.check(fields, Decoder, where)
    if kinds := set(stated.layer_types or ()) - {"full_attention"}:
        raise UserError(f"{where}: layer_types has {sorted(kinds)}, only 'full_attention' is supported")
    if fields.get("quantization_config"):
        _refuse_packing(stated.quantization_config, where)
    width, heads = stated.hidden_size, stated.num_attention_heads
    kv_heads = stated.num_key_value_heads or heads
    head_dim = stated.head_dim or width // heads
    spelling = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"  # of transformers 4 and 5
    rope = getattr(stated, spelling) or Rope()
    partial = PARTIAL not in family.must
    rope_fields.check(fields.get(spelling) or {}, rope, family.rope, partial=partial, where=where)
    rotated = int(head_dim * (rope.partial_rotary_factor or stated.partial_rotary_factor or family.rotated))
    cfg = DecoderConfig(
        vocab=stated.vocab_size,
        width=width,
        layers=stated.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=stated.intermediate_size,
        rope_theta=float(rope.rope_theta or stated.rope_theta or DEFAULT_THETA),
        norm_eps=float(getattr(stated, family.epsilon)),
        max_positions=stated.max_position_embeddings,
        tied=bool(stated.tie_word_embeddings),
        qkv_bias=bool(stated.use_qkv_bias) if family.biases is None else family.biases,
        rope_scaling=rope_fields.read_scaling(rope, stated, rotated, where),
        norm=family.norm,
        rotated=0 if rotated == head_dim else rotated,
        window=(stated.sliding_window or 0) if "sliding_window" in family.read else 0,
    )
    if family.square and cfg.head_dim * heads != width:
        raise UserError(f"{where}: head_dim={head_dim}, only hidden_size / num_attention_heads is supported")
    if cfg.heads % cfg.kv_heads or cfg.head_dim < 2 or cfg.head_dim % 2 or rotated < 2 or rotated % 2:
        raise UserError(
            f"{where}: impossible sizes: num_attention_heads={heads} must be a multiple of "
            f"num_key_value_heads={kv_heads}, head_dim={cfg.head_dim} even and positive, and so its part that "
            f"{PARTIAL} names; fetch the file again"
        )
    return cfg


def _family(fields: Fields, where: str) -> Family:
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = f"readers of model_type {sorted(FAMILIES)} are supported"
        raise UserError(f"{where}: model_type={model_type!r:.80}; {known}")
    return FAMILIES[model_type]


# AutoAWQ's layout: groups of 128 along the inputs, with zero points, eight columns interleaved in a word.
_AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 128, "zero_point": True}


def _refuse_packing(stated: Packing | None, where: str) -> None:
    stated = stated or Packing()
    for key, value in _AWQ.items():
        actual = getattr(stated, key)
        if (actual.lower() if isinstance(actual, str) else actual) != value:
            raise UserError(
                f"{where}: quantization_config.{key}={actual!r}, only {value!r} is read (AWQ GEMM, 4 "
                "bits); use the model's unquantised folder, and pack it while loading: weights='nf4'"
            )
    if names := stated.modules_to_not_convert:
        raise UserError(f"{where}: quantization_config.modules_to_not_convert={names!r}: all matrices must be packed")


def refuse_fields(fields: Fields, *, required: Set[str], must: Fields, free: Set[str], where: str) -> None:
    """Refuses fields without a `required` one, with another value than in `must`, or that state an unknown name.

    An unknown one says nothing where its value is what transformers takes for an absent field: null, false, empty.
    """
    family = fields.get("model_type")
    if missing := sorted(key for key in required if fields.get(key) is None):
        raise UserError(f"{where}: field {missing[0]} is missing; it is needed for model_type {family!r}")
    for key, value in must.items():
        actual = fields.get(key)
        if actual is not None and (actual != value or isinstance(actual, bool) != isinstance(value, bool)):
            raise UserError(f"{where}: {key}={actual!r:.80}, only {value!r} is supported for model_type {family!r}")
    if unknown := sorted(key for key in fields.keys() - free - must.keys() if is_stated(fields[key])):
        name = f"{unknown[0]!r:.80}"[1:-1]
        raise UserError(
            f"{where}: field {name}={fields[unknown[0]]!r:.80} is not known for model_type {family!r} and may "
            "change what the model computes; if it does not, remove it from the file"
        )


def hf_fields(cfg: DecoderConfig, model_type: str) -> dict[str, Any]:
    """Returns the config.json of a model of this family and configuration, the inverse of `decoder_config`.

    Rotary fields are written in the old spelling, which transformers 4 and 5 both read.
    """
    family = FAMILIES[model_type]
    optional = {
        "sliding_window": cfg.window or None,
        "use_qkv_bias": cfg.qkv_bias,
        PARTIAL: math.nextafter((cfg.rotated or cfg.head_dim) / cfg.head_dim, 1.0),  # readers cut the product off
    }
    if isinstance(cfg.rope_scaling, LongRope):
        optional["original_max_position_embeddings"] = cfg.rope_scaling.original_max_positions
    return {
        "architectures": [family.architecture],
        "model_type": model_type,
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.width,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.ffn,
        "hidden_act": "silu",
        family.epsilon: cfg.norm_eps,
        "max_position_embeddings": cfg.max_positions,
        "tie_word_embeddings": cfg.tied,
        "pad_token_id": None,  # or Phi-3's default, beyond a small vocabulary
        "rope_theta": cfg.rope_theta,
        "rope_scaling": cfg.rope_scaling and rope_fields.write_scaling(cfg.rope_scaling, cfg.max_positions),
    } | {key: value for key, value in optional.items() if key in family.read}
