"""The networks of `vision`: parameters as published, shapes, operations counted by hand, weights that fit or do not."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lockstep.recipes.vision.model import UNet, ViT, build, count_flops, load_pretrained, patch_for, stem_for, summary
from lockstep.recipes.vision.recipe import VisionOptions, VisionRecipe


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def weightless(name: str, **settings: object) -> nn.Module:
    with torch.device("meta"):
        return build(name, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "count"),
    [("resnet18", 11_689_512), ("resnet34", 21_797_672), ("resnet50", 25_557_032), ("vit_s", 22_050_664)],
)
def test_published_sizes(name: str, count: int) -> None:
    model = weightless(name, classes=1000, side=224)
    assert parameters(model) == count
    assert model(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)


def unet_parameters(width: int, classes: int) -> int:
    """By hand: pairs of 3×3 convolutions without bias, each with a norm's scale and shift; 1×1 with bias at the end."""
    widths = [width, 2 * width, 4 * width, 8 * width, 16 * width]

    def pair(i: int, o: int) -> int:
        return 9 * i * o + 2 * o + 9 * o * o + 2 * o

    down = sum(pair(i, o) for i, o in zip([3, *widths[:-1]], widths, strict=True))
    up = sum(pair(widths[k + 1] + widths[k], widths[k]) for k in range(4))
    return down + up + width * classes + classes


@pytest.mark.parametrize(("width", "classes"), [(64, 21), (8, 11), (3, 2)])
def test_the_unet_has_the_parameters_of_its_form(width: int, classes: int) -> None:
    assert parameters(weightless("unet", classes=classes, side=64, width=width)) == unet_parameters(width, classes)


@pytest.mark.parametrize("side", [16, 31, 48, 50])
def test_the_unet_answers_for_every_pixel_of_any_side(side: int) -> None:
    assert UNet(4, 2)(torch.randn(2, 3, side, side)).shape == (2, 4, side, side)


def test_a_unet_refuses_images_that_vanish_on_the_way_down() -> None:
    with pytest.raises(ValueError, match="at least 16, not 15"):
        build("unet", classes=2, side=15)


def test_every_parameter_of_every_model_learns() -> None:
    torch.manual_seed(0)
    for name in ("resnet18", "resnet50", "vit_s", "unet"):
        model = build(name, classes=3, side=16, width=4)
        model(torch.randn(4, 3, 16, 16)).square().sum().backward()
        idle = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        assert not idle, (name, idle)


def test_stems_follow_the_size_of_the_image() -> None:
    assert (stem_for(28), stem_for(64), stem_for(65), stem_for(224)) == ("small", "small", "imagenet", "imagenet")
    for stem, stride in (("small", 1), ("pooled", 2), ("imagenet", 4)):
        model = build("resnet18", classes=2, side=32, width=2, stem=stem).eval()
        seen: list[torch.Size] = []
        model.get_submodule("layer1").register_forward_hook(lambda _, __, y, seen=seen: seen.append(y.shape))
        model(torch.randn(1, 3, 32, 32))
        assert seen[0][2:] == (32 // stride, 32 // stride)
    small, large = (weightless("resnet18", classes=10, side=side) for side in (32, 224))
    assert parameters(large) - parameters(small) == 64 * 3 * (49 - 9)


def test_vit_patches_follow_the_size_of_the_image() -> None:
    assert [patch_for(side) for side in (224, 64, 32, 28, 20, 25)] == [16, 8, 4, 4, 2, 1]
    with pytest.raises(ValueError, match="multiple of the patch size 16, not 225; 224 is"):
        ViT(10, 225, 16, 12)


def test_the_class_token_sees_every_patch_and_its_place() -> None:
    torch.manual_seed(0)
    model = ViT(5, 16, 4, 24, depth=2).eval()
    x = torch.randn(1, 3, 16, 16)
    swapped = x.clone()
    swapped[..., :4, :4], swapped[..., 12:, 12:] = x[..., 12:, 12:], x[..., :4, :4]
    changed = x.clone()
    changed[..., 8, 8] += 3
    with torch.no_grad():
        assert not torch.allclose(model(x), model(changed), atol=1e-6)
        assert not torch.allclose(model(x), model(swapped), atol=1e-6)
        model.pos_embed.zero_()
        torch.testing.assert_close(model(x), model(swapped))  # without positions a set of patches is all it sees


def test_operations_are_counted_as_by_hand() -> None:
    """ResNet-18 with ImageNet's stem: 1.814 billion multiply-adds, as published."""
    assert count_flops(weightless("resnet18", classes=1000, side=224), 224)[""] == 2 * 1_814_073_344
    tokens, d = 17, 24
    macs = 16 * 3 * 16 * d + 12 * (12 * tokens * d * d + 2 * tokens * tokens * d) + 5 * d
    assert count_flops(weightless("vit_s", classes=5, side=16, width=4, patch=4), 16)[""] == 2 * macs


def test_the_summary_adds_up() -> None:
    model = weightless("resnet18", classes=10, side=32, width=8)
    head, *parts, whole = (line.split() for line in summary(model, 32).splitlines())
    assert head == ["part", "parameters", "MFLOPs/image"] and whole[0] == "total"
    assert sum(int(part[1].replace(",", "")) for part in parts) == int(whole[1].replace(",", "")) == parameters(model)
    assert sum(float(part[2]) for part in parts) == pytest.approx(float(whole[2]), rel=0.01)


def small(classes: int = 3, **settings: object) -> nn.Module:
    return build("resnet18", classes=classes, side=16, width=2, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["pth", "safetensors", "nested"])
def test_pretrained_weights_are_taken_whole(tmp_path: Path, form: str) -> None:
    torch.manual_seed(1)
    source, file = small(), tmp_path / f"w.{'pth' if form == 'nested' else form}"
    state = source.state_dict()
    if form == "safetensors":
        save_file(state, file)
    else:
        torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}} if form == "nested" else state, file)
    model = small()
    assert load_pretrained(model, str(file)) == f"pretrained: {len(state)} tensors from {file}"
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())


