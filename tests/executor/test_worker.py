"""Bringing up a device: what the engine is told of it, and what stops the start."""

import pytest
import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.executor import worker
from octavo.executor.worker import choose_graph_shapes, create_runner, refuse_pool
from octavo.models.rounding import can_round
from tests.attention.fake_xformers import FakeXformers
from tests.models.oracle import source_of


def create(folder, *, load_format="safetensors", **settings):
    config = EngineConfig(**{"num_gpu_blocks_override": 16, **settings})
    return create_runner(config, source_of(folder, load_format, seed=config.seed))


def test_the_engine_is_told_the_limits(tiny_spm):
    info = create(tiny_spm, block_size=8, max_num_seqs=5).info
    assert (info.num_blocks, info.block_size, info.num_rows) == (16, 8, 5)
    assert (info.vocab_size, info.max_model_len) == (345, 512)


def test_defaults_are_those_of_a_cpu(tiny_spm):
    runner = create(tiny_spm, num_gpu_blocks_override=None)
    assert runner.info.num_rows == 64
    assert runner.info.num_blocks == 64 * 512 // 16
    assert runner._backend.kv_pool.dtype == torch.float32


def test_the_vocabulary_has_all_rows_of_the_head(tiny_padded_vocab):
    assert create(tiny_padded_vocab).info.vocab_size == 345 + 37


def test_a_shorter_length_is_taken_and_a_longer_one_refused(tiny_spm):
    assert create(tiny_spm, max_model_len=64).info.max_model_len == 64
    with pytest.raises(ConfigError, match=r"max_model_len is 513, but the model has 512 positions"):
        create(tiny_spm, max_model_len=513)


def test_a_device_that_is_not_supported_stops_the_start(tiny_spm):
    with pytest.raises(ConfigError, match="device is cuda"):
        create(tiny_spm, device="cuda")


def test_weights_and_pool_have_the_type_that_was_asked_for(tiny_spm):
    runner = create(tiny_spm, dtype="bfloat16")
    assert runner._backend.kv_pool.dtype == torch.bfloat16
    assert {p.dtype for p in runner._model.network.parameters()} == {torch.bfloat16}


def test_a_cpu_starts_with_packed_matrices(tiny_spm):
    model = create(tiny_spm)._model.network
    assert not [weight.shape for weight in model.layers.parameters() if weight.dim() > 1]


def test_quantised_matrices_are_kept_so(tiny_spm):
    matrix = create(tiny_spm, quantization="fp8")._model.network.layers[0].mlp.down_proj.matrix
    assert (matrix.weight.dtype, matrix.scale.dtype) == (torch.float8_e4m3fn, torch.float32)


def test_a_pool_of_8_bits_holds_as_many_blocks_in_a_quarter_of_the_bytes(tiny_spm):
    settings = {"num_gpu_blocks_override": None, "max_num_seqs": 10**4}
    plain, small = (
        create(tiny_spm, kv_cache_memory_bytes=num_bytes, kv_cache_dtype=name, **settings)
        for name, num_bytes in (("auto", 2**22), ("fp8", 2**20))
    )
    assert small._backend.kv_pool.dtype == torch.float8_e4m3fn
    assert small.info.num_blocks == plain.info.num_blocks


def test_a_cpu_attends_by_its_own_backend_but_to_kv_in_8_bits(tiny_spm):
    assert create(tiny_spm).info.attention_backend == "cpu"
    assert create(tiny_spm, attention_backend="reference").info.attention_backend == "reference"
    assert create(tiny_spm, kv_cache_dtype="fp8").info.attention_backend == "reference"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_backend": "triton"}, "is triton, which does not compute on the device cpu"),
        (
            {"attention_backend": "xformers"},
            "is xformers, which does not compute on the device cpu",
        ),
        (
            {"attention_backend": "cpu", "kv_cache_dtype": "fp8"},
            "is cpu, which keeps no K/V in fp8",
        ),
    ],
)
def test_a_backend_that_does_not_fit_is_refused(tiny_spm, settings, message):
    with pytest.raises(ConfigError, match=message):
        create(tiny_spm, **settings)


