"""Image classification and segmentation.

The loss of classification is cross-entropy with label smoothing. That of segmentation is Dice + ½ cross-entropy, both
per image, so that images have the same weight whatever part of them is labelled. Random flips and shifts are computed
on the device.
"""

import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...config import check
from ...recipe import Batch, Describes, EmbedsData, Loss, Pictures, Predicts, Pretrained, Recipe, Split, Sums, Tests
from ...rng import Rng
from ..confusion import IGNORE, accuracy, class_mean, confusion_matrix, per_class
from ..images import describe
from ..overlays import EXAMPLES, shares_of_classes, write_examples
from ..pixels import normalise, with_labels
from . import data, report
from .losses import soft_dice
from .model import build, count_flops, load_pretrained, patch_for, stem_for, summary

_SMOKE_IMAGES = 64
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_log = logging.getLogger(__name__)


@dataclass
class VisionOptions:
    model: Literal["resnet18", "resnet34", "resnet50", "vit_s", "unet"] = "resnet18"
    """The network: unet for segmentation, the others for classification."""
    width: int = 64
    """Channels of the first stage (of ViT, of each of its 6 heads); less makes a smaller model."""
    stem: Literal["auto", "imagenet", "small", "pooled"] = "auto"
    """ResNet stem: imagenet (stride 4), small (3×3, stride 1), pooled (3×3 and pooling); auto: small up to 64 px."""
    patch_size: int | None = None
    """Of ViT; by default 16, and less for images of up to 64 pixels."""
    pretrained: str | None = None
    """Pretrained weights (.pth or .safetensors); a head of other classes is not loaded."""
    data_path: str | None = None
    """A folder: IDX files, images in class folders, images/ and masks/, or CIFAR-10; without it, drawn shapes."""
    img_size: int | None = None
    """Pixels per side; by default those of the first image, 224 at most."""
    class_names: tuple[str, ...] = ()
    """The classes in order; by default those of the data. Saved with a run, so predicting needs no training data."""
    val_fraction: float = 0.1
    """Fraction of the training images used for validation, where the data have no validation images."""
    max_samples: int | None = None
    """Use at most this many images of each split, chosen at random."""
    flip: bool = True
    """Mirror half of the training images; turn it off where left and right matter."""
    crop: int | None = None
    """Largest shift of a training image in pixels, padded with black; by default an eighth of the side."""
    label_smoothing: float = 0.0
    """Classification: fraction of the target that is spread over all classes."""
    dice_weight: float = 1.0
    """Segmentation: weight of the Dice loss."""
    cross_entropy_weight: float = 0.5
    """Segmentation: weight of the cross-entropy."""
    log_level: str | None = None
    """Level of Python's logging: DEBUG, INFO, WARNING or ERROR. INFO shows a table of the model."""

    def __post_init__(self) -> None:
        for name, least in (("width", 1), ("patch_size", 1), ("img_size", 8), ("max_samples", 2), ("crop", 0)):
            value = getattr(self, name)
            check(value is None or value >= least, f"{name} is at least {least}", value)
        for name in ("val_fraction", "label_smoothing"):
            check(0 <= getattr(self, name) < 1, f"{name} is in [0, 1)", getattr(self, name), "0.1 is usual")
        weights = self.dice_weight, self.cross_entropy_weight
        rule = "dice_weight and cross_entropy_weight are at least 0 and not both 0"
        check(min(weights) >= 0 and any(weights), rule, f"{weights[0]} and {weights[1]}", "1.0 and 0.5 are usual")
        if self.log_level is not None:
            self.log_level = self.log_level.upper()
            check(self.log_level in _LEVELS, f"log_level is one of {', '.join(_LEVELS)}", self.log_level)


