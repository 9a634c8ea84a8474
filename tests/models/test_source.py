"""What the user names becomes files on this machine, or one sentence that says why not."""

import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects

from octavo.config import EngineConfig, Environment
from octavo.errors import ConfigError
from octavo.models.source import resolve_source, resolve_tokenizer

HUB_FILES = [
    "README.md",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "consolidated.safetensors",
    "pytorch_model.bin",
    "original/consolidated.00.pth",
    "original/model.safetensors",
    "onnx/model.onnx",
    "small-Q4_K_M.gguf",
    "small-Q8_0.gguf",
]


class FakeHub:
    """A Hub with one repository; keeps what it was asked."""

    def __init__(self, cache, *, error=None):
        self.cache = cache
        self.error = error
        self.calls = []

    def __call__(self, repository, **options):
        self.calls.append((repository, options))
        if self.error is not None:
            raise self.error
        patterns = {name: options[name] for name in ("allow_patterns", "ignore_patterns")}
        for name in filter_repo_objects(HUB_FILES, **patterns):
            (self.cache / name).touch()
        return str(self.cache)

    @property
    def downloaded(self):
        return {path.name for path in self.cache.iterdir()}


@pytest.fixture
def hub(tmp_path):
    (tmp_path / "hub").mkdir()
    return FakeHub(tmp_path / "hub")


@pytest.fixture
def environment(tmp_path):
    return Environment(default_model=None, cache_dir=tmp_path / "cache")


def resolve(hub, environment, **settings):
    return resolve_source(EngineConfig(**settings), environment, download=hub)


def test_folder_is_taken_as_it_is(tiny_spm, hub, environment):
    source = resolve(hub, environment, model=str(tiny_spm), seed=3)
    assert (source.path, source.load_format, source.seed) == (tiny_spm, "safetensors", 3)
    assert not hub.calls


def test_gguf_file_is_taken_as_it_is(hub, environment, tmp_path):
    path = tmp_path / "small.gguf"
    path.touch()
    source = resolve(hub, environment, model=str(path))
    assert (source.path, source.load_format, source.is_gguf) == (path, "gguf", True)


def test_folder_with_nothing_but_one_gguf_file_means_that_file(hub, environment, tmp_path):
    (tmp_path / "small.gguf").touch()
    assert resolve(hub, environment, model=str(tmp_path)).path == tmp_path / "small.gguf"


def test_folder_with_several_gguf_files_asks_for_one(hub, environment, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"several .gguf files; name one of a\.gguf, b\.gguf"):
        resolve(hub, environment, model=str(tmp_path))


