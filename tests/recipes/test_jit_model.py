"""The just-image transformer: its size, its neutral start, where things are, class tokens that come and go."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.recipes.diffusion.layers import Attention, Block, rotary_angles, rotate
from lockstep.recipes.jit.model import SIZES, JiT, Size, SwiGLU, build, parse


def tiny(start: int = 1, depth: int = 3, class_tokens: int = 4, awake: bool = True, **more: Any) -> JiT:
    """A small model; `awake` gives the zero-initialised weights values, so that the output depends on everything."""
    torch.manual_seed(0)
    size = Size(width=32, depth=depth, heads=4, bottleneck=6, start=start)
    model = JiT(size, patch=2, side=8, classes=10, class_tokens=class_tokens, **more)
    if awake:
        torch.manual_seed(1)
        for parameter in model.parameters():
            if not parameter.detach().any():
                nn.init.normal_(parameter, std=0.2)
    return model


def inputs(n: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(9)
    return torch.randn(n, 3, 8, 8), torch.rand(n), torch.arange(n)


def lengths(model: JiT) -> list[int]:
    """How many tokens each block sees, and the final layer."""
    seen: list[int] = []
    hooks = [m.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1])) for m in model.blocks]
    hooks.append(model.final.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1])))
    model(*inputs())
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize(("name", "published"), [("JiT-B/16", 131e6), ("JiT-L/16", 459e6), ("JiT-H/16", 953e6)])
def test_models_have_the_published_sizes(name: str, published: float) -> None:
    with torch.device("meta"):
        model = build(name, side=256, classes=1000)
    parameters = sum(p.numel() for p in model.parameters())
    assert abs(parameters / published - 1) < 0.005, f"{name}: {parameters:,}"


def test_the_parameters_of_b_16_are_these() -> None:
    with torch.device("meta"):
        model = build("JiT-B/16", side=256, classes=1000)
    width, hidden, patch = 768, 2048, 3 * 16 * 16
    block = 4 * width * width + 4 * width + 2 * 64 + 2 * width  # attention with biases, gains of all norms
    block += 3 * width * hidden + 2 * hidden + width + 6 * width * (width + 1)  # SwiGLU, modulation
    rest = patch * 128 + 128 * width + width + 256 * width + width + width * width + width  # patches, time
    rest += 1001 * width + 32 * width + 2 * width * (width + 1) + width + width * patch + patch  # class, final layer
    assert sum(p.numel() for p in model.parameters()) == 12 * block + rest == 131_123_712


def test_names_give_sizes_and_any_patch() -> None:
    assert parse("JiT-B/4") == ((768, 12, 12, 128, 4), 4)
    assert parse("JiT-H/32") == ((1280, 32, 16, 256, 10), 32)
    assert parse("JiT-L/7")[1] == 7
    for name in ("JiT-M/4", "JiT-B", "JiT-B/0", "DiT-B/4", "JiT-B/4x", "JiT-B/-4"):
        with pytest.raises(ValueError, match=f"JiT-B/16, not '{name}'"):
            parse(name)
    with pytest.raises(ValueError, match="multiple of the patch size 2, not 9"):
        JiT(SIZES["Nano"], patch=2, side=9, classes=10)


def test_another_depth_keeps_the_share_without_class_tokens() -> None:
    model = build("JiT-Nano/8", side=16, classes=3, depth=8)
    assert isinstance(model, JiT) and len(model.blocks) == 8 and model.start == 2
    for depth in (1, 2, 3):
        assert build("JiT-Nano/8", side=16, classes=3, depth=depth).start < depth


def test_a_new_model_answers_zero() -> None:
    z, t, label = inputs()
    out = tiny(awake=False)(z, t, label)
    assert out.shape == z.shape and not out.any()


@pytest.mark.parametrize(("start", "seen"), [(0, [20, 20, 20]), (1, [16, 20, 20]), (2, [16, 16, 20])])
def test_class_tokens_join_at_their_block_and_are_dropped(start: int, seen: list[int]) -> None:
    assert lengths(tiny(start=start)) == [*seen, 16]
    assert lengths(tiny(start=start, class_tokens=0)) == [16] * 4


def test_what_is_dropped_are_the_class_tokens() -> None:
    model = tiny()
    caught: list[Tensor] = []
    model.blocks[-1].register_forward_hook(lambda _, args, out: caught.append(out))
    model.final.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    model(*inputs())
    assert torch.equal(caught[1], caught[0][:, 4:])


def test_class_tokens_stand_first_and_carry_the_class() -> None:
    model = tiny(start=1)
    caught: list[Tensor] = []
    model.blocks[1].register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    z, t, label = inputs()
    model(z, t, label)
    assert model.class_tokens is not None
    torch.testing.assert_close(caught[0][:, :4], model.label(label)[:, None] + model.class_tokens)
    before = model(z, t, label)
    with torch.no_grad():
        model.class_tokens += torch.randn_like(model.class_tokens)
    assert not torch.allclose(model(z, t, label), before, atol=1e-4), "they take part"


def test_no_class_tokens_is_the_same_model_without_them() -> None:
    with_tokens, without = tiny(awake=False).state_dict(), tiny(class_tokens=0, awake=False).state_dict()
    for key, value in without.items():
        assert torch.equal(with_tokens.pop(key), value), f"{key} drew other initial weights"
    assert list(with_tokens) == ["class_tokens"]


def test_attention_scores_depend_on_how_far_apart_patches_are() -> None:
    rows, features = 5, 16
    angles = rotary_angles(features, rows)
    torch.manual_seed(0)
    q, k = torch.randn(2, features, dtype=torch.float64)
    turned_q, turned_k = (rotate(x.expand(rows * rows, -1), angles.cos(), angles.sin()) for x in (q, k))
    scores = (turned_q @ turned_k.T).view(rows, rows, rows, rows)  # row, column of q; row, column of k
    torch.testing.assert_close(scores[1:, :, 1:], scores[:-1, :, :-1], rtol=1e-12, atol=1e-12)  # a row further, both
    torch.testing.assert_close(scores[:, 1:, :, 1:], scores[:, :-1, :, :-1], rtol=1e-12, atol=1e-12)
    distances = scores[2, 2].flatten()
    assert len(distances.unique()) == rows * rows, "every other offset has another score, rows unlike columns"
    assert scores[0, 0, 0, 0].item() == pytest.approx((q @ k).item()), "no distance, no turn"


def test_rotation_keeps_lengths_and_follows_row_and_column() -> None:
    angles = rotary_angles(16, 3, before=2)
    assert angles.shape == (2 + 9, 8) and not angles[:2].any(), "tokens without a place are not turned"
    rate = 10_000 ** (-torch.arange(4, dtype=torch.float64) / 4)
    torch.testing.assert_close(angles[2 + 5], torch.cat([1 * rate, 2 * rate]))  # patch 5 of 3 per row: row 1, column 2
    x = torch.randn(11, 16, dtype=torch.float64)
    y = rotate(x, angles.cos(), angles.sin())
    torch.testing.assert_close(x.norm(dim=1), y.norm(dim=1))
    pair = torch.complex(x[:, 3], x[:, 11]) * torch.exp(1j * angles[:, 3])
    torch.testing.assert_close(torch.complex(y[:, 3], y[:, 11]), pair)


def test_attention_is_the_formula() -> None:
    torch.manual_seed(0)
    layer = Attention(16, 2, qk_norm=True).double()
    nn.init.normal_(layer.q_norm.weight), nn.init.normal_(layer.k_norm.weight)
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    angles = rotary_angles(8, 3)
    cosine, sine = angles.cos(), angles.sin()
    q, k, v = (x @ layer.qkv.weight.T + layer.qkv.bias)[0].chunk(3, dim=1)
    heads = []
    for h in range(2):
        part = slice(8 * h, 8 * h + 8)
        a, b = (
            rotate(y[:, part] / (y[:, part].square().mean(1, keepdim=True) + 1e-6).sqrt() * gain, cosine, sine)
            for y, gain in ((q, layer.q_norm.weight), (k, layer.k_norm.weight))
        )
        heads.append((a @ b.T / math.sqrt(8)).softmax(1) @ v[:, part])
    expected = torch.cat(heads, dim=1) @ layer.out.weight.T + layer.out.bias
    torch.testing.assert_close(layer(x, (cosine, sine))[0], expected, rtol=1e-10, atol=1e-10)


def test_swiglu_is_the_formula_with_two_thirds_of_the_usual_width() -> None:
    layer = SwiGLU(30, 0.0).double()
    assert layer.out.in_features == 80
    x = torch.randn(4, 30, dtype=torch.float64)
    inner = x @ layer.gate_and_value.weight.T + layer.gate_and_value.bias
    gate, value = inner[:, :80], inner[:, 80:]
    torch.testing.assert_close(layer(x), layer.out(gate * gate.sigmoid() * value))


def test_patches_are_squeezed_through_the_bottleneck() -> None:
    squeeze, widen = tiny().patchify
    assert (squeeze.in_features, squeeze.out_features, widen.out_features) == (12, 6, 32)
    assert squeeze.bias is None


@pytest.mark.parametrize("what", ["time", "label", "place", "none"])
def test_the_output_depends_on_every_input(what: str) -> None:
    model = tiny()
    z, t, label = inputs()
    before = model(z, t, label)
    if what == "time":
        after = model(z, t + 0.1, label)
    elif what == "place":
        after = model(z.roll(4, 3), t, label).roll(-4, 3)
    else:
        after = model(z, t, torch.full_like(label, model.none if what == "none" else 7))
    assert not torch.allclose(after, before, atol=1e-4)


def test_samples_do_not_touch_one_another() -> None:
    model = tiny().double()
    z, t, label = inputs(4)
    z, t = z.double(), t.double()
    one_by_one = [model(z[i : i + 1], t[i : i + 1], label[i : i + 1]) for i in range(4)]
    torch.testing.assert_close(torch.cat(one_by_one), model(z, t, label), rtol=1e-12, atol=1e-12)
    assert model(z, t, label).dtype == torch.float64


def test_bfloat16_autocast_is_close() -> None:
    model = tiny()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(*inputs())
    assert (out.float() - model(*inputs())).abs().mean() < 0.05 * out.float().abs().mean()


def test_every_parameter_gets_a_gradient() -> None:
    model = tiny()
    model(*inputs()).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_dropout_is_in_the_middle_half_alone() -> None:
    model = tiny(depth=8, dropout=0.3)
    having = [any(isinstance(m, nn.Dropout) for m in b.modules()) for b in model.blocks if isinstance(b, Block)]
    assert having == [False] * 2 + [True] * 4 + [False] * 2
    assert not any(isinstance(m, nn.Dropout) for m in tiny(depth=8).modules())
