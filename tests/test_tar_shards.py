"""Tar shards as a map-style data set: every sample, whatever the index on disk holds."""

import io
import os
import pickle
import tarfile
from pathlib import Path

import pytest

from lockstep import TarShards


def write(path: Path, samples: dict[str, dict[str, bytes]], folder: str = "") -> Path:
    with tarfile.open(path, "w") as shard:
        for key, fields in samples.items():
            for field, content in fields.items():
                member = tarfile.TarInfo(f"{folder}{key}.{field}")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))
    return path


def numbered(first: int, count: int) -> dict[str, dict[str, bytes]]:
    return {f"{n:04d}": {"txt": b"x" * n, "CLS": str(n).encode()} for n in range(first, first + count)}


def test_samples_of_all_shards_are_found_by_number(tmp_path: Path) -> None:
    shards = [write(tmp_path / "a.tar", numbered(0, 5)), write(tmp_path / "b.tar", {}), tmp_path / "c.tar"]
    write(shards[2], numbered(600, 3), folder="./long" * 60 + "/")  # names too long for a plain header
    for _ in range(2):  # without an index, and with one
        found = TarShards(shards)
        assert len(found) == 8
        assert [int(found[n]["cls"]) for n in range(8)] == [0, 1, 2, 3, 4, 600, 601, 602]
        assert found[6]["txt"] == b"x" * 601 and found[6]["__key__"].endswith("/0601")
        with pytest.raises(IndexError):
            found[8]
    assert (tmp_path / ".a.tar.index").exists()


def test_fields_are_decoded_and_other_processes_map_the_index_by_themselves(tmp_path: Path) -> None:
    found = TarShards([write(tmp_path / "a.tar", numbered(0, 50))], decode=Path)
    assert len(pickle.dumps(found)) < 2000
    found = TarShards([tmp_path / "a.tar"], lambda fields: int(fields["cls"]), tmp_path / "indices")
    assert found[7] == 7 and len(list((tmp_path / "indices").iterdir())) == 1


def test_an_index_of_another_version_of_a_shard_or_a_damaged_one_is_made_anew(tmp_path: Path) -> None:
    shard, index = write(tmp_path / "a.tar", numbered(0, 5)), tmp_path / ".a.tar.index"
    assert len(TarShards([shard])) == 5
    write(shard, numbered(10, 7))
    os.utime(shard, ns=(1, 1))
    assert int(TarShards([shard])[6]["cls"]) == 16
    index.write_bytes(index.read_bytes()[:100])
    assert int(TarShards([shard])[6]["cls"]) == 16


def test_what_cannot_be_indexed_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no shards"):
        TarShards([])
    with pytest.raises(ValueError, match=r"none.tar cannot be read \(No such file"):
        TarShards([tmp_path / "none.tar"])
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as shard:
        shard.add(__file__)
    with pytest.raises(ValueError, match="a compressed one must be unpacked first"):
        TarShards([tmp_path / "a.tar.gz"])
    with tarfile.open(tmp_path / "mixed.tar", "w") as shard:
        for name in ("1.txt", "2.txt", "1.cls"):
            shard.addfile(tarfile.TarInfo(name))
    with pytest.raises(ValueError, match="the files of sample 1 in two places"):
        TarShards([tmp_path / "mixed.tar"])


def test_a_shard_that_is_damaged_or_cut_off_is_refused_rather_than_shortened(tmp_path: Path) -> None:
    """tarfile itself ends silently at a header that is wrong, and at the end of a file."""
    whole = write(tmp_path / "whole.tar", numbered(0, 10)).read_bytes()
    header = whole.index(b"0004.txt")
    (tmp_path / "flipped.tar").write_bytes(whole[: header + 100] + b"\xff" + whole[header + 101 :])
    (tmp_path / "cut.tar").write_bytes(whole[:header])
    (tmp_path / "two.tar").write_bytes(whole + whole)
    for name in ("flipped", "cut", "two"):
        with pytest.raises(ValueError, match=rf"{name}\.tar does not end after sample 000\d .* damaged or cut off"):
            TarShards([tmp_path / f"{name}.tar"])
    with tarfile.open(tmp_path / "folder_last.tar", "w") as shard:
        for name, kind in (("0.txt", tarfile.REGTYPE), ("folder", tarfile.DIRTYPE)):
            member = tarfile.TarInfo(name)
            member.type = kind
            shard.addfile(member)
    assert len(TarShards([tmp_path / "folder_last.tar"])) == 1
