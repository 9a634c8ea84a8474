"""config.json becomes a ModelConfig, and what cannot be honoured is refused by name."""

import json

import pytest
from transformers import AutoConfig

from octavo.errors import ConfigError
from octavo.models.config import (
    GenerationConfig,
    ModelConfig,
    parse_generation_config,
    parse_model_config,
)
from octavo.models.fields import Fields
from tests.checkpoints import tiny_config

REQUIRED = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 345,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}


def parse(*, eos_token_ids=(), **changes) -> ModelConfig:
    fields = Fields({**REQUIRED, **changes}, origin="config.json")
    return parse_model_config(fields, GenerationConfig(eos_token_ids=eos_token_ids))


def parse_saved(config, folder) -> ModelConfig:
    """Parse what transformers writes for a config of its own."""
    config.save_pretrained(folder)
    fields = Fields.read(folder / "config.json")
    architecture = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[config.model_type]
    values = {**fields.values, "architectures": [architecture]}
    return parse_model_config(Fields(values, origin="config.json"), GenerationConfig())


def test_fields_left_out_have_the_defaults_of_transformers():
    config = parse()
    assert (config.num_kv_heads, config.head_dim, config.norm_eps) == (4, 16, 1e-6)
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False,) * 3
    assert (config.rope.kind, config.rope.theta) == ("default", 10_000.0)
    assert (config.dtype, config.eos_token_ids, config.bos_token_id) == ("float32", (), None)


def test_null_counts_as_left_out():
    assert parse(head_dim=None, rope_scaling=None, num_key_value_heads=None) == parse()


@pytest.mark.parametrize("name", [name for name in REQUIRED if name != "architectures"])
def test_missing_shape_is_named(name):
    with pytest.raises(ConfigError, match=f"config.json lacks the field {name}"):
        parse(**{name: None})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "awq", "bits": 4}),
        ("partial_rotary_factor", 0.5),
        ("is_causal", False),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "longrope"}),
        ("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ("rope_parameters", {"full_attention": {"rope_theta": 1e6}}),
        ("rope_parameters", "default"),
        ("dtype", "float8_e4m3fn"),
        ("num_hidden_layers", 0),
        ("vocab_size", "345"),
        ("tie_word_embeddings", 1),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", -1.0),
        ("rope_theta", float("inf")),
        ("rope_theta", 10**400),
        ("rope_scaling", {"type": "linear", "factor": 0}),
        ("rope_scaling", {"type": "yarn", "factor": float("nan")}),
        ("rope_scaling", {"type": "yarn", "factor": 2.0, "beta_slow": 0}),
        ("rope_scaling", LLAMA3 | {"high_freq_factor": 1.0}),
        ("num_hidden_layers", 10**9),
        ("vocab_size", 10**12),
        ("hidden_size", 10**12),
        ("eos_token_id", [2, "</s>"]),
        ("architectures", ["A", "B"]),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=r"config\.json") as refusal:
        parse(**{field: value})
    named = value if isinstance(value, dict) else {field: value}
    assert any(name in str(refusal.value) for name in named)


def test_rope_is_read_in_the_old_and_in_the_new_form():
    scaling = {"factor": 4.0, "original_max_position_embeddings": 128}
    old = parse(rope_theta=5e5, rope_scaling={"type": "yarn", **scaling})
    new = parse(rope_parameters={"rope_type": "yarn", "rope_theta": 5e5, **scaling})
    assert old.rope == new.rope
    assert (old.rope.kind, old.rope.theta, old.rope.original_max_positions) == ("yarn", 5e5, 128)


@pytest.mark.parametrize(
    ("rope", "max_positions"),
    [
        ({"rope_type": "default"}, 512),
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}, 1024),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, 512),
        (LLAMA3, 512),
    ],
)
def test_stretching_the_context_extends_the_usable_positions(rope, max_positions):
    assert parse(rope_parameters=rope).max_position_embeddings == max_positions


def test_eos_ids_of_both_files_are_joined():
    assert parse(eos_token_id=2, eos_token_ids=(7, 2)).eos_token_ids == (2, 7)
    assert parse(eos_token_id=[3, 4], eos_token_ids=(5,)).eos_token_ids == (3, 4, 5)


def test_llama_ignores_a_sliding_window():
    assert parse(sliding_window=8).sliding_windows == (None, None, None)


def test_mistral_window_is_in_every_layer():
    changes = {"architectures": ["MistralForCausalLM"], "sliding_window": 8}
    assert parse(**changes).sliding_windows == (8, 8, 8)
    assert parse(**changes | {"sliding_window": None}).sliding_windows == (None, None, None)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 8},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 9},
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ],
)
def test_qwen_windows_are_where_transformers_has_them(model_type, changes, tmp_path):
    theirs = tiny_config(model_type, num_hidden_layers=3, **changes)
    ours = parse_saved(theirs, tmp_path)
    expected = [8 if kind == "sliding_attention" else None for kind in theirs.layer_types]
    assert list(ours.sliding_windows) == expected


def test_unknown_layer_type_is_refused():
    kinds = ["full_attention", "full_attention", "linear_attention"]
    with pytest.raises(ConfigError, match="linear_attention"):
        parse(
            architectures=["Qwen3ForCausalLM"],
            use_sliding_window=True,
            sliding_window=8,
            layer_types=kinds,
        )


def test_weight_type_is_read_in_its_old_form(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**REQUIRED, "torch_dtype": "bfloat16"}))
    fields = Fields.read(tmp_path / "config.json")
    assert parse_model_config(fields, GenerationConfig()).dtype == "bfloat16"


def test_generation_config_has_the_defaults_that_are_set():
    fields = Fields(
        {"eos_token_id": [2, 5], "temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True},
        origin="generation_config.json",
    )
    assert parse_generation_config(fields) == GenerationConfig(
        eos_token_ids=(2, 5), temperature=0.6, top_k=20
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\xff", "[" * 100_000, "1" * 5_000])
def test_file_that_holds_no_object_is_named(text, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        Fields.read(path)


def test_absent_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*config.json: No such file"):
        Fields.read(tmp_path / "config.json")


def test_transformers_reads_the_same_shapes(tiny_9heads):
    theirs = AutoConfig.from_pretrained(tiny_9heads)
    ours = parse_model_config(Fields.read(tiny_9heads / "config.json"), GenerationConfig())
    assert ours.num_heads == theirs.num_attention_heads == 9
    assert ours.num_kv_heads == theirs.num_key_value_heads == 3
    assert ours.head_dim == theirs.head_dim
    assert ours.norm_eps == theirs.rms_norm_eps
