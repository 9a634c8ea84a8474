"""Which keys a server takes, and what is said of places that have none."""

from pathlib import Path

import pytest

from octavo.config import Environment
from octavo.entrypoints.api_keys import read_api_keys
from octavo.entrypoints.server_settings import ServerSettings
from octavo.errors import ConfigError
from octavo.shown_settings import show_settings

SECRET = "sk-secret"


def read(environment=None, **settings):
    variables = {"default_model": None, "cache_dir": Path(), **(environment or {})}
    return read_api_keys(ServerSettings(**settings), Environment(**variables))


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "keys"
        path.write_bytes(content)
        return str(path)

    return write


def test_without_keys_there_are_none():
    assert read() is None


def test_keys_come_from_options_and_a_file(write):
    keys = read(api_key=["a", "b"], api_key_file=write(b"c\r\n\n  d  \na\n"))
    assert len(keys) == 4
    assert all(keys.accept(key) for key in (b"a", b"b", b"c", b"d"))
    assert not any(keys.accept(key) for key in (b"", b"e", b"A", b"a ", b"ab", b"\xff"))


def test_keys_of_the_environment_have_commas_between_them():
    keys = read({"api_keys": "a, b", "vllm_api_key": "c"})
    assert [keys.accept(key) for key in (b"a", b"b", b"c")] == [True, True, False]


def test_vllms_variable_has_one_key():
    keys = read({"vllm_api_key": "c"})
    assert (len(keys), keys.accept(b"c")) == (1, True)
    with pytest.raises(ConfigError, match="VLLM_API_KEY has a key with"):
        read({"vllm_api_key": "a,b"})


def test_options_go_before_the_environment():
    keys = read({"api_keys": "a"}, api_key=["b"])
    assert [keys.accept(key) for key in (b"a", b"b")] == [False, True]


def test_variables_are_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "a")
    monkeypatch.setenv("VLLM_API_KEY", "b")
    environment = Environment.read()
    assert (environment.api_keys, environment.vllm_api_key) == ("a", "b")


@pytest.mark.parametrize(
    "key", ["", " ", f"{SECRET} x", f"{SECRET},x", f"{SECRET}\nx", "sk-sécret"]
)
@pytest.mark.parametrize("place", ["api_key", "api_key_file", "OCTAVO_API_KEY", "VLLM_API_KEY"])
def test_key_that_no_client_could_send_is_refused_and_not_shown(place, key, write):
    if (place, key) in [("api_key_file", f"{SECRET}\nx"), ("OCTAVO_API_KEY", f"{SECRET},x")]:
        return  # two good keys
    given = {
        "api_key": lambda: read(api_key=["good", key]),
        "api_key_file": lambda: read(api_key_file=write(key.encode())),
        "OCTAVO_API_KEY": lambda: read({"api_keys": key}),
        "VLLM_API_KEY": lambda: read({"vllm_api_key": key}),
    }
    with pytest.raises(ConfigError) as refused:
        given[place]()
    assert place in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "has no key"), (b"\n \n", "has no key"), (b"\xff\xfe", "not a text file")],
)
def test_file_without_keys_is_refused(write, content, reason):
    with pytest.raises(ConfigError, match=reason):
        read(api_key_file=write(content))


def test_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match="missing, which cannot be read: No such file"):
        read(api_key_file=str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read(api_key_file=str(tmp_path))


def test_administration_needs_a_key():
    with pytest.raises(ConfigError, match="enable_admin_endpoints is on, but there is no API key"):
        read(enable_admin_endpoints=True)
    assert read(enable_admin_endpoints=True, api_key=["a"]) is not None


def test_nothing_that_is_printed_shows_a_key():
    settings = ServerSettings(api_key=[SECRET])
    environment = Environment(None, Path(), api_keys=SECRET, vllm_api_key=SECRET)
    keys = read_api_keys(settings, environment)
    shown = f"{settings} {environment} {keys} {show_settings(settings)}"
    assert SECRET not in shown


def test_keys_are_compared_in_constant_time(monkeypatch):
    """Every key is compared, as bytes of one length, by the function that is made for it."""
    compared = []

    def compare_digest(known, given):
        compared.append((len(known), len(given)))
        return known == given

    monkeypatch.setattr("octavo.entrypoints.api_keys.hmac.compare_digest", compare_digest)
    keys = read(api_key=["a", "bb", "ccc"])
    assert keys.accept(b"a")
    assert not keys.accept(b"a much longer one")
    assert compared == [(32, 32)] * 6
