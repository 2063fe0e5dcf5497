"""Files of plain data: found by their key, believed only when intact."""

import os
from pathlib import Path

import pytest

from piecewise_backend import data_files
from piecewise_backend.data_files import files_of, read_data, write_data


def test_what_is_written_under_a_key_is_found_under_it_alone(tmp_path: Path) -> None:
    write_data(tmp_path / "new", "a", {"rows": [1, 2.5, "x", None]})
    write_data(tmp_path / "new", "ab", [])
    (path,) = files_of(tmp_path / "new", "a")
    assert read_data(path) == {"rows": [1, 2.5, "x", None]}
    assert files_of(tmp_path / "new", "b") == files_of(tmp_path / "none", "a") == []


def test_the_file_used_last_comes_first_and_others_of_the_key_stay(tmp_path: Path) -> None:
    for number in range(3):
        write_data(tmp_path, "a", number)
    for path in files_of(tmp_path, "a"):
        os.utime(path, (read_data(path) % 2, read_data(path) % 2))
    assert len(files_of(tmp_path, "a")) == 3
    assert read_data(files_of(tmp_path, "a")[0]) == 1


@pytest.mark.parametrize("spoil", [lambda b: b[:-1], lambda b: b.replace(b"7", b"8"), lambda b: b"", lambda b: b"[7]"])
def test_a_file_that_was_altered_or_cut_short_is_refused(spoil, tmp_path: Path) -> None:
    write_data(tmp_path, "a", [7])
    (path,) = files_of(tmp_path, "a")
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ValueError, match="altered or cut short"):
        read_data(path)


def test_files_that_were_not_used_for_longest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "_MOST_FILES", 3)
    for number in range(5):
        write_data(tmp_path, f"key{number}", number)
        (path,) = files_of(tmp_path, f"key{number}")
        os.utime(path, (number, number))
    write_data(tmp_path, "key5", 5)
    assert sorted(p.name[:4] for p in tmp_path.iterdir()) == ["key3", "key4", "key5"]
