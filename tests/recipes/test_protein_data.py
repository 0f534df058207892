"""Structure files: which are skipped, the cache, the split, predictions as files."""

import csv
import gzip
import json
import multiprocessing
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.recipes.protein import ProteinRecipe, structures
from lockstep.recipes.protein.chain import crop
from lockstep.recipes.protein.chemistry import SIDE_CHAINS
from lockstep.recipes.protein.library import Library, hash_fraction, plain_name
from lockstep.recipes.protein.peptides import peptides
from lockstep.recipes.protein.recipe import ProteinOptions
from lockstep.recipes.protein.structures import read, write
from lockstep.rng import Rng
from recipes.test_protein_reader import names, peptide, saved

pytest.importorskip("gemmi")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"HEADER    HYDROLASE\nTITLE     NOTHING HERE\nEND\n", "no atoms"),
        (b"", "no atoms"),
        (b"data_x\n_cell.length_a 10\n", "no atoms"),
        (b"ATOM      1  N   ALA A   1      xx.xxx   0.000   0.000  1.00  0.00           N\n", "cannot be read|no "),
        (b"\x1f\x8b\x08\x00broken", "cannot be read"),
    ],
)
def test_files_without_a_chain_are_skipped_and_listed(tmp_path: Path, content: bytes, why: str) -> None:
    saved(tmp_path, peptide(), "good.pdb")
    bad = "bad.cif" if content.startswith(b"data") else "bad.pdb.gz" if content.startswith(b"\x1f") else "bad.pdb"
    (tmp_path / bad).write_bytes(content)
    library = Library(tmp_path, tmp_path / "cache")
    assert len(library.chains) == 1 and list(library.skipped) == [bad]
    assert library.list_of_skipped.read_text().startswith(f"{bad}: ")
    with pytest.raises(ValueError, match=why):
        read(tmp_path / bad)


def test_a_packed_file_that_ends_too_early_is_skipped_even_at_the_end_of_a_line(tmp_path: Path) -> None:
    text = "\n".join(peptide())
    packed = gzip.compress(text[: text.index("ATOM     60")].encode())
    (tmp_path / "whole.pdb.gz").write_bytes(packed)
    (tmp_path / "cut.pdb.gz").write_bytes(packed[:-8])  # all of the text, but not the sum that closes it
    assert len(read(tmp_path / "whole.pdb.gz")) == 1
    with pytest.raises(ValueError, match="cannot be read"):
        read(tmp_path / "cut.pdb.gz")


def folder_of(tmp_path: Path, count: int = 30) -> Path:
    folder = tmp_path / "pdb"
    for i, chain in enumerate(peptides("train", count)):
        place = folder / ("deep/er" if i % 3 == 0 else ".")
        place.mkdir(parents=True, exist_ok=True)
        write([chain], [torch.zeros(len(chain), 14)], place / f"p{i:03d}.pdb")
    return folder


def recipe(folder: Path, cache: Path | None, **options: Any) -> ProteinRecipe:
    return ProteinRecipe(ProteinOptions(pdb_path=str(folder), cache_dir=str(cache) if cache else None, **options))


@pytest.mark.parametrize("where", ["same", "other", "default"])
def test_a_second_start_reads_no_structure(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path)
    cache = {"same": folder, "other": tmp_path / "cache", "default": None}[where]
    first = recipe(folder, cache)
    sets = {split: first.dataset(split) for split in ("train", "val", "test")}
    assert sum(len(x) for x in sets.values() if x) == 30
    opened: list[Path] = []
    monkeypatch.setattr(structures, "read", lambda path: opened.append(path))
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.append(path))
    second = recipe(folder, cache)
    for split, one in sets.items():
        other = second.dataset(split)  # type: ignore[arg-type]
        assert (one is None) == (other is None)
        for i in range(len(one) if one else 0):
            assert all(torch.equal(x, other[i][name]) for name, x in one[i].items())  # type: ignore[index]
    assert opened == []