def test_folder_without_a_model_is_named(hub, environment, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty has neither a config\.json nor a \.gguf"):
        resolve(hub, environment, model=str(tmp_path / "empty"))


@pytest.mark.parametrize("name", ["./no", "../no", "/no/such", "~/no", "no.gguf", "a/b/c", "a b"])
def test_what_looks_like_a_path_is_not_asked_of_the_hub(name, hub, environment):
    with pytest.raises(ConfigError, match=f"there is no file or folder {name}$"):
        resolve(hub, environment, model=name)
    assert not hub.calls


def test_name_that_no_file_can_have_is_refused(hub, environment):
    for name in ("x" * 5_000, "./" + "x" * 5_000, "\0"):
        with pytest.raises(ConfigError, match="there is no file or folder") as caught:
            resolve(hub, environment, model=name)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("setting", ["model", "tokenizer"])
def test_empty_name_is_no_folder(setting, hub, environment, tiny_spm):
    config = EngineConfig(**{"model": str(tiny_spm), setting: ""})
    with pytest.raises(ConfigError, match="a model's name is empty"):
        resolve_tokenizer(config, resolve_source(config, environment, download=hub), download=hub)


def test_file_of_another_kind_is_refused(hub, environment, tmp_path):
    path = tmp_path / "model.bin"
    path.touch()
    with pytest.raises(ConfigError, match=r"neither a folder nor a \.gguf file"):
        resolve(hub, environment, model=str(path))


def test_hub_id_downloads_only_what_is_read(hub, environment):
    source = resolve(hub, environment, model="org/small")
    assert hub.downloaded == set(HUB_FILES[1:13])
    assert (source.name, source.path, source.load_format) == ("org/small", hub.cache, "safetensors")


def test_dummy_weights_download_no_weights(hub, environment):
    source = resolve(hub, environment, model="org/small", load_format="dummy")
    assert source.load_format == "dummy"
    assert hub.downloaded == set(HUB_FILES[1:10])


def test_gguf_file_of_a_repository_is_downloaded_when_named(hub, environment):
    source = resolve(hub, environment, model="org/small:Q4_K_M")
    assert source.path == hub.cache / "small-Q4_K_M.gguf"
    assert hub.downloaded == {"small-Q4_K_M.gguf"}


def test_gguf_file_that_a_repository_lacks_is_named(hub, environment):
    with pytest.raises(ConfigError, match=r"org/small:Q2_K has neither"):
        resolve(hub, environment, model="org/small:Q2_K")


def test_revision_and_token_reach_the_hub(hub, environment):
    resolve(hub, environment, model="org/small", revision="v2", hf_token="secret")
    repository, options = hub.calls[0]
    assert (repository, options["revision"], options["token"]) == ("org/small", "v2", "secret")


@pytest.mark.parametrize(("stored", "asked"), [("gguf", "safetensors"), ("safetensors", "gguf")])
def test_load_format_that_contradicts_the_files_is_refused(
    stored, asked, hub, environment, tiny_spm, tmp_path
):
    (tmp_path / "small.gguf").touch()
    model = tmp_path / "small.gguf" if stored == "gguf" else tiny_spm
    with pytest.raises(ConfigError, match=f"load_format is {asked}, .* is stored as {stored}"):
        resolve(hub, environment, model=str(model), load_format=asked)


def test_tokenizer_is_the_models_own_unless_named(hub, environment, tiny_spm):
    source = resolve(hub, environment, model=str(tiny_spm))
    assert resolve_tokenizer(EngineConfig(), source, download=hub) == tiny_spm
    assert not hub.calls


def test_tokenizer_of_another_model_comes_without_weights(hub, environment, tiny_spm):
    source = resolve(hub, environment, model=str(tiny_spm))
    config = EngineConfig(tokenizer="org/small", tokenizer_revision="v3")
    assert resolve_tokenizer(config, source, download=hub) == hub.cache
    assert hub.downloaded == set(HUB_FILES[1:10])
    assert hub.calls[0][1]["revision"] == "v3"


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("other.gguf", "other.gguf"),
    ],
)
def test_variable_replaces_the_default_model(file, name, hub, tmp_path):
    (tmp_path / file).touch()
    environment = Environment(default_model=tmp_path / file, cache_dir=tmp_path)
    source = resolve(hub, environment)
    assert (source.name, source.path) == (name, tmp_path / file)


def test_variable_that_names_nothing_is_reported(hub, tmp_path):
    environment = Environment(default_model=tmp_path / "no", cache_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"OCTAVO_DEFAULT_MODEL is .*/no, which does not exist"):
        resolve(hub, environment)


def hub_error(kind, status):
    """An answer of the Hub, made with the HTTP library of the installed client."""
    http = __import__(HfHubHTTPError.__bases__[0].__module__.split(".")[0])
    request = http.Request("GET", "https://huggingface.co/org/small")
    return kind("refused\nby the Hub", response=http.Response(status, request=request))


def offline_error():
    error = LocalEntryNotFoundError("not in the cache")
    error.__cause__ = OfflineModeIsEnabled("HF_HUB_OFFLINE")
    return error


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            hub_error(GatedRepoError, 403),
            "org/small is gated: accept its terms at https://huggingface.co/org/small and set"
            " HF_TOKEN",
        ),
        (
            hub_error(RepositoryNotFoundError, 401),
            "org/small is neither a folder here nor a model on the Hub that may be read; check the"
            " spelling, or set HF_TOKEN if it is private",
        ),
        (
            hub_error(RevisionNotFoundError, 404),
            "org/small has no revision v2 on the Hub; see https://huggingface.co/org/small",
        ),
        (
            offline_error(),
            "HF_HUB_OFFLINE is set and org/small is not in the local cache; unset it once, or name"
            " a folder",
        ),
        (
            LocalEntryNotFoundError("no connection"),
            "the Hub cannot be reached and org/small is not in the local cache; check the network,"
            " or name a folder",
        ),
        (
            hub_error(HfHubHTTPError, 500),
            "cannot download org/small from the Hub: refused by the Hub",
        ),
        (
            OSError("disk full"),
            "cannot download org/small from the Hub: disk full",
        ),
    ],
)
def test_each_failure_of_the_hub_is_one_sentence(error, sentence, hub, environment):
    hub.error = error
    with pytest.raises(ConfigError) as refusal:
        resolve(hub, environment, model="org/small", revision="v2")
    assert str(refusal.value) == sentence


def test_failure_of_the_connection_is_one_sentence(hub, environment):
    http = __import__(HfHubHTTPError.__bases__[0].__module__.split(".")[0])
    hub.error = http.ProxyError("the proxy refused")
    with pytest.raises(ConfigError, match=r"from the Hub: the proxy refused$"):
        resolve(hub, environment, model="org/small")
