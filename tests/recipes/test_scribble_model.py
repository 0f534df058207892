"""The networks of `scribble`: sizes, LoRM against a loop, what 255 may not touch, ImageNet weights."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lockstep.recipes.resnet import ResNetBackbone
from lockstep.recipes.scribble.model import ASPP, LoRM, Segmenter, build, feature_size, load_backbone, nearest


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_the_paper_s_network_has_its_size() -> None:
    with torch.device("meta"):
        model = build("res50_ASPP_lorm", 50, 21)
    assert model.lorm is not None
    assert parameters(model) == 33_146_330 and round(parameters(model) / 1e6, 2) == 33.15
    assert parameters(model.lorm) == 2 * 2048 * 2048 + 1 and round(parameters(model.lorm) / 1e6, 2) == 8.39
    assert parameters(model.backbone) == 25_557_032 - (2048 * 1000 + 1000), "ResNet-50 without its classifier"


@pytest.mark.parametrize(("layers", "channels"), [(18, 512), (34, 512), (101, 2048), (152, 2048)])
def test_other_depths_follow(layers: int, channels: int) -> None:
    with torch.device("meta"):
        model = build("res50_ASPP_lorm", layers, 21)
    assert model.lorm is not None and parameters(model.lorm) == 2 * channels**2 + 1


def dilations(model: Segmenter, stage: int) -> list[int]:
    convolutions = [m for m in model.backbone.get_submodule(f"layer{stage}").modules() if isinstance(m, nn.Conv2d)]
    return sorted({c.dilation[0] for c in convolutions if c.kernel_size == (3, 3)})


def test_stages_are_dilated_and_branches_reach_as_far_as_they_should() -> None:
    with torch.device("meta"):
        model, sums, plus = (build(kind, 50, 21) for kind in ("res50_ASPP_lorm", "deeplabv2", "deeplabv3p"))
    assert [dilations(model, stage) for stage in (1, 2, 3, 4)] == [[1], [1], [2], [4, 8, 16]]
    reach = [m.dilation[0] for m in model.head.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    assert reach == [12, 18, 24]
    assert [m.dilation[0] for m in sums.head.modules() if isinstance(m, nn.Conv2d)] == [6, 12, 18, 24]
    assert sums.lorm is None and plus.lorm is None


@pytest.mark.parametrize("kind", ["res50_ASPP_lorm", "deeplabv2", "deeplabv3p"])
@pytest.mark.parametrize("size", [(40, 33), (32, 47)])
def test_every_pixel_gets_its_scores_from_features_at_stride_8(kind: str, size: tuple[int, int]) -> None:
    model = build(kind, 18, 7).eval()
    x = torch.randn(2, 3, *size)
    with torch.no_grad():
        assert model(x).shape == (2, 7, *size)
        assert model.backbone(x)[-1].shape[2:] == feature_size(*size)


def test_labels_on_a_coarser_grid_are_labels_of_the_middle() -> None:
    label = torch.arange(2 * 16 * 24).view(2, 16, 24)
    coarse = nearest(label, (2, 3))
    assert torch.equal(coarse, label[:, [4, 12]][:, :, [4, 12, 20]])
    assert torch.equal(nearest(label, (16, 24)), label)
    assert nearest(label, (59, 3)).shape == (2, 59, 3)


def lorm_by_hand(module: LoRM, x: Tensor, label: Tensor) -> float:
    """One position after the other."""
    total = 0.0
    channels = x.shape[1]
    for n in range(len(x)):
        places = [(i, j) for i in range(x.shape[2]) for j in range(x.shape[3])]
        at = {p: x[n, :, p[0], p[1]] for p in places}
        known = [p for p in places if label[n, p[0], p[1]] != 255]
        for p in places:
            if label[n, p[0], p[1]] in (0, 255):
                continue
            q = module.query.weight[:, :, 0, 0] @ at[p]
            weights = []
            for other in known:
                k = module.key.weight[:, :, 0, 0] @ at[other]
                weights.append(math.exp(float(q @ k / (q.norm() * k.norm()))))
            mixed = sum(w / sum(weights) * at[other] for w, other in zip(weights, known, strict=True))
            total += float((at[p] - module.scale * mixed).square().sum()) / channels
    return total


@pytest.mark.usefixtures("float64")
def test_lorm_is_the_loop_over_positions() -> None:
    torch.manual_seed(0)
    module = LoRM(5)
    module.scale.data.fill_(0.7)
    x = torch.randn(2, 5, 3, 4)
    label = torch.tensor([[[0, 1, 1, 255], [2, 2, 0, 0], [255, 255, 1, 0]], [[0] * 4, [3, 0, 3, 0], [255] * 4]])
    assert module(x, label).item() == pytest.approx(lorm_by_hand(module, x, label), rel=1e-12)
    # Labels of the image are looked up at the middle of each position.
    fine = label.repeat_interleave(8, 1).repeat_interleave(8, 2)
    torch.testing.assert_close(module(x, fine), module(x, label))


@pytest.mark.usefixtures("float64")
def test_lorm_does_not_see_ignored_positions_and_does_not_take_them_for_background() -> None:
    torch.manual_seed(0)
    module = LoRM(4)
    x = torch.randn(1, 4, 2, 3)
    label = torch.tensor([[[1, 255, 0], [2, 0, 255]]])
    before, kept = module(x, label), label.clone()
    x[:, :, label[0] == 255] = 1e3
    torch.testing.assert_close(module(x, label), before)
    assert torch.equal(label, kept), "labels are not written to"
    assert module(x, torch.where(label == 255, 0, label)) != before


def test_lorm_of_an_image_without_labels_is_nothing() -> None:
    module = LoRM(4)
    x = torch.randn(1, 4, 2, 3, requires_grad=True)
    for nothing in (0, 255):
        total = module(x, torch.full((1, 16, 24), nothing))
        total.backward()
        assert float(total.detach()) == 0 and x.grad is not None and torch.equal(x.grad, torch.zeros_like(x))


def test_one_image_cannot_be_normalised_by_itself() -> None:
    aspp = ASPP(4, 3, 3, (1,))
    with pytest.raises(ValueError, match="at least 2 images at once, not 1; raise --batch_size"):
        aspp(torch.randn(1, 4, 5, 5))
    aspp(torch.randn(2, 4, 5, 5))
    aspp.eval()(torch.randn(1, 4, 5, 5))


def imagenet_weights() -> dict[str, Tensor]:
    torch.manual_seed(5)
    weights = {name: torch.randn_like(t.float()).to(t.dtype) for name, t in ResNetBackbone(18).state_dict().items()}
    return weights | {"fc.weight": torch.randn(1000, 512), "fc.bias": torch.randn(1000)}


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_imagenet_weights_are_loaded_under_torchvision_s_names(tmp_path: Path, ending: str) -> None:
    weights, file = imagenet_weights(), tmp_path / f"resnet18.{ending}"
    if ending == "pth":  # the oldest of torchvision's files have no counters
        torch.save({name: t for name, t in weights.items() if not name.endswith("num_batches_tracked")}, file)
    else:
        save_file(weights, file)
    model = build("res50_ASPP_lorm", 18, 3)
    head = model.head.state_dict()["aspp.project.0.weight"].clone()
    load_backbone(model, str(file))
    for name, tensor in model.backbone.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(tensor, weights[name]), name
    assert torch.equal(model.head.state_dict()["aspp.project.0.weight"], head)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model, file = build("deeplabv2", 34, 3), tmp_path / "w.pth"
    with pytest.raises(ValueError, match=r"there is no file .*w.pth"):
        load_backbone(model, str(file))
    torch.save(imagenet_weights(), file)
    with pytest.raises(ValueError, match=r"missing \(layer1.2.conv1.weight .*Give the file that fits --layers"):
        load_backbone(model, str(file))
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ValueError, match="cannot be read"):
        load_backbone(model, str(file))
    torch.save([1, 2], file)
    with pytest.raises(ValueError, match="no dict of tensors"):
        load_backbone(model, str(file))
    torch.save({"model": nn.Linear(2, 2)}, file)
    with pytest.raises(ValueError, match="cannot be read"):
        load_backbone(model, str(file))
    (tmp_path / "w.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="cannot be read"):
        load_backbone(model, str(tmp_path / "w.safetensors"))


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="model_type is one of"):
        build("unet", 50, 21)
    with pytest.raises(ValueError, match="layers is one of 18, 34, 50, 101, 152, not 20"):
        build("deeplabv2", 20, 21)