def test_only_what_has_changed_is_parsed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, cache = folder_of(tmp_path, 6), tmp_path / "cache"
    Library(folder, cache)
    opened: list[str] = []
    plain = structures.read
    monkeypatch.setattr(structures, "read", lambda path: opened.append(path.name) or plain(path))
    (folder / "p001.pdb").write_text("\n".join(peptide(5)))
    (folder / "copy.pdb").write_bytes((folder / "p002.pdb").read_bytes())  # the same content needs no parsing
    (folder / "p004.pdb").unlink()
    library = Library(folder, cache)
    assert opened == ["p001.pdb"]
    assert {place.file for place in library.chains} == {
        "copy.pdb",
        "p001.pdb",
        "p002.pdb",
        "p005.pdb",
        "deep/er/p000.pdb",
        "deep/er/p003.pdb",
    }


def test_a_damaged_cache_is_made_again(tmp_path: Path) -> None:
    folder, cache = folder_of(tmp_path, 4), tmp_path / "cache"
    library = Library(folder, cache)
    expected = [{name: x.clone() for name, x in library.load(i).items()} for i in range(4)]
    for file in library.cache.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:40])
    for again in (library, Library(folder, cache)):
        for i in range(4):
            assert torch.equal(again.load(i)["backbone"], expected[i]["backbone"])
    for file in library.cache.glob("*"):
        file.unlink() if file.suffix == ".safetensors" else file.write_text('{"p001.pdb": [1, 2')
    assert torch.equal(Library(folder, cache).load(2)["residue"], expected[2]["residue"])


def start(folder: str, cache: str, queue: Any) -> None:
    library = Library(Path(folder), Path(cache))
    queue.put([(p.file, p.length) for p in library.chains])


def test_two_processes_may_start_at_once(tmp_path: Path) -> None:
    folder, cache = folder_of(tmp_path), tmp_path / "cache"
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=start, args=(str(folder), str(cache), queue)) for _ in range(2)]
    for process in processes:
        process.start()
    answers = [queue.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert answers[0] == answers[1] and len(answers[0]) == 30
    left = sorted(p.name for p in (cache / "chains-v2").iterdir() if not p.name.endswith(".safetensors"))
    assert [name.split("-")[0] for name in left] == ["index", "skipped"]  # nothing half-written stays


def test_the_split_follows_from_the_names_alone(tmp_path: Path) -> None:
    assert plain_name("a/b/1ABC.cif.gz") == "1ABC" and hash_fraction("x/1abc.pdb") == hash_fraction("y/1ABC.ent.gz")
    shares = torch.tensor([hash_fraction(f"{i}.pdb") for i in range(4000)])
    assert abs(float((shares < 0.1).double().mean()) - 0.1) < 0.02 and shares.min() >= 0 and shares.max() < 1
    folder = folder_of(tmp_path)
    before = {s: _files(recipe(folder, None).dataset(s)) for s in ("train", "val", "test")}
    assert not before["train"] & (before["val"] | before["test"]) and len(before["train"]) > 15
    for file in sorted(before["train"])[:5]:
        (folder / file).unlink()
    after = {s: _files(recipe(folder, None).dataset(s)) for s in ("train", "val", "test")}
    assert after["val"] == before["val"] and after["test"] == before["test"] and after["train"] < before["train"]


def _files(dataset: Any) -> set[str]:
    return {
        dataset_.library.chains[i].file
        for dataset_ in [getattr(dataset, "chains", dataset)]
        if dataset_
        for i in dataset_.numbers
    }


def test_mistakes_are_named_with_their_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lockstep data protein"):
        recipe(tmp_path / "none", None).dataset("train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no structure.*\.cif\.gz"):
        recipe(tmp_path / "empty", None).dataset("train")
    (tmp_path / "empty/x.pdb").write_text("HEADER\n")
    with pytest.raises(ValueError, match=r"no file in .* holds a protein chain:\n  x.pdb: holds no atoms"):
        recipe(tmp_path / "empty", None).dataset("train")
    folder = folder_of(tmp_path, 1)
    with pytest.raises(ValueError, match="lower --val_share"):
        recipe(folder, None, val_share=0.5, test_share=0.4999999).dataset("train")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="give another --cache_dir"):
        recipe(folder, tmp_path / "file").dataset("train")


