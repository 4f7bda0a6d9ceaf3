"""Files of commands are whole or not there, and what is wrong with them is told with the flag that named them."""

import os
from pathlib import Path

import pytest

from tripool.cli.files import check_files, check_writable, make_folder, write_whole
from tripool.core.errors import ConfigError


def test_a_file_that_is_there_stays_until_the_new_one_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "figures.json"
    write_whole(path, "old", "--json")
    write = Path.write_bytes

    def half(self: Path, data: bytes) -> int:
        write(self, data[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(ConfigError, match=r"--json is .*figures.json, which cannot be written: No space left"):
        write_whole(path, "new one", "--json")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    write_whole(path, b"new one", "--json")
    assert path.read_text() == "new one"


def test_no_two_flags_name_one_file(tmp_path):
    check_files({"--json": tmp_path / "a", "--html": tmp_path / "b", "--png": None})
    check_files({"--json": Path("/dev/null"), "--html": Path("/dev/null")})
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"--json and --html are both .*a; give each a file of its own"):
        check_files({"--json": tmp_path / "a", "--html": tmp_path / "folder" / ".." / "a"})


def test_what_is_no_file_just_gets_it(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "words", "--json")
    assert os.read(reader, 100) == b"words" and pipe.is_fifo()
    os.close(reader)


def test_folders_are_made_and_files_are_no_folders(tmp_path):
    make_folder(tmp_path / "a" / "b", "--out")
    make_folder(tmp_path / "a" / "b", "--out")
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "c"):
        with pytest.raises(ConfigError, match=r"--out is .*, which cannot be written"):
            make_folder(path, "--out")


@pytest.mark.parametrize(("path", "words"), [(".", "is a folder; give a file"), ("none/f", "there is no folder none")])
def test_what_cannot_be_a_file_is_said_before_any_work(tmp_path, monkeypatch, path, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"--json is {path}, .*{words}"):
        check_writable(Path(path), "--json")