class VisionRecipe(Recipe, Pretrained, Tests, Predicts, EmbedsData, Pictures, Describes):
    """Image classification (ResNet, ViT) and segmentation (UNet)."""

    Options: ClassVar[type] = VisionOptions
    options: VisionOptions
    aliases = {"ddp.enabled": "distributed", "ddp.log_level": "log_level"}
    removed_options = frozenset({"data_form", "input"})
    defaults = {
        "batch_size": 32,
        "epochs": 10,
        "optimizer": "adamw",
        "lr": 1e-3,
        "schedule": "cosine",
        "eval_every": "1ep",
        "save_every": "1ep",
        "best_metric": "accuracy",
        "best_mode": "max",
    }
    presets = {
        # About a minute on two CPU cores.
        "laptop": {
            "model": "resnet18",
            "width": 8,
            "global_batch_size": 32,
            "batch_size": 32,
            "n_steps": 200,
            "lr": 4e-3,
            "warmup_steps": 20,
            "label_smoothing": 0.1,
            "log_every": 10,
            "eval_every": 100,
            "save_every": 100,
        },
        "laptop_seg": {
            "model": "unet",
            "width": 8,
            "global_batch_size": 16,
            "batch_size": 16,
            "n_steps": 500,
            "lr": 1e-2,
            "warmup_steps": 20,
            "log_every": 10,
            "eval_every": 250,
            "save_every": 250,
            "best_metric": "miou",
        },
        # The real Fashion-MNIST, as Debian installs it: apt-get install dataset-fashion-mnist.
        "fashion": {
            "model": "resnet18",
            "width": 64,
            "stem": "pooled",
            "data_path": "/usr/share/datasets/fashion-mnist",
            "val_fraction": 0.05,
            "crop": 2,
            "global_batch_size": 128,
            "batch_size": 128,
            "epochs": 2,
            "optimizer": "sgd",
            "lr": 0.1,
            "momentum": 0.9,
            "weight_decay": 5e-4,
            "warmup_epochs": 0.4,
            "log_every": 20,
        },
    }

    def __init__(self, options: Any = None):
        super().__init__(options)
        self._datasets: dict[Split, Any] = {}
        self._examples: list[tuple[Tensor, Tensor, Tensor]] = []
        if self.options.log_level:
            logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
            logging.getLogger().setLevel(self.options.log_level)

    @property
    def segments(self) -> bool:
        return self.options.model == "unet"

    @property
    def side(self) -> int:
        if self.options.img_size is None:
            self.options.img_size = data.native_side(self.options.data_path)
        return self.options.img_size

    @property
    def names(self) -> tuple[str, ...]:
        """The classes. Stored in the options, so that a run saves them with its settings."""
        if not self.options.class_names:
            self.dataset("train")
        return self.options.class_names

    def model(self) -> nn.Module:
        options = self.options
        return build(
            options.model,
            classes=len(self.names),
            side=self.side,
            width=options.width,
            stem=options.stem,
            patch=options.patch_size,
        )

    def dataset(self, split: Split) -> Any | None:
        if split not in self._datasets:
            options = self.options
            found = data.load(
                options.data_path, split, self.side, self.segments, options.val_fraction, options.max_samples
            )
            if found is not None and options.class_names and tuple(found.names) != tuple(options.class_names):
                raise ValueError(
                    f"class_names are {len(options.class_names)} ({options.class_names[0]} …), the data have "
                    f"{len(found.names)} ({found.names[0]} …); leave class_names out, or give other data"
                )
            if found is not None:
                options.class_names = tuple(found.names)
            self._datasets[split] = found
        return self._datasets[split]

    def loss(self, model: nn.Module, batch: Batch, rng: Rng) -> Loss:
        image, target = batch["image"], batch["mask" if self.segments else "label"]
        if model.training:
            image, target = self.flip_and_shift(image, target, rng)
        logits = model(normalise(image)).to(torch.get_default_dtype())
        if not self.segments:
            smoothing = self.options.label_smoothing if model.training else 0.0
            total = F.cross_entropy(logits, target, label_smoothing=smoothing, reduction="sum")
            return Loss(total, len(target), accuracy=(logits.argmax(1) == target).sum())
        dice, entropy = self.mask_losses(logits, target)
        total = self.options.dice_weight * dice.sum() + self.options.cross_entropy_weight * entropy.sum()
        return Loss(total, len(target), dice=dice.detach().sum(), cross_entropy=entropy.detach().sum())

    def mask_losses(self, logits: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Dice loss and cross-entropy of each image, (n,) both; without unlabelled pixels."""
        entropy = F.cross_entropy(logits, mask.long(), ignore_index=IGNORE, reduction="none").sum((1, 2))
        return soft_dice(logits.softmax(1), mask), entropy / (mask != IGNORE).sum((1, 2)).clamp(min=1)

    def flip_and_shift(self, image: Tensor, target: Tensor, rng: Rng) -> tuple[Tensor, Tensor]:
        """Flip and shift at random, a mask with its image; the padding is black and has no label."""
        crop = self.side // 8 if self.options.crop is None else self.options.crop
        if self.options.flip:
            flip = rng.bernoulli("flip", 0.5, 1, 1)
            image = torch.where(flip[:, None], image.flip(-1), image)
            target = torch.where(flip, target.flip(-1), target) if self.segments else target
        if crop:
            shift = rng.integers("crop", 2 * crop + 1, 2)
            image = translate(image, shift, crop, 0)
            target = translate(target[:, None], shift, crop, IGNORE)[:, 0] if self.segments else target
        return image, target

    def smoke(self) -> None:
        self.options.max_samples = min(_SMOKE_IMAGES, self.options.max_samples or _SMOKE_IMAGES)

    def load_pretrained(self, model: nn.Module) -> str | None:
        return load_pretrained(model, self.options.pretrained) if self.options.pretrained else None

    def evaluate_batch(self, model: nn.Module, batch: Batch, rng: Rng) -> Sums:
        return self._evaluate(model, batch)[0]

    def _evaluate(self, model: nn.Module, batch: Batch) -> tuple[Sums, Tensor]:
        """Return the sums of a batch, and the predicted classes."""
        target = batch["mask" if self.segments else "label"]
        logits = model(normalise(batch["image"])).to(torch.get_default_dtype())
        prediction = logits.argmax(1)
        sums: Sums = {"confusion": confusion_matrix(prediction, target, len(self.names)), "images": float(len(target))}
        if self.segments:
            dice, entropy = self.mask_losses(logits, target)
            return {**sums, "dice": dice.sum(), "entropy": entropy.sum()}, prediction
        return {**sums, "entropy": F.cross_entropy(logits, target, reduction="sum")}, prediction

    def metrics(self, sums: dict[str, Tensor]) -> dict[str, float]:
        matrix, images = sums["confusion"], float(sums["images"])
        values, entropy = per_class(matrix), float(sums["entropy"]) / images
        if not self.segments:
            return {"loss": entropy, "accuracy": accuracy(matrix), "macro_f1": class_mean(values.f1)}
        loss = self.options.dice_weight * float(sums["dice"]) / images + self.options.cross_entropy_weight * entropy
        return {
            "loss": loss,
            "miou": class_mean(values.iou),
            "dice": class_mean(values.f1),
            "accuracy": accuracy(matrix),
        }

    def same_as_training(self) -> Collection[str]:
        if self.segments:  # dice is a loss in training, a score here
            return ("loss",)
        return ("accuracy",) if self.options.label_smoothing else ("accuracy", "loss")

    def test_batch(self, model: nn.Module, batch: Batch, rng: Rng) -> Sums:
        sums, prediction = self._evaluate(model, batch)
        if self.segments and len(self._examples) < EXAMPLES:
            triples = zip(batch["image"].cpu(), batch["mask"].cpu(), prediction.to(torch.uint8).cpu(), strict=True)
            self._examples += list(triples)[: EXAMPLES - len(self._examples)]
        return sums

    def save_test(self, sums: dict[str, Tensor], values: dict[str, float], folder: Path) -> list[Path]:
        made = report.write_test(sums["confusion"], self.names, folder, self.segments)
        if self._examples:
            made.append(write_examples(self._examples, folder / "examples.png"))
        return made

    def predict_dataset(self, path: Path) -> data.Inputs:
        return data.inputs(path, self.side, self.segments)

    def predict_batch(self, model: nn.Module, batch: Batch) -> list[Any]:
        logits = model(normalise(batch["image"])).to(torch.get_default_dtype())
        if self.segments:
            return list(logits.argmax(1).to(torch.uint8).unbind())
        probability, label = logits.softmax(1).max(1)
        return list(zip(label.tolist(), probability.tolist(), strict=True))

    def save_predictions(self, predictions: list[Any], dataset: data.Inputs, folder: Path) -> list[Path]:
        if self.segments:
            return report.write_masks(predictions, dataset.names, dataset.files, self.names, folder)
        return report.write_labels(predictions, dataset.names, self.names, folder)

    def describe_predictions(self, predictions: list[Any], dataset: data.Inputs) -> str:
        images = f"{len(predictions):,} image{'s' * (len(predictions) != 1)}"
        if self.segments:
            return f"{images}; share of pixels: {shares_of_classes(predictions, self.names)}"
        counts = Counter(self.names[k] for k, _ in predictions)
        found = ", ".join(f"{count} {name}" for name, count in counts.most_common())
        return f"{images}: {found}; mean probability {sum(p for _, p in predictions) / len(predictions):.3f}"

    def write_data(self, folder: Path) -> str:
        side = self.options.img_size or data.native_side(None)
        return data.write(folder, side, self.segments, self.options.max_samples)

    def picture_of(self, item: dict[str, Tensor]) -> tuple[Tensor, str]:
        if self.segments:
            return with_labels(item["image"], item["mask"], self.names, background=False)
        return item["image"], self.names[int(item["label"])]

    def describe_model(self, model: nn.Module) -> str:
        options, side, classes = self.options, self.side, len(self.names)
        with torch.device("meta"):
            on_meta = self.model()
        _log.info("%s at %d × %d pixels\n%s", options.model, side, side, summary(on_meta, side))
        details = {
            "unet": "",
            "vit_s": f", patches of {options.patch_size or patch_for(side)}",
        }.get(options.model, f", {stem_for(side) if options.stem == 'auto' else options.stem} stem")
        width = f", width {options.width}" if options.width != 64 else ""
        flops = count_flops(on_meta, side)[""]
        return f"{options.model}{width}{details}, {side} px, {classes} classes, {flops / 1e9:.3g} GFLOPs per image"

    def describe_data(self, split: Split) -> str:
        found = self.dataset(split)
        return "" if found is None else describe(found)


def translate(picture: Tensor, shift: Tensor, most: int, fill: int) -> Tensor:
    """Move sample i of (n, c, S, S) by most − shift[i] pixels down and to the right; shift (n, 2) in [0, 2 · most]."""
    rows, columns = picture.shape[2:]
    padded = F.pad(picture, (most, most, most, most), value=fill)
    row = shift[:, 0, None] + torch.arange(rows, device=picture.device)
    column = shift[:, 1, None] + torch.arange(columns, device=picture.device)
    sample = torch.arange(len(picture), device=picture.device)
    return padded.movedim(1, -1)[sample[:, None, None], row[:, :, None], column[:, None, :]].movedim(-1, 1)