def test_long_chains_are_cropped_by_key_in_training_and_to_the_middle_in_evaluations(tmp_path: Path) -> None:
    mine = ProteinRecipe(ProteinOptions(max_length=10))
    train, val = mine.dataset("train"), mine.dataset("val")
    assert train is not None and val is not None
    item = train[0]
    starts = set()
    for epoch in range(12):
        key = torch.tensor([0])
        cut = mine.augment(item, Rng.of(0, key + epoch, key))
        again = mine.augment(item, Rng.of(0, key + epoch, key))
        assert torch.equal(cut["backbone"], again["backbone"]) and len(cut["residue"]) == 10
        assert not cut["linked"][0] and cut["linked"][1:].all()
        starts.add(next(s for s in range(len(item["chi"])) if torch.equal(item["backbone"][s], cut["backbone"][0])))
    assert len(starts) > 3
    whole = peptides("val", 1)[0]
    middle = (len(whole) - 10) // 2
    assert torch.equal(val[0]["residue"], whole.residue[middle : middle + 10])
    assert max(mine.sample_costs(train)) == 10
    assert list(ProteinRecipe().sample_costs(train))[:3] == [len(train[i]["residue"]) for i in range(3)]
    assert len(crop(item, 0, 99)["residue"]) == len(item["residue"])


def test_written_data_are_read_back_by_the_same_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.recipes.protein.recipe._EMBEDDED", 12)
    assert "12 peptides" in ProteinRecipe().write_data(tmp_path)
    sets = [recipe(tmp_path, tmp_path).dataset(split) for split in ("train", "val", "test")]
    assert sum(len(x) for x in sets if x is not None) == 12 and len(list(tmp_path.glob("*.pdb"))) == 12
    assert "12 files" not in recipe(tmp_path, tmp_path).describe_data("train")
    assert str(tmp_path) in recipe(tmp_path, tmp_path).describe_data("train")


def test_predictions_are_files_that_read_back(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 3)
    (folder / "bad.pdb").write_text("HEADER\n")
    (folder / "p001.cif.gz").write_bytes(gzip.compress(_cif(folder / "p001.pdb").encode()))
    small = ProteinOptions(hidden_dim=16, num_encoder_layers=1, num_decoder_layers=1, num_heads=2)
    mine = ProteinRecipe(small)
    torch.manual_seed(0)
    model, inputs = mine.model().eval(), mine.predict_dataset(folder)
    assert inputs.files == ["deep/er/p000.pdb", "p001.cif.gz", "p001.pdb", "p002.pdb"]
    with torch.no_grad():
        answers = mine.predict_batch(model, mine.collate([inputs[i] for i in range(4)]))
        for i, answer in enumerate(answers):
            (alone,) = mine.predict_batch(model, mine.collate([inputs[i]]))
            assert torch.equal(alone["residue"], answer["residue"])
            torch.testing.assert_close(alone["probability"], answer["probability"])
    for i, answer in enumerate(answers):  # an untrained model says glycine: give it something to write
        size, rng = len(answer["residue"]), Rng.of(i, torch.zeros(1, dtype=torch.int64), torch.tensor([0]))
        answer["residue"], answer["chi"] = rng.integers("kind", 20, size)[0], 360 * rng.uniform("chi", size, 4)[0] - 180
    made = mine.save_predictions(answers, inputs, tmp_path / "out")
    rows = list(csv.DictReader((tmp_path / "out/predictions.csv").open()))
    assert made[0].name == "predictions.csv" and len(rows) == sum(len(c) for c in inputs.chains)
    assert (tmp_path / "out/skipped.txt").read_text() == "bad.pdb: holds no atoms\n"
    written = [tmp_path / "out" / name for name in ("deep/er/p000.pdb", "p001.pdb", "p001-2.pdb", "p002.pdb")]
    for path, given, answer in zip(written, inputs.chains, answers, strict=True):
        (chain,) = read(path)
        assert path in made and torch.equal(chain.residue, answer["residue"])
        assert (chain.backbone - given.backbone).abs().max() < 0.002
        error = torch.remainder(chain.chi - answer["chi"] + 180, 360) - 180
        assert error[chain.has_chi].abs().max() < 0.5  # the side chains have the torsions that were predicted
        assert torch.equal(chain.has_chi.sum(1) > 0, torch.tensor([bool(SIDE_CHAINS[n][1:]) for n in names(chain)]))
        first = float(path.read_text().splitlines()[1][60:66])
        assert first == pytest.approx(100 * float(answer["probability"][0]), abs=0.01)
    with pytest.raises(ValueError, match=r"holds no protein chain.*\n.*bad.pdb: holds no atoms"):
        mine.predict_dataset(folder / "bad.pdb")


