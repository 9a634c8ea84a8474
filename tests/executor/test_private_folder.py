"""Which folders nobody else can write in."""

import os

import pytest

from octavo.executor.private_folder import create_private, is_private


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "parent" / "folder"
    create_private(path)
    return path


def test_a_new_folder_is_for_its_user_alone(tmp_path):
    before = os.umask(0)
    try:
        create_private(tmp_path / "folder")
    finally:
        os.umask(before)
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o500])
def test_others_may_read_a_folder(folder, mode):
    folder.chmod(mode)
    create_private(folder)
    assert is_private(folder)


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_others_may_not_write_in_it(folder, mode):
    folder.chmod(mode)
    assert not is_private(folder)
    with pytest.raises(PermissionError, match="another user can write in it"):
        create_private(folder)


def test_a_link_to_a_folder_is_not_private(folder, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert not is_private(link)
    with pytest.raises(PermissionError, match="is a link"):
        create_private(link)


def test_a_folder_of_another_user_is_not_private(folder, monkeypatch):
    user = os.geteuid()
    if user == 0:
        os.chown(folder, 1234, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert not is_private(folder)


def test_neither_nothing_nor_a_file_is_a_private_folder(tmp_path):
    assert not is_private(tmp_path / "none")
    (tmp_path / "file").touch()
    assert not is_private(tmp_path / "file")
    with pytest.raises(FileExistsError):
        create_private(tmp_path / "file")
