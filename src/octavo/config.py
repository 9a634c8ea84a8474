"""Every setting of the engine, with its default and meaning; nothing else reads the environment.

``docs/configuration.md`` is made from this file. Settings that need the device or the model to be
known are None here and resolved once, in ``entrypoints/launch.py``.
"""

import math
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from octavo.errors import ConfigError
from octavo.shown_settings import IS_PUBLIC

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "fp8"]
AttentionBackendName = Literal["auto", "triton", "xformers", "cpu", "reference"]
QuantizationName = Literal["fp8", "int4", "int8"]
SchedulingPolicyName = Literal["fcfs", "priority", "lpm", "dfs"]

NUM_SPINS = 2_000
"""How often an idle OpenMP thread looks for work before it sleeps: less than 0.1 ms."""

DEVICE_DEFAULTS = {
    "cuda": {"max_num_seqs": 1024, "max_num_batched_tokens": 16_384},
    "cpu": {"max_num_seqs": 64, "max_num_batched_tokens": 1_024},
}


def _setting(
    default: Any, help_text: str, *, choices: tuple[str, ...] = (), is_public: bool = False
) -> Any:
    """Declare a field; a text is shown to others only if it ``is_public`` (see shown_settings)."""
    metadata = {"help": help_text, "choices": choices, IS_PUBLIC: is_public}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Settings of one engine.

    Raises:
        ConfigError: a value is outside its range; the message names the setting, the value and
            what is allowed.
    """

    model: str | None = _setting(
        None,
        "Folder, .gguf file or Hub id; None is the default model, SmolLM2-135M-Instruct.",
        is_public=True,
    )
    tokenizer: str | None = _setting(
        None, "Folder or Hub id of the tokenizer; None is the model's own.", is_public=True
    )
    revision: str | None = _setting(
        None, "Branch, tag or commit of the model on the Hub.", is_public=True
    )
    tokenizer_revision: str | None = _setting(
        None, "Branch, tag or commit of the tokenizer on the Hub.", is_public=True
    )
    hf_token: str | None = _setting(
        None, "Hub access token; None uses HF_TOKEN or the stored login."
    )
    load_format: LoadFormat = _setting(
        "auto",
        "How weights are read; dummy makes random ones from the config alone.",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    dtype: DType = _setting(
        "auto",
        "Data type of weights; auto is float32 on a CPU, else the model's 16-bit type.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: QuantizationName | None = _setting(
        None,
        "How matrices are kept: fp8 rounds to 8-bit floats, int8 and int4 to integers, on a CPU; "
        "None: as stored.",
        choices=("fp8", "int4", "int8"),
    )
    device: str = _setting(
        "auto", "cuda or cpu; auto takes a GPU if there is one.", choices=("auto", "cuda", "cpu")
    )
    seed: int = _setting(0, "Seed of requests without one, and of dummy weights.")
    skip_tokenizer_init: bool = _setting(
        False, "Load no tokenizer: prompts and outputs are token ids."
    )
    chat_template: str | None = _setting(
        None, "File or text of a chat template that replaces the model's.", is_public=True
    )
    generation_config: str = _setting(
        "auto",
        "Sampling defaults: auto takes the model's generation_config.json, octavo (or vllm) none.",
        is_public=True,
    )
    override_generation_config: dict[str, Any] | None = _setting(
        None, 'Sampling defaults that replace those, as a JSON object like {"temperature": 0.5}.'
    )

    max_model_len: int | None = _setting(
        None, "Longest request, prompt and output; None is the model's limit."
    )
    block_size: int | None = _setting(
        None,
        "Tokens in one KV block; None: 64 for xformers, a multiple of which it needs, else 16.",
    )
    num_gpu_blocks_override: int | None = _setting(
        None, "KV blocks in the pool; None measures free memory."
    )
    gpu_memory_utilization: float = _setting(
        0.92, "Share of the card's memory that this engine may use."
    )
    kv_cache_memory_bytes: int | None = _setting(None, "Bytes of the KV pool; None derives them.")
    kv_cache_dtype: KVCacheDType = _setting(
        "auto",
        "Data type of K/V; auto is dtype, fp8 keeps 8-bit floats and computes with dtype.",
        choices=("auto", "fp8"),
    )
    enable_prefix_caching: bool = _setting(
        True, "Reuse the K/V of equal prompt prefixes across requests."
    )

    max_num_seqs: int | None = _setting(
        None, "Most requests running at once; None: 1024 on a GPU, 64 on a CPU."
    )
    max_num_batched_tokens: int | None = _setting(
        None, "Token budget of one step; None: 16384 on a GPU (8192 when serving), 1024 on a CPU."
    )
    long_prefill_token_threshold: int | None = _setting(
        None,
        "Longest chunk of one prompt in a step in which other requests decode; None is no cap.",
    )
    scheduling_policy: SchedulingPolicyName = _setting(
        "fcfs",
        "Order of admission: by arrival, by priority, by longest cached prefix (lpm), depth first "
        "over shared prefixes (dfs).",
        choices=("fcfs", "priority", "lpm", "dfs"),
    )
    schedule_conservativeness: float = _setting(
        1.0, "Scales the growth that admission reserves for running requests; 0 reserves nothing."
    )
    min_deferral_tokens: int = _setting(
        256,
        "Wait for a running prefill if that shares at least this many more tokens than the cache.",
    )
    attention_backend: AttentionBackendName = _setting(
        "auto",
        "How K/V is kept and read; auto is triton on a GPU and cpu on a CPU, where reference is "
        "the plain one, and the one for K/V in fp8. xformers, an extra, decodes with another "
        "kernel on a GPU, to compare with.",
        choices=("auto", "triton", "xformers", "cpu", "reference"),
    )
    enforce_eager: bool = _setting(
        False, "Launch the kernels of all steps without CUDA graphs; on a CPU, compile nothing."
    )
    cuda_graph_sizes: list[int] | None = _setting(
        None,
        "Batch sizes of decode steps that get a CUDA graph, from 1 to max_num_seqs; no other steps "
        "do. None chooses sizes, and shapes of steps with short prompts.",
    )
    async_scheduling: bool | None = _setting(
        None, "Plan and launch a step before the last one's tokens are read; None: on with a GPU."
    )
    journal: str | None = _setting(None, "File that keeps the scheduler's journal.", is_public=True)

    tensor_parallel_size: int = _setting(1, "Devices that share one model; only 1 runs today.")

    def __post_init__(self) -> None:
        self._require_64_bits()
        for name in ("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            self._require_at_least(name, 1)
        for name in (
            "num_gpu_blocks_override",
            "kv_cache_memory_bytes",
            "long_prefill_token_threshold",
        ):
            self._require_at_least(name, 1)
        if self.cuda_graph_sizes is not None and min(self.cuda_graph_sizes, default=0) < 1:
            raise ConfigError(
                f"cuda_graph_sizes is {self.cuda_graph_sizes}; it must list sizes of at least 1: "
                "for no graphs set enforce_eager"
            )
        self._require_at_least("schedule_conservativeness", 0)
        self._require_at_least("min_deferral_tokens", 0)
        for item in fields(self):
            allowed = item.metadata["choices"]
            if allowed and getattr(self, item.name) not in (*allowed, item.default):
                raise ConfigError(
                    f"{item.name} is {getattr(self, item.name)!r}; "
                    f"it must be one of {', '.join(allowed)}"
                )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be in (0, 1]"
            )
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size is {self.tensor_parallel_size}; "
                "only 1 is supported in this version"
            )

    def _require_at_least(self, name: str, low: float) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if not math.isfinite(value):
            raise ConfigError(f"{name} is {value}; it must be a finite number")
        if value < low:
            raise ConfigError(f"{name} is {value}; it must be at least {low:g}")

    def _require_64_bits(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise ConfigError(f"{item.name} must be an integer of 64 bits")


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """What the scheduler needs to know; resolved from EngineConfig and ExecutorInfo at start."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: SchedulingPolicyName = "fcfs"
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int | None = None
    conservativeness: float = 1.0
    min_deferral_tokens: int = 256
    ranking_window: int | None = 128
    """Waiting requests, first by arrival, that ``lpm`` ranks; None ranks all of them."""

    @property
    def max_tokens_per_request(self) -> int:
        """The longest any request may become, prompt and output together."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment variables that Octavo reads."""

    default_model: Path | None
    """OCTAVO_DEFAULT_MODEL: a .gguf file or folder to use instead of fetching the default model."""
    cache_dir: Path
    """OCTAVO_CACHE_DIR, else XDG_CACHE_HOME/octavo, else ~/.cache/octavo."""
    api_keys: str | None = field(default=None, repr=False)
    """OCTAVO_API_KEY: the keys of a server, with commas between them, or the one of a client."""
    vllm_api_key: str | None = field(default=None, repr=False)
    """VLLM_API_KEY: what OCTAVO_API_KEY is to vLLM, for one key; read if that is not set."""

    @classmethod
    def read(cls) -> "Environment":
        """Read the process's environment.

        Raises:
            ConfigError: it says nowhere where the cache is.
        """
        default_model = os.environ.get("OCTAVO_DEFAULT_MODEL")
        return cls(
            default_model=Path(default_model) if default_model else None,
            cache_dir=_find_cache_dir(),
            api_keys=os.environ.get("OCTAVO_API_KEY"),
            vllm_api_key=os.environ.get("VLLM_API_KEY"),
        )


def _find_cache_dir() -> Path:
    if folder := os.environ.get("OCTAVO_CACHE_DIR"):
        return Path(folder)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "octavo"
    try:
        return Path.home() / ".cache" / "octavo"
    except RuntimeError as error:  # a user whom the system does not know, in a container
        raise ConfigError("there is no home folder: set HOME or OCTAVO_CACHE_DIR") from error


def import_only_what_is_installed() -> None:
    """Let processes that start from now on import nothing that merely lies in the working folder.

    Python looks there first, so a file with the name of a module would be run in its place.
    """
    os.environ["PYTHONSAFEPATH"] = "1"


def let_idle_threads_sleep() -> None:
    """Tell OpenMP that threads without work sleep after a moment, unless the user has decided.

    Takes effect in processes that import torch afterwards. Where two processes share two cores,
    spinning makes a product of 0.3 ms take 8 ms; not to spin at all costs a sixth of a step.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if os.environ["OMP_WAIT_POLICY"].upper() == "PASSIVE":
        os.environ.setdefault("GOMP_SPINCOUNT", str(NUM_SPINS))