@pytest.mark.parametrize(
    ("settings", "reasons"),
    [
        ({}, "K/V are float32, not float16 or bfloat16"),
        ({"kv_cache_dtype": "fp8"}, "K/V are float8_e4m3fn, not float16 or bfloat16"),
        ({"dtype": "bfloat16", "block_size": 16}, "block_size is 16, not a multiple of 64"),
    ],
)
def test_xformers_refuses_a_model_before_its_weights_are_read(
    settings, reasons, tiny_spm, monkeypatch
):
    FakeXformers().install(monkeypatch)
    monkeypatch.setattr(worker, "load_model", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    config = EngineConfig(attention_backend="xformers", **{"dtype": "float32", **settings})
    with pytest.raises(ConfigError, match=f"xformers, which cannot do this: {reasons}$"):
        worker.load_parts(config, source_of(tiny_spm), torch.device("cuda"))


def test_block_keys_start_from_everything_that_the_kv_depends_on(tiny_spm):
    same = create(tiny_spm).info.cache_namespace
    assert create(tiny_spm, max_num_seqs=2).info.cache_namespace == same
    others = [{"block_size": 8}, {"dtype": "bfloat16"}, {"load_format": "dummy"}]
    others += [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}]
    others += [{"quantization": "int8"}] if can_round("int8") else [{"block_size": 4}]
    others.append({"load_format": "dummy", "seed": 1})
    keys = [create(tiny_spm, **settings).info.cache_namespace for settings in others]
    assert len({same, *keys}) == 8


@pytest.mark.parametrize(
    ("settings", "to_lower"),
    [
        ({"num_gpu_blocks_override": 10**12}, "lower num_gpu_blocks_override"),
        ({"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 10**18}, "lower kv_cache_mem"),
        ({"block_size": 10**9}, "lower num_gpu_blocks_override"),
        ({"max_num_seqs": 10**12}, "lower max_num_seqs or max_model_len"),
    ],
)
def test_what_does_not_fit_in_main_memory_is_refused_with_the_setting(tiny_spm, settings, to_lower):
    with pytest.raises(ConfigError, match=f"does not fit .*: {to_lower}"):
        create(tiny_spm, **settings)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(tiny_spm, monkeypatch):
    monkeypatch.setattr(worker, "find_free_memory", lambda: 2**18)
    with pytest.raises(ConfigError, match=r"weights take 0\.00 GiB, and 0\.00 GiB .* are free"):
        create(tiny_spm)


@pytest.mark.parametrize(("cores", "threads"), [(None, 4), (3, 3), (9, 4)])
def test_no_more_threads_compute_than_control_groups_allow(tiny_spm, monkeypatch, cores, threads):
    count = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: count[-1])
    monkeypatch.setattr(torch, "set_num_threads", count.append)
    monkeypatch.setattr(worker, "find_core_limit", lambda: cores)
    create(tiny_spm)
    assert count[-1] == threads
    assert 1 <= min(count) <= max(count) <= 4


def choose(config, max_num_seqs):
    shapes = choose_graph_shapes(config, max_num_seqs, layer_bytes=10**9)
    return [(shape.num_rows, shape.num_tokens) for shape in shapes]


def test_graph_sizes_that_no_step_reaches_are_dropped_by_name(caplog):
    config = EngineConfig(cuda_graph_sizes=[32, 8, 64, 8, 16])
    assert choose(config, 16) == [(8, 8), (16, 16)]
    assert caplog.messages == [
        "cuda_graph_sizes [32, 64] are above max_num_seqs 16: no step needs them"
    ]


def test_default_graph_sizes_are_chosen_in_silence(caplog):
    decode = [(1, 1), (2, 2), (4, 4)]
    mixed = [(4, num_tokens) for num_tokens in (64, 128, 192, 256)]
    assert choose(EngineConfig(max_num_batched_tokens=1000), 4) == decode + mixed
    assert choose(EngineConfig(max_num_batched_tokens=100), 4) == decode + mixed[:2]
    assert choose(EngineConfig(enforce_eager=True), 4) == []
    assert not caplog.messages


@pytest.mark.parametrize(
    ("settings", "to_lower"),
    [
        ({"num_gpu_blocks_override": 9}, "lower num_gpu_blocks_override"),
        ({"kv_cache_memory_bytes": 9}, "lower kv_cache_memory_bytes"),
        ({}, "lower gpu_memory_utilization"),
    ],
)
def test_a_pool_that_does_not_fit_is_refused_with_the_setting_that_made_it(settings, to_lower):
    message = str(refuse_pool(EngineConfig(**settings), 2**20, 2**20, place="here"))
    assert "1048576 blocks of 1048576 bytes (1024.00 GiB)" in message
    assert message.endswith(to_lower)
