"""What the settings mean for a model on a device.

What does not go together is refused before a weight is read.
"""

from dataclasses import replace

import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.models.config import ModelConfig
from octavo.models.config_files import load_config
from octavo.models.quantization import quantize_online
from octavo.models.rounding import IntegerName, can_round, is_stored_in_int4
from octavo.models.source import ModelSource

MIN_FP8_CAPABILITY = (8, 9)
GPU_BACKENDS = ("triton", "xformers")


def resolve_device(config: EngineConfig) -> torch.device:
    """Return the device to compute on.

    Raises:
        ConfigError: a GPU is asked for, and there is none, or something that only a GPU does.
    """
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError("device is cuda, but torch finds no CUDA device: use cpu or auto")
    if config.device == "cpu" or not has_gpu:
        if config.cuda_graph_sizes is not None:
            raise ConfigError("cuda_graph_sizes is set, but the device is a CPU: leave it out")
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def find_model_config(
    config: EngineConfig, source: ModelSource, device: torch.device
) -> ModelConfig:
    """Read what the network is, and how its matrices are kept.

    Raises:
        ConfigError: matrices or K/V are to be kept in fp8, which the GPU lacks.
    """
    model_config = load_config(source)
    if config.quantization == "fp8":
        quantization = quantize_online(model_config.quantization)
        model_config = replace(model_config, quantization=quantization)
    has_fp8 = model_config.quantization is not None or config.kv_cache_dtype == "fp8"
    if has_fp8 and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_FP8_CAPABILITY:
            raise ConfigError(
                "matrices or K/V are to be kept in fp8, which needs a GPU of compute capability"
                f" 8.9; this one has {capability[0]}.{capability[1]}: choose another checkpoint,"
                " or leave quantization and kv_cache_dtype out"
            )
    return model_config


def find_integers(
    config: EngineConfig, source: ModelSource, device: torch.device
) -> IntegerName | None:
    """Return what matrices are rounded to: a checkpoint's own four bits need no setting.

    Raises:
        ConfigError: integers do not go with the device or the type.
    """
    name = config.quantization
    if name is None and device.type == "cpu" and config.dtype == "auto":
        return "int4" if can_round("int4") and is_stored_in_int4(source) else None
    if name != "int4" and name != "int8":
        return None
    if device.type != "cpu":
        raise ConfigError(f"quantization is {name}, which computes on a CPU: use fp8 on a GPU")
    if config.dtype not in ("auto", "float32"):
        raise ConfigError(
            f"quantization is {name}, which computes in float32 between matrices, and dtype is"
            f" {config.dtype}: leave dtype out"
        )
    return name


def resolve_backend(config: EngineConfig, device: torch.device) -> str:
    """Return the attention backend's name.

    Raises:
        ConfigError: it does not compute on the device, or not with such K/V.
    """
    name, is_fp8 = config.attention_backend, config.kv_cache_dtype == "fp8"
    if name == "auto":
        on_cpu = "reference" if is_fp8 else "cpu"
        return "triton" if device.type == "cuda" else on_cpu
    if (name in GPU_BACKENDS) != (device.type == "cuda"):
        raise ConfigError(
            f"attention_backend is {name}, which does not compute on the device {device.type}:"
            " use auto"
        )
    if name == "cpu" and is_fp8:
        raise ConfigError("attention_backend is cpu, which keeps no K/V in fp8: use reference")
    return name


def resolve_max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    """Return the most tokens of a request: by default all of the model's positions.

    Raises:
        ConfigError: the model has fewer positions.
    """
    limit = model_config.max_position_embeddings
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the model has {limit} positions: "
            "lower max_model_len"
        )
    return config.max_model_len