def test_a_head_of_other_classes_is_left_out(tmp_path: Path) -> None:
    source, model = small(classes=7), small()
    torch.save(source.state_dict(), tmp_path / "w.pth")
    before = model.state_dict()["fc.weight"].clone()
    assert "the head fc is new (7 classes in the file, 3 here)" in load_pretrained(model, str(tmp_path / "w.pth"))
    assert torch.equal(model.state_dict()["fc.weight"], before)
    assert torch.equal(model.state_dict()["layer4.1.conv2.weight"], source.state_dict()["layer4.1.conv2.weight"])


def test_weights_that_do_not_fit_are_named_with_their_shapes(tmp_path: Path) -> None:
    file = tmp_path / "w.pth"
    torch.save(small(stem="imagenet").state_dict(), file)
    with pytest.raises(ValueError, match=r"conv1.weight \(2, 3, 7, 7\), here \(2, 3, 3, 3\).*--stem"):
        load_pretrained(small(), str(file))
    state = small().state_dict()
    del state["layer3.0.bn1.weight"]
    torch.save({**state, "extra": torch.zeros(2, 5)}, file)
    with pytest.raises(ValueError, match=r"1 missing \(layer3.0.bn1.weight \(8,\)\), 1 unexpected \(extra \(2, 5\)\)"):
        load_pretrained(small(), str(file))
    old = {k: v for k, v in small().state_dict().items() if not k.endswith("num_batches_tracked")}
    torch.save(old, file)
    assert load_pretrained(small(), str(file)).startswith(f"pretrained: {len(old)} tensors")


def test_files_without_weights_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "w.pth"
    with pytest.raises(ValueError, match="there is no file"):
        load_pretrained(small(), str(file))
    file.write_bytes(b"hello")
    with pytest.raises(ValueError, match="cannot be read"):
        load_pretrained(small(), str(file))
    torch.save({"model": small(), "a": Path("x")}, file)  # a pickled module: never run
    with pytest.raises(ValueError, match="cannot be read"):
        load_pretrained(small(), str(file))
    torch.save([1, 2], file)
    with pytest.raises(ValueError, match="no dict of tensors"):
        load_pretrained(small(), str(file))
    (tmp_path / "w.safetensors").write_bytes(b"12345678901234567890")
    with pytest.raises(ValueError, match="cannot be read"):
        load_pretrained(small(), str(tmp_path / "w.safetensors"))


def test_begin_loads_what_the_flag_names(tmp_path: Path) -> None:
    options = VisionOptions(width=2, img_size=16, pretrained=str(tmp_path / "w.pth"))
    recipe = VisionRecipe(options)
    torch.manual_seed(3)
    torch.save(recipe.model().state_dict(), tmp_path / "w.pth")
    model = recipe.model()
    assert "pretrained: " in (recipe.load_pretrained(model) or "")
    assert VisionRecipe(VisionOptions(width=2, img_size=16)).load_pretrained(model) is None
