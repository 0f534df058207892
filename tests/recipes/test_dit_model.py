"""The diffusion transformer: its size, its neutral start, registers that can be left out, every precision."""

import pytest
import torch
from torch import Tensor

from lockstep.recipes.diffusion.layers import frequency_features, sincos_positions, to_image, to_patches
from lockstep.recipes.dit.model import NAMES, SIZES, DiT, Size, build, parse


def tiny(registers: int = 0, qk_norm: bool = False, seed: int = 0, awake: bool = True) -> DiT:
    """A small model; `awake` gives the zero-initialised weights values, so that the output depends on everything."""
    torch.manual_seed(seed)
    model = DiT(Size(32, 2, 4), patch=2, side=8, classes=10, registers=registers, qk_norm=qk_norm)
    if awake:
        torch.manual_seed(seed + 1)
        for parameter in model.parameters():
            if not parameter.detach().any():
                torch.nn.init.normal_(parameter, std=0.2)
    return model


def inputs(n: int = 3, side: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(9)
    return torch.randn(n, 3, side, side), torch.rand(n), torch.arange(n)


def test_s2_has_the_published_size() -> None:
    parameters = sum(p.numel() for p in build("DiT-S/2", side=32, classes=10).parameters())
    print(f"DiT-S/2: {parameters:,} parameters")
    assert abs(parameters - 32.5e6) < 0.3e6
    assert parameters == 32_475_660, "norms without gains, biases everywhere, 11 classes"


def test_names_give_sizes() -> None:
    assert parse("DiT-XL/8") == ((1152, 28, 16), 8)
    assert len(NAMES) == len(SIZES) * 3
    with pytest.raises(ValueError, match=r"DiT-Nano/2, .*DiT-XL/8, not 'DiT-M/2'"):
        parse("DiT-M/2")
    with pytest.raises(ValueError, match="multiple of the patch size 2, not 9"):
        DiT(Size(32, 1, 4), patch=2, side=9, classes=10)


def test_a_new_model_answers_zero() -> None:
    model = tiny(registers=3, qk_norm=True, awake=False)
    x, t, label = inputs()
    assert not model(x, t, label).any()
    assert model(x, t, label).shape == x.shape


def test_no_registers_is_exactly_the_plain_model() -> None:
    plain, other = tiny(), tiny(registers=0)
    assert list(plain.state_dict()) == list(other.state_dict())
    assert not any("register" in key for key in plain.state_dict())
    assert torch.equal(plain(*inputs()), other(*inputs()))
    with_registers = tiny(registers=4, awake=False).state_dict()
    for key, value in tiny(awake=False).state_dict().items():
        assert torch.equal(with_registers.pop(key), value), f"{key} drew other initial weights"
    assert list(with_registers) == ["registers"]


def test_registers_take_part_but_are_not_put_out() -> None:
    model = tiny(registers=4)
    x, t, label = inputs()
    before = model(x, t, label)
    assert before.shape == x.shape
    with torch.no_grad():
        assert model.registers is not None
        model.registers += torch.randn_like(model.registers)
    assert not torch.allclose(model(x, t, label), before)
    # No positions: their order does not matter.
    swapped = tiny(registers=4)
    assert swapped.registers is not None
    swapped.registers.data = swapped.registers.data.flip(0)
    torch.testing.assert_close(swapped(x, t, label), before)


def test_qk_norm_makes_attention_blind_to_the_length_of_queries_and_keys() -> None:
    assert set(tiny(qk_norm=True).state_dict()) - set(tiny().state_dict()) == {
        f"blocks.{i}.attention.{norm}_norm.weight" for i in range(2) for norm in "qk"
    }
    for qk_norm in (True, False):
        model = tiny(qk_norm=qk_norm)
        before = model(*inputs())
        with torch.no_grad():
            for block in model.blocks:
                block.attention.qkv.weight[: 2 * 32] *= 3  # type: ignore[union-attr, index]
                block.attention.qkv.bias[: 2 * 32] *= 3  # type: ignore[union-attr, index]
        assert torch.allclose(model(*inputs()), before, atol=1e-4) == qk_norm


def test_patches_go_back_where_they_came_from() -> None:
    model = tiny()
    x, _, _ = inputs()
    patches = to_patches(x, model.patch)
    assert patches.shape == (3, 16, 12)
    assert torch.equal(patches[1, 6].view(3, 2, 2), x[1, :, 2:4, 4:6])  # token 6 of 4 per row: row 1, column 2
    assert torch.equal(to_image(patches, model.patch, 8), x)


@pytest.mark.parametrize("what", ["time", "label", "place", "none"])
def test_the_output_depends_on_every_input(what: str) -> None:
    model = tiny()
    x, t, label = inputs()
    before = model(x, t, label)
    if what == "time":
        after = model(x, t + 0.1, label)
    elif what == "place":  # the same patches in other places are another image
        after = model(x.roll(4, 3), t, label).roll(-4, 3)
    else:
        after = model(x, t, torch.full_like(label, model.none if what == "none" else 7))
    assert not torch.allclose(after, before, atol=1e-4)


def test_samples_do_not_touch_one_another() -> None:
    model = tiny(registers=2, qk_norm=True).double()
    x, t, label = inputs(4)
    x, t = x.double(), t.double()
    one_by_one = [model(x[i : i + 1], t[i : i + 1], label[i : i + 1]) for i in range(4)]
    torch.testing.assert_close(torch.cat(one_by_one), model(x, t, label), rtol=1e-12, atol=1e-12)


def test_positions_and_frequencies_are_the_published_ones() -> None:
    positions = sincos_positions(16, 3)
    assert positions.shape == (9, 16)
    torch.testing.assert_close(positions[5, 0], torch.tensor(1.0).sin())  # row 1
    torch.testing.assert_close(positions[5, 8], torch.tensor(2.0).sin())  # column 2
    torch.testing.assert_close(positions[5, 15], torch.tensor(2 * 10_000**-0.75).cos())
    features = frequency_features(torch.tensor([0.25], dtype=torch.float64))[0]
    assert features.shape == (256,)
    rate = 10_000 ** (-5 / 128)
    torch.testing.assert_close(features[5], torch.tensor(250 * rate, dtype=torch.float64).cos())
    torch.testing.assert_close(features[133], torch.tensor(250 * rate, dtype=torch.float64).sin())


def test_double_precision_goes_all_the_way_through() -> None:
    model = tiny(registers=2, qk_norm=True).double()
    x, t, label = inputs()
    out = model(x.double(), t.double(), label)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out.float(), tiny(registers=2, qk_norm=True)(x, t, label), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_bfloat16_autocast_is_close(qk_norm: bool) -> None:
    model = tiny(registers=2, qk_norm=qk_norm)
    x, t, label = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x, t, label)
    assert (out.float() - model(x, t, label)).abs().mean() < 0.05 * out.float().abs().mean()


def test_every_parameter_gets_a_gradient() -> None:
    model = tiny(registers=2, qk_norm=True)
    model(*inputs()).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