def _cif(path: Path) -> str:
    import gemmi

    structure = gemmi.read_structure(str(path))
    structure.setup_entities()
    return str(structure.make_mmcif_document().as_string())


def test_a_test_leaves_tables_and_a_picture(tmp_path: Path) -> None:
    mine = ProteinRecipe(ProteinOptions(hidden_dim=16, num_encoder_layers=1, num_decoder_layers=1, num_heads=2))
    torch.manual_seed(0)
    model, data = mine.model().eval(), mine.dataset("test")
    assert data is not None

    def sums(*groups: range) -> dict[str, Any]:
        total: dict[str, Any] = {}
        for group in groups:
            index = torch.tensor(list(group))
            batch = mine.collate([data[i] for i in group])
            with torch.no_grad():
                part = mine.evaluate_batch(model, batch, Rng.of(0, index * 0, index))
            total = {k: total.get(k, 0) + v for k, v in part.items()}
        return total

    whole, parts = sums(range(20)), sums(range(7), range(7, 8), range(8, 20))
    for name, value in whole.items():
        if name in ("fragments", "torsions"):  # the terms of the loss
            torch.testing.assert_close(value, parts[name], rtol=1e-5, atol=0)
        elif "error" in name:  # thousandths of a degree may round the other way
            assert (value - parts[name]).abs().max() <= 20
        else:
            assert torch.equal(value, parts[name]), name
    values = mine.metrics(whole)
    assert {"loss", "fragment_accuracy", "torsion_error", "torsion_within_20", "backbone_residue_accuracy"} <= set(
        values
    )
    made = mine.save_test(whole, values, tmp_path)
    assert [p.name for p in made][:3] == ["fragments.csv", "torsions.csv", "residues.csv"]
    assert all(path.stat().st_size > 100 for path in made)
    assert json.dumps(values)


@pytest.mark.slow
def test_real_structures_are_read_the_same_from_pdb_and_mmcif(tmp_path: Path) -> None:
    """The structures that come with the package tmtools: 2GTL and 7OK9, in both formats."""
    library = Library(Path(str(files("tmtools"))) / "data", tmp_path)
    assert [len(library.entries), len(library.chains), len(library.skipped)] == [4, 74, 0]
    chains = {}
    for i, place in enumerate(library.chains):
        item = library.load(i)
        chains[place.file, place.number] = item
        assert len(item["residue"]) == place.length and item["present"][:, 1].all()
        assert all(torch.isfinite(x).all() for x in item.values())
        bonded = item["linked"].nonzero().flatten()
        length = (item["backbone"][bonded, 0] - item["backbone"][bonded - 1, 2]).norm(dim=-1)
        assert len(bonded) == 0 or length.max() < 2
    for (file, number), item in chains.items():
        twin = chains[file.replace(".cif", ".pdb"), number]
        for name in ("residue", "present", "linked", "has_chi"):
            assert torch.equal(item[name], twin[name]), (file, number, name)
        torch.testing.assert_close(item["backbone"], twin["backbone"], rtol=0, atol=2e-3)
