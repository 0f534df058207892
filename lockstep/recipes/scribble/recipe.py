"""Semantic segmentation from scribbles and pseudo labels.

Training minimises a sum of five terms, each a mean over elements of its own:
cross-entropy on scribbled pixels; cross-entropy with smoothing on pseudo-labelled ones; the entropy of the prediction,
weighted by the nearness to a scribble (l_ds) and to a pseudo-labelled object (l_dc), over the pixels near one; and the
distance of foreground features to their rectification by LoRM. Pixels labelled 255 are left out of all of them.

Legend: N images, K classes, H × W pixels.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import default_collate

from ...config import check
from ...recipe import (
    Augments,
    Batch,
    Describes,
    EmbedsData,
    Loss,
    Pictures,
    Predicts,
    Pretrained,
    Recipe,
    SeveralTerms,
    Split,
    Sums,
    Tests,
)
from ...rng import Rng
from ..confusion import accuracy, class_mean, confusion_matrix, per_class
from ..overlays import EXAMPLES, overlay, shares_of_classes, write_examples
from ..pixels import normalise, read_rgb, save_image, with_labels
from . import data, losses
from .augment import Augmentation, augment
from .files import write_map
from .infer import probabilities
from .model import Segmenter, build, feature_size, foreground, load_backbone, nearest
from .report import write_test
from .scenes import Scenes

_MIN_CROP = 32
_SMOKE_CROP = 64


@dataclass
class ScribbleOptions:
    model_type: Literal["res50_ASPP_lorm", "deeplabv2", "deeplabv3p"] = "res50_ASPP_lorm"
    """ResNet + ASPP with LoRM in training (with any --layers), DeepLabv2, or DeepLabv3+."""
    layers: Literal[18, 34, 50, 101, 152] = 50
    """Layers of the ResNet."""
    model_path: str | None = None
    """ImageNet weights of the ResNet, .pth or .safetensors, under torchvision's names; without it, from scratch."""
    data_path: str | None = None
    """A folder laid out like Pascal VOC (docs/recipes/scribble.md); without it, drawn scenes. Also --dataset_path."""
    num_classes: int = 21
    """Number of classes, with the background. Also --numclasses."""
    scribbles: str = data.FOLDERS["scribble"]
    """In data_path, the folder of scribbles. Also --train_path."""
    pseudo_labels: str = data.FOLDERS["pseudo"]
    """In data_path, the folder of pseudo labels."""
    distancemap_s: str = data.FOLDERS["near_scribble"]
    """In data_path, the folder of distance maps of scribbles."""
    distancemap_c: str = data.FOLDERS["near_pseudo"]
    """In data_path, the folder of distance maps of pseudo labels."""
    crop_size: int = 465
    """Pixels per side of training crops, of the validation's centre crop and of the test's windows."""
    scale: tuple[float, float] = (0.5, 2.0)
    """Training scenes are scaled by a factor between these two."""
    rotate: float = 10.0
    """They are rotated by up to so many degrees, either way."""
    blur: float = 0.5
    """Fraction of them that is blurred."""
    flip: bool = True
    """Mirror half of them."""
    l_segs: float = 1.0
    """Weight of the cross-entropy on scribbles."""
    l_pesudo: float = 1.0
    """Weight of the cross-entropy on pseudo labels."""
    l_lorm: float = 1.0
    """Weight of LoRM's distance; models without LoRM have no such term."""
    l_ds: float = 1.0
    """Weight of the entropy near scribbles."""
    l_dc: float = 1.0
    """Weight of the entropy near pseudo-labelled objects."""
    smoothing: float = 0.1
    """Label smoothing of the pseudo labels."""
    test_scales: tuple[float, ...] = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
    """Scales over which test and predict average."""
    base_size: int = 512
    """Pixels of the longer side at scale 1 in test and predict; 0: the image's own."""

    def __post_init__(self) -> None:
        check(2 <= self.num_classes <= 255, "num_classes is 2 to 255, with the background", self.num_classes)
        check(self.crop_size >= _MIN_CROP, f"crop_size is at least {_MIN_CROP}", self.crop_size)
        rising = 0 < self.scale[0] <= self.scale[1]
        check(rising, "scale is two factors above 0, the smaller one first", self.scale, "0.5 2 is usual")
        check(0 <= self.blur <= 1, "blur is in [0, 1]", self.blur, "0.5 is usual")
        check(0 <= self.smoothing < 1, "smoothing is in [0, 1)", self.smoothing, "0.1 is usual")
        for name in ("l_segs", "l_pesudo", "l_lorm", "l_ds", "l_dc", "rotate", "base_size"):
            value = getattr(self, name)
            check(math.isfinite(value) and value >= 0, f"{name} is 0 or more", value)
        positive = bool(self.test_scales) and all(math.isfinite(s) and s > 0 for s in self.test_scales)
        check(positive, "test_scales are one or more factors above 0", self.test_scales, "1.0 will do")


