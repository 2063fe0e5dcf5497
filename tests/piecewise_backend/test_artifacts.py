import json
import multiprocessing
from pathlib import Path

import pytest

from piecewise_backend.artifacts import FORMAT, ArtifactFolder, ArtifactUnreadable


def store(folder: Path, content: bytes = b"code", key: str = "k", guards: str = "") -> ArtifactFolder:
    artifacts = ArtifactFolder(folder)
    artifacts.store(key, guards, lambda path: Path(path).write_bytes(content))
    return artifacts


def test_what_was_stored_is_found_with_its_guards(tmp_path):
    artifacts = store(tmp_path / "new", guards="2 <= L['t0']")
    entry, path = artifacts.find("k")
    assert path.read_bytes() == b"code"
    assert entry.guards == "2 <= L['t0']"
    assert artifacts.find("other") is None


def test_storing_again_replaces(tmp_path):
    store(tmp_path)
    _, path = store(tmp_path, b"better").find("k")
    assert path.read_bytes() == b"better"


def damage_truncate(json_file, artifact):
    artifact.write_bytes(artifact.read_bytes()[:-1])


def damage_flip(json_file, artifact):
    artifact.write_bytes(bytes([artifact.read_bytes()[0] ^ 1]) + artifact.read_bytes()[1:])


def damage_missing(json_file, artifact):
    artifact.unlink()


def damage_garbage(json_file, artifact):
    json_file.write_text("{not json")


def damage_bytes(json_file, artifact):
    json_file.write_bytes(b"\xff\xfe\x00")


def damage_list(json_file, artifact):
    json_file.write_text("[1, 2]")


def damage_null(json_file, artifact):
    json_file.write_text(json.dumps({"key": "k", "digest": None, "guards": None, "format": FORMAT}))


def damage_foreign(json_file, artifact):
    json_file.write_text(json.dumps({"key": "k", "url": "elsewhere"}))


def damage_format(json_file, artifact):
    json_file.write_text(json.dumps(json.loads(json_file.read_text()) | {"format": FORMAT + 1}))


def damage_other_key(json_file, artifact):
    json_file.write_text(json.dumps(json.loads(json_file.read_text()) | {"key": "other"}))


def damage_path(json_file, artifact):
    json_file.write_text(json.dumps(json.loads(json_file.read_text()) | {"digest": "../../../etc/passwd"}))


def damage_folder(json_file, artifact):
    json_file.unlink()
    json_file.mkdir()


@pytest.mark.parametrize("damage", [f for name, f in list(globals().items()) if name.startswith("damage_")])
def test_a_damaged_or_foreign_entry_is_never_believed(tmp_path, damage):
    artifacts = store(tmp_path)
    (artifact,) = tmp_path.glob("*.artifact")
    damage(tmp_path / "k.json", artifact)
    with pytest.raises(ArtifactUnreadable):
        artifacts.find("k")


def test_a_folder_that_is_a_file_is_unreadable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactUnreadable):
        ArtifactFolder(tmp_path / "file").find("k")


def test_a_save_that_fails_leaves_nothing_behind(tmp_path):
    def save(path):
        Path(path).write_bytes(b"half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        ArtifactFolder(tmp_path).store("k", "", save)
    assert list(tmp_path.iterdir()) == []


def _store_many(folder: Path, content: bytes) -> None:
    for _ in range(50):
        store(folder, content)


def test_processes_that_store_at_once_never_mix_their_halves(tmp_path):
    store(tmp_path, b"0" * 1000)
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_store_many, args=(tmp_path, bytes([i]) * 1000)) for i in (49, 50)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        _, path = ArtifactFolder(tmp_path).find("k")
        assert len(set(path.read_bytes())) == 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert not list(tmp_path.glob(".writing-*"))