class ScribbleRecipe(Recipe, Augments, SeveralTerms, Pretrained, Tests, Predicts, EmbedsData, Pictures, Describes):
    """Semantic segmentation from scribbles and pseudo labels."""

    Options: ClassVar[type] = ScribbleOptions
    options: ScribbleOptions
    aliases = {
        "dataset_path": "data_path",
        "numclasses": "num_classes",
        "train_path": "scribbles",
    }
    defaults = {
        "batch_size": 16,
        "epochs": 50,
        "optimizer": "sgd",
        "lr": 1e-3,
        "lr_scaling": "linear",
        "base_batch_size": 16,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "schedule": "cosine",
        "warmup_epochs": 5.0,
        "eval_every": "1ep",
        "save_every": "1ep",
        "best_metric": "miou",
        "best_mode": "max",
    }
    presets = {
        "laptop": {
            "layers": 18,
            "crop_size": 80,
            "scale": [0.75, 1.5],
            "base_size": 0,
            "test_scales": [0.75, 1.0, 1.25],
            "global_batch_size": 8,
            "batch_size": 8,
            "n_steps": 150,
            "lr": 0.04,
            "lr_scaling": "none",
            "warmup_epochs": 0.0,
            "warmup_steps": 15,
            "log_every": 10,
            "eval_every": "75",
            "save_every": "75",
        },
    }

    def __init__(self, options: Any = None):
        super().__init__(options)
        self._sources: dict[Split, data.Source] = {}
        self._names: tuple[str, ...] | None = None
        self._examples: list[tuple[Tensor, Tensor, Tensor]] = []
        """Image, truth and prediction of a few images of a test."""

    @property
    def names(self) -> tuple[str, ...]:
        if self._names is None:
            self._names = data.class_names(self.options.data_path, self.options.num_classes)
        return self._names

    def model(self) -> Segmenter:
        return build(self.options.model_type, self.options.layers, self.options.num_classes)

    def dataset(self, split: Split) -> data.Source:
        """Training scenes before `augment`; centre crops for validation, full images for a test."""
        assert len(self.names) == self.options.num_classes, "class_names() pads or refuses"
        source = self._source(split)
        if split == "train":
            return data.TrainingScenes(source)
        return data.LabelledScenes(source, self.options.crop_size if split == "val" else None)

    def _source(self, split: Split) -> data.Source:
        if split not in self._sources:
            self._sources[split] = self._load(split)
        return self._sources[split]

    def _load(self, split: Split) -> data.Source:
        o = self.options
        if o.data_path is None:
            return Scenes(split, o.crop_size)
        root = Path(o.data_path).expanduser()
        listed: Split = "val" if split == "test" and data.list_file(root, "test") is None else split
        folders = (o.scribbles, o.pseudo_labels, o.distancemap_s, o.distancemap_c)
        return data.VocFolder(root, listed, o.num_classes, dict(zip(data.TRAINING, folders, strict=True)))

    def loss(self, model: nn.Module, batch: Batch, rng: Rng) -> Loss:
        o = self.options
        x = normalise(batch["image"])
        stages = model.backbone(x)  # type: ignore[operator]
        log_p = model.scores(stages, x).to(x.dtype).log_softmax(1)  # type: ignore[operator]
        scribble, pseudo = batch["scribble"].long(), batch["pseudo"].long()
        terms = {
            "segs": o.l_segs * losses.cross_entropy(log_p, scribble),
            "pesudo": o.l_pesudo * losses.cross_entropy(log_p, pseudo, o.smoothing),
            "ds": o.l_ds * losses.entropy_near(log_p, batch["near_scribble"]),
            "dc": o.l_dc * losses.entropy_near(log_p, batch["near_pseudo"]),
        }
        if model.lorm is not None:
            terms["lorm"] = o.l_lorm * model.lorm(stages[-1], pseudo)  # type: ignore[operator]
        return Loss.of_terms(**terms)

    def collate(self, items: list[dict[str, Tensor]]) -> Batch:
        return default_collate(data.pad_together(items))

    def smoke(self) -> None:
        self.options.crop_size = min(self.options.crop_size, _SMOKE_CROP)
        self.options.test_scales = (1.0,)
        self.options.base_size = min(self.options.base_size, _SMOKE_CROP)

    def augment(self, item: dict[str, Tensor], rng: Rng) -> dict[str, Tensor]:
        o = self.options
        return augment(item, rng, Augmentation(o.crop_size, o.scale, o.rotate, o.flip, o.blur))

    def term_counts(self, batch: Batch, rng: Rng) -> dict[str, Tensor]:
        """Count what each term is a mean over: labelled pixels, pixels near a label, foreground positions."""
        pseudo = batch["pseudo"]
        counts = {
            "segs": losses.labelled(batch["scribble"]).sum(),
            "pesudo": losses.labelled(pseudo).sum(),
            "ds": (batch["near_scribble"] > 0).sum(),
            "dc": (batch["near_pseudo"] > 0).sum(),
        }
        if self.options.model_type == "res50_ASPP_lorm":
            counts["lorm"] = foreground(nearest(pseudo, feature_size(*pseudo.shape[1:]))).sum()
        return counts

    def load_pretrained(self, model: nn.Module) -> str | None:
        assert isinstance(model, Segmenter)
        if self.options.model_path is None:
            return "the ResNet starts from scratch; --model_path loads ImageNet weights"
        load_backbone(model, self.options.model_path)
        return f"the ResNet starts from {self.options.model_path}"

    def evaluate_batch(self, model: nn.Module, batch: Batch, rng: Rng) -> Sums:
        predicted = model(normalise(batch["image"])).argmax(1)
        return {"confusion": confusion_matrix(predicted, batch["label"], self.options.num_classes)}

    def metrics(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Mean IoU over the classes that occur or are predicted, pixel accuracy, and the IoU of each class."""
        matrix = sums["confusion"]
        ious = per_class(matrix).iou
        present = {f"iou/{name}": v for name, v in zip(self.names, ious.tolist(), strict=True) if not math.isnan(v)}
        return {"miou": class_mean(ious), "accuracy": accuracy(matrix), **present}

    def test_batch(self, model: nn.Module, batch: Batch, rng: Rng) -> Sums:
        parts = []
        for image, label, predicted in zip(
            batch["image"], batch["label"], self.predict_batch(model, batch), strict=True
        ):
            height, width = predicted.shape  # without what pads the batch
            truth = label[:height, :width]
            parts.append(confusion_matrix(predicted, truth, self.options.num_classes))
            if len(self._examples) < EXAMPLES:
                self._examples.append((image[:, :height, :width].cpu(), truth.cpu(), predicted.cpu()))
        return {"confusion": torch.stack(parts).sum(0)}

    def save_test(self, sums: dict[str, Tensor], values: dict[str, float], folder: Path) -> list[Path]:
        made = write_test(sums["confusion"], self.names, folder)
        return [*made, write_examples(self._examples, folder / "examples.png")] if self._examples else made

    def predict_dataset(self, path: Path) -> data.Inputs:
        return data.Inputs(path)

    def predict_batch(self, model: nn.Module, batch: Batch) -> list[Tensor]:
        """Return the labels of each image, (H, W) uint8, independent of the other images in the batch."""
        o, out = self.options, []
        for image, (height, width) in zip(batch["image"], batch["size"].tolist(), strict=True):
            x = normalise(image[None, :, :height, :width])[0]
            out.append(probabilities(model, x, o.crop_size, o.test_scales, o.base_size).argmax(0).to(torch.uint8))
        return out

    def save_predictions(self, predictions: list[Tensor], dataset: data.Inputs, folder: Path) -> list[Path]:
        """Write a PNG in VOC's colours for each input, of its size and under its name; in overlays/ on top of it."""
        names = [dataset.output(file) for file in dataset.files]
        overlays = folder / ("overlays" if all(name.parts[0] != "overlays" for name in names) else "overlays_made")
        for labels, name, file in zip(predictions, names, dataset.files, strict=True):
            write_map(labels, folder / name)
            save_image(Image.fromarray(overlay(np.array(read_rgb(file)), labels.numpy())), overlays / name)
        return [folder / name for name in names]

    def describe_predictions(self, predictions: list[Tensor], dataset: data.Inputs) -> str:
        images = f"{len(predictions):,} image{'s' * (len(predictions) != 1)}"
        return f"{images}; share of pixels: {shares_of_classes(predictions, self.names)}"

    def write_data(self, folder: Path) -> str:
        return data.write(folder, self.options.crop_size)

    def picture_of(self, item: dict[str, Tensor]) -> tuple[Tensor, str]:
        return with_labels(item["image"], item["scribble"], self.names, background=True)

    def describe_model(self, model: nn.Module) -> str:
        assert isinstance(model, Segmenter)
        lorm = 0 if model.lorm is None else sum(p.numel() for p in model.lorm.parameters())
        note = f", {lorm / 1e6:.2f} M of it LoRM for training" if lorm else ""
        return f"{self.options.model_type} on ResNet-{self.options.layers}, {self.options.num_classes} classes{note}"

    def describe_data(self, split: Split) -> str:
        source = self._source(split)
        return f"{source.source}, {len(source):,} for {split}"
